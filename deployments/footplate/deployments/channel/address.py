"""Where a gateway's end of the token channel listens: `unix:/path` or `tcp:host:port`."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from footplate.deployments.errors import ChannelError

# sun_path holds 108 bytes with its closing zero.
MAX_UNIX_PATH_BYTES = 107
# A peer on another node whose kernel acknowledges nothing for so long is gone: its machine died, or the way
# there. By itself Linux goes on for a quarter of an hour.
PEER_GONE_S = 5.0


@dataclass(frozen=True, slots=True)
class ChannelAddress:
    """A parsed address. Exactly one of `path` and `host` is set; port 0 asks for a free one."""

    path: str = ""
    host: str = ""
    port: int = 0

    @staticmethod
    def parse(text: str) -> ChannelAddress:
        """Read `unix:/path` or `tcp:host:port`.

        Raises:
            ChannelError: another form, or a socket path the kernel would refuse.
        """
        scheme, _, rest = text.partition(":")
        if scheme == "unix" and rest:
            if len(os.fsencode(rest)) > MAX_UNIX_PATH_BYTES:
                raise ChannelError(
                    f"socket path {rest} is over {MAX_UNIX_PATH_BYTES} bytes; use a shorter folder"
                )
            return ChannelAddress(path=rest)
        host, _, port = rest.rpartition(":")
        if scheme == "tcp" and host and port.isdecimal():
            return ChannelAddress(host=host.strip("[]"), port=int(port))
        raise ChannelError(f"{text!r} is no channel address; write unix:/path or tcp:host:port")

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        return f"tcp:[{self.host}]:{self.port}" if ":" in self.host else f"tcp:{self.host}:{self.port}"


async def listen(address: ChannelAddress, factory: Callable[[], asyncio.Protocol]) -> asyncio.Server:
    """A server at the address. A left-over socket file of a dead gateway is replaced."""
    loop = asyncio.get_running_loop()
    if not address.path:
        return await loop.create_server(factory, address.host, address.port)
    Path(address.path).unlink(missing_ok=True)
    server = await loop.create_unix_server(factory, address.path)
    os.chmod(address.path, 0o600)
    return server


async def dial(address: ChannelAddress, factory: Callable[[], asyncio.Protocol]) -> None:
    """Connect to the address; the protocol made by `factory` then lives with the connection.

    One between nodes is lost `PEER_GONE_S` after the peer's machine vanished, as long as we write to it.

    Raises:
        ChannelError: nothing answers there.
    """
    loop = asyncio.get_running_loop()
    try:
        if address.path:
            await loop.create_unix_connection(factory, address.path)
        else:
            await loop.create_connection(factory, sock=await _connected(address))
    except OSError as error:
        raise ChannelError(f"no gateway answers at {address}: {error.strerror or error}") from error


async def _connected(address: ChannelAddress) -> socket.socket:
    loop = asyncio.get_running_loop()
    [(family, kind, protocol, _, where), *_] = await loop.getaddrinfo(
        address.host, address.port, type=socket.SOCK_STREAM
    )
    connection = socket.socket(family, kind, protocol)
    try:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(PEER_GONE_S * 1000))
        await loop.sock_connect(connection, where)
    except BaseException:
        connection.close()
        raise
    return connection
