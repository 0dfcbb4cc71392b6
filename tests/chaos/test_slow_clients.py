"""Clients that don't read, read or send a byte a second, or never end their headers: nobody else feels them.

Outcome, with the limits that a platform has (the first is 4 s here): a stream of which nothing is read for
60 s is cut, its generation ends, and what was made until then is billed; one that is read a byte a second is
taken for the same once the buffers on its way are full, which hold 256 KiB a client. A head that has not come
whole within 30 s is a 408, and so is a body within 60 s (an upload has 15 minutes); the connection is closed.
Others' first tokens and gaps stay what they were, and memory grows by no more than those buffers.
"""

from __future__ import annotations

import json
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from footplate.deployments.haproxy_wrapper import HEADERS_S
from footplate.deployments.leftovers import wait_until
from footplate.platform.http.edge import EdgeLimits
from tests.chaos.fault_results import keep_result
from tests.chaos.ledger_audit import Load, audit, open_folder, running_platform
from tests.chaos.ledger_stack import MODEL
from tests.chaos.test_random_kills import ROUNDS, SEED
from tests.e2e.serve_process import ServeProcess

STALL_S = 4.0
NUM_OF_EACH = 24
NUM_HEADS = 100
ESTABLISHED = "01"  # as /proc/net/tcp writes it
NUM_MEASURED = 40 if ROUNDS >= 20 else 15
# Four answers beside one another: more than the buffers on the way hold.
STREAM = {"model": MODEL, "prompt": [7] * 20, "max_tokens": 1900, "n": 4, "stream": True}
# What all processes together may take more, for so many clients that don't read: their buffers, twice.
MAX_GROWTH_MB = 150
MEASURED_TOKENS = 64


@dataclass
class SlowClient:
    """One connection. `ended_s`: after how many seconds the server had closed it; `received`: until then."""

    connection: socket.socket
    reads_a_byte: bool = False
    sends_a_byte: bool = False
    began: float = field(default_factory=time.monotonic)
    ended_s: float | None = None
    received: bytes = b""


class Crowd:
    """Slow clients of all kinds, each moved a byte a second by one thread."""

    def __init__(self, served: ServeProcess) -> None:
        self._served = served
        stream = json.dumps(STREAM).encode()
        whole = self._head(len(stream)) + stream
        self.silent = [self._client(whole) for _ in range(NUM_OF_EACH)]
        self.sipping = [self._client(whole, reads_a_byte=True) for _ in range(NUM_OF_EACH)]
        self.dripping = [self._client(self._head(5_000), sends_a_byte=True) for _ in range(NUM_OF_EACH)]
        self.heads = [self._client(b"POST /v1/comp", sends_a_byte=True) for _ in range(NUM_HEADS)]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        for client in self.all():
            client.connection.close()

    def all(self) -> list[SlowClient]:
        return [*self.silent, *self.sipping, *self.dripping, *self.heads]

    def _head(self, num_bytes: int) -> bytes:
        return (
            f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {self._served.key()}"
            f"\r\nContent-Type: application/json\r\nContent-Length: {num_bytes}\r\n\r\n"
        ).encode()

    def _client(self, data: bytes, *, reads_a_byte: bool = False, sends_a_byte: bool = False) -> SlowClient:
        host, port = self._served.url.removeprefix("http://").split(":")
        connection = socket.socket()
        # Before it connects: the window that is offered comes from it.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        connection.sendall(data)
        return SlowClient(connection, reads_a_byte, sends_a_byte)

    def _run(self) -> None:
        while not self._stop.wait(1.0):
            open_ports = self._open_ports()
            for client in self.all():
                if client.ended_s is None:
                    self._move(client, is_over=client.connection.getsockname()[1] not in open_ports)

    def _open_ports(self) -> set[int]:
        """Of clients whose connections the server holds: one that doesn't read never hears of an end."""
        port = int(self._served.url.rpartition(":")[2])
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        return {
            int(remote.rpartition(":")[2], 16)
            for _, local, remote, state, *_ in rows
            if state == ESTABLISHED and int(local.rpartition(":")[2], 16) == port
        }

    @staticmethod
    def _move(client: SlowClient, *, is_over: bool) -> None:
        """One more byte, or all that there is once the server has closed."""
        if is_over:
            client.ended_s = time.monotonic() - client.began
        with suppress(OSError):
            client.connection.setblocking(False)
            if is_over:
                while data := client.connection.recv(1 << 16):
                    client.received += data
            elif client.reads_a_byte:
                client.received += client.connection.recv(1)
            elif client.sends_a_byte:
                client.connection.send(b"a")


@dataclass(frozen=True)
class Figures:
    """Milliseconds."""

    ttft_median: float
    ttft_p95: float
    gap_mean: float
    gap_p95: float


def measure(served: ServeProcess, num_streams: int) -> Figures:
    """What a usual client sees: one stream after another, each on a connection of its own."""
    firsts: list[float] = []
    gaps: list[float] = []
    body = {"model": MODEL, "prompt": [7] * 30, "max_tokens": MEASURED_TOKENS, "stream": True}
    for _ in range(num_streams):
        with served.http() as http:
            asked_at = last_at = time.monotonic()
            with http.stream("POST", "/v1/completions", json=body) as answer:
                assert answer.status_code == 200, answer.read()
                num_events = 0
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        now = time.monotonic()
                        (gaps if num_events else firsts).append(1000 * (now - last_at))
                        last_at, num_events = now, num_events + 1
                assert line == "" or line == "data: [DONE]"
                assert firsts[-1] < 1000 * (time.monotonic() - asked_at)
    highest = [statistics.quantiles(values, n=20)[-1] for values in (firsts, gaps)]
    figures = (statistics.median(firsts), highest[0], statistics.mean(gaps), highest[1])
    return Figures(*(round(value, 2) for value in figures))


def memory_mb(served: ServeProcess) -> float:
    """Of all processes of the run, what no other shares."""
    kb = 0
    for pid in served.processes():
        with suppress(OSError):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            kb += sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))
    return kb / 1024


@contextmanager
def watched_memory(served: ServeProcess) -> Iterator[list[float]]:
    """Megabytes, looked at once a second."""
    found, is_over = [memory_mb(served)], threading.Event()

    def look() -> None:
        while not is_over.wait(1.0):
            found.append(memory_mb(served))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        is_over.set()
        thread.join()


@pytest.fixture
def served() -> Iterator[ServeProcess]:
    with open_folder() as folder, running_platform(folder / "data", stall_s=STALL_S) as process:
        yield process


def test_slow_clients_are_felt_by_nobody_and_end(
    served: ServeProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    load = Load(served, 10**6, SEED)
    load.start(num_clients=1)
    measure(served, 10)
    alone = measure(served, NUM_MEASURED)
    with watched_memory(served) as memory, closing(Crowd(served)) as crowd:
        beside = measure(served, NUM_MEASURED)
        longest_s = {
            "reads nothing": await_end(crowd.silent, 30),
            "reads a byte a second": await_end(crowd.sipping, 30),
            "head a byte a second": await_end(crowd.heads, HEADERS_S + 10),
        }
        assert all(b"408" in client.received for client in crowd.heads)
        if ROUNDS >= 20:
            longest_s["body a byte a second"] = await_end(crowd.dripping, EdgeLimits().max_body_s + 10)
            assert all(b"request_timeout" in client.received for client in crowd.dripping)
    grown_mb = max(memory) - memory[0]
    load.stop()
    report = audit(served, load)
    with capsys.disabled():
        print(f"alone {alone}, beside {beside}, {grown_mb:.0f} MB more, {longest_s}; {report}", flush=True)
    # A busy machine adds its own; one that is held up by slow clients would be by seconds.
    assert beside.ttft_median < 2 * alone.ttft_median + 50 and beside.gap_p95 < 2 * alone.gap_p95 + 50
    assert grown_mb < MAX_GROWTH_MB
    assert not any(b"[DONE]" in client.received for client in crowd.silent)
    keep_result(
        "slow_clients",
        clients={"streams": 2 * NUM_OF_EACH, "bodies": NUM_OF_EACH, "heads": NUM_HEADS},
        stall_s=STALL_S,
        alone=vars(alone),
        beside=vars(beside),
        grown_mb=round(grown_mb),
        ended_after_s=longest_s,
        ledger=report,
    )


def await_end(clients: list[SlowClient], timeout_s: float) -> float:
    """Wait until the server has closed all of them; the longest that it took."""

    def is_over() -> bool:
        return all(client.ended_s is not None for client in clients)

    assert wait_until(is_over, timeout_s, every_s=0.1), [client.ended_s for client in clients]
    return round(max(client.ended_s or 0.0 for client in clients), 1)
