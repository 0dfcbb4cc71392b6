"""HTTP posts to an endpoint that nobody vouches for: one deadline over a call, few bytes of its answer."""

from __future__ import annotations

import contextlib
import http.client
import io
import socket
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

# Of an answer, head and body: an OTLP receiver's takes some hundred bytes.
MAX_ANSWER_BYTES = 16_384
# Written between two looks at the clock.
_PIECE_BYTES = 65_536


class Poster:
    """Posts to one endpoint, over a connection that is kept while answers are short. For one thread.

    `timeout_s` is for a call: connecting to one address, sending, and the whole of the answer.
    """

    def __init__(self, endpoint: str, headers: Mapping[str, str], timeout_s: float) -> None:
        self._parts = urlsplit(endpoint)
        self._headers = headers
        self._timeout_s = timeout_s
        self._connection: http.client.HTTPConnection | None = None

    def post(self, path: str, body: bytes) -> tuple[int, str]:
        """The status (0: no answer in time) and `Retry-After`. What else the endpoint writes is not kept."""
        until = time.monotonic() + self._timeout_s
        try:
            connection = self._connected()
            _send(connection, self._parts.path.rstrip("/") + path, body, self._headers, until)
            assert connection.sock is not None
            limited: Any = _Limited(connection.sock, until)
            response = http.client.HTTPResponse(limited, method="POST")
            response.begin()
        except (OSError, http.client.HTTPException):
            self.close()
            return 0, ""
        # The status counts whatever becomes of the rest: what was sent has arrived.
        is_whole = False
        with contextlib.suppress(OSError, http.client.HTTPException):
            response.read(MAX_ANSWER_BYTES)
            is_whole = response.isclosed()
        if response.will_close or not is_whole:
            self.close()
        response.close()
        return response.status, response.headers.get("retry-after", "")

    def close(self) -> None:
        """End the connection; the next post makes another."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def _connected(self) -> http.client.HTTPConnection:
        if self._connection is None:
            is_tls = self._parts.scheme == "https"
            kind = http.client.HTTPSConnection if is_tls else http.client.HTTPConnection
            port = self._parts.port or (443 if is_tls else 80)
            connection = kind(self._parts.hostname or "", port, timeout=self._timeout_s)
            connection.connect()
            self._connection = connection
        return self._connection


def _send(
    connection: http.client.HTTPConnection, path: str, body: bytes, headers: Mapping[str, str], until: float
) -> None:
    """One request; the connection is one that has been made."""
    assert connection.sock is not None
    host = connection.host if ":" not in connection.host else f"[{connection.host}]"
    lines = [f"POST {path} HTTP/1.1", f"host: {host}:{connection.port}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    lines += ["content-type: application/x-protobuf", f"content-length: {len(body)}", "", ""]
    whole = "\r\n".join(lines).encode("latin-1") + body
    for begin in range(0, len(whole), _PIECE_BYTES):
        connection.sock.settimeout(_left_s(until))
        connection.sock.sendall(whole[begin : begin + _PIECE_BYTES])


class _Limited:
    """What an `HTTPResponse` takes for a socket: it reads a bounded answer, up to a moment."""

    def __init__(self, sock: socket.socket, until: float) -> None:
        self._reader = _Reader(sock, until)

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(self._reader, 4_096)


class _Reader(io.RawIOBase):
    def __init__(self, sock: socket.socket, until: float) -> None:
        self._sock = sock
        self._until = until
        self._num_left = MAX_ANSWER_BYTES

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Raises OSError: the time is up, or the answer is too long."""
        if not self._num_left:
            raise OSError("the answer is too long")
        # A socket's own limit begins anew with each read.
        self._sock.settimeout(_left_s(self._until))
        num_bytes = self._sock.recv_into(buffer, min(len(buffer), self._num_left))
        self._num_left -= num_bytes
        return num_bytes


def _left_s(until: float) -> float:
    left_s = until - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("the call takes too long")
    return left_s
