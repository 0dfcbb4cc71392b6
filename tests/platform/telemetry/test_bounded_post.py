"""An endpoint that answers without end, or hardly at all, costs a bounded number of bytes and seconds."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from footplate.platform.telemetry.bounded_post import MAX_ANSWER_BYTES, Poster

OK = b"HTTP/1.1 200 OK\r\n"
PIECE = b"x" * 65_536


@contextmanager
def answering(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server that reads a request's beginning and then does as told; each connection once."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            with client:
                try:
                    client.recv(65_536)
                    answer(client)
                except OSError:
                    pass

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/otlp"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(10)


def drip(start: bytes, unit: bytes) -> Callable[[socket.socket], None]:
    over = threading.Event()

    def answer(client: socket.socket) -> None:
        client.sendall(start)
        while not over.wait(0.05):
            client.sendall(unit)

    return answer


@pytest.mark.parametrize("head", [OK + b"content-length: 1073741824\r\n\r\n", OK + b"\r\n"])
def test_a_long_answer_is_read_no_further_than_its_bound(head: bytes) -> None:
    num_sent: list[int] = []

    def flood(client: socket.socket) -> None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65_536)
        client.sendall(head)
        total = 0
        try:
            while total < 1 << 30:
                total += client.send(PIECE)
        finally:
            num_sent.append(total)

    with answering(flood) as url:
        poster = Poster(url, {}, 5.0)
        assert poster.post("/v1/traces", b"body")[0] == 200
    # What the kernel took into its buffers, and not the gigabyte.
    assert num_sent[0] < 16 << 20


def test_a_head_without_end_is_no_answer() -> None:
    with answering(drip(OK, b"a: " + b"x" * (MAX_ANSWER_BYTES // 4) + b"\r\n")) as url:
        assert Poster(url, {}, 10.0).post("/v1/traces", b"body") == (0, "")


@pytest.mark.parametrize(
    ("start", "status"), [(b"", 0), (OK, 0), (OK + b"content-length: 1000\r\n\r\n", 200)]
)
def test_one_byte_now_and_then_does_not_hold_a_call_beyond_its_limit(start: bytes, status: int) -> None:
    with answering(drip(start, b"x")) as url:
        begun = time.monotonic()
        assert Poster(url, {}, 0.3).post("/v1/traces", b"body")[0] == status
        assert time.monotonic() - begun < 3


def test_a_body_that_nobody_reads_does_not_hold_a_call_either() -> None:
    over = threading.Event()
    with answering(lambda _: over.wait(20) and None) as url:
        begun = time.monotonic()
        assert Poster(url, {}, 0.3).post("/v1/traces", b"x" * (64 << 20)) == (0, "")
        assert time.monotonic() - begun < 3
        over.set()


def test_a_connection_is_kept_after_a_short_answer() -> None:
    seen: list[bytes] = []

    def twice(client: socket.socket) -> None:
        client.sendall(OK + b"retry-after: 3\r\ncontent-length: 2\r\n\r\n{}")
        seen.append(client.recv(65_536))
        client.sendall(b"HTTP/1.1 503 Busy\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n")

    with answering(twice) as url:
        poster = Poster(url, {"authorization": "x"}, 5.0)
        assert poster.post("/v1/traces", b"one") == (200, "3")
        assert poster.post("/v1/logs", b"two") == (503, "")
        poster.close()
    head, _, body = seen[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /otlp/v1/logs HTTP/1.1\r\nhost: 127.0.0.1:") and body == b"two"
    assert b"authorization: x" in head and b"content-length: 3" in head
