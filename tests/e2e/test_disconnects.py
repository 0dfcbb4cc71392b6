"""Clients that leave: their generations end at once, whatever the client's shape and whatever came before."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.e2e.serve_process import SMALL, ServeProcess

pytestmark = pytest.mark.e2e
# Statistics travel twice a second. A generation that nobody ends would run for half a minute and more.
GONE_S = 4.0
BODY: dict[str, Any] = {"model": SMALL, "prompt": "Count:", "max_tokens": 1900, "ignore_eos": True}

Leave = Callable[[ServeProcess], None]


def leave_mid_stream(served: ServeProcess) -> None:
    with (
        served.http() as http,
        http.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as answer,
    ):
        lines = answer.iter_lines()
        while not next(lines).startswith("data: "):
            pass
        served.await_running()


def leave_by_timeout(served: ServeProcess) -> None:
    """httpx sends head and body apart; the proxy must see such a client leave as well as any other."""
    with pytest.raises(httpx.ReadTimeout), served.http(timeout_s=1) as http:
        http.post("/v1/completions", json=BODY)


def leave_by_close(served: ServeProcess, *, stream: bool = False, is_apart: bool = False) -> None:
    with connect(served) as connection:
        send(connection, served, {**BODY, "stream": stream}, is_apart=is_apart)
        served.await_running()


def leave_by_reset(served: ServeProcess) -> None:
    with connect(served) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        send(connection, served, BODY, is_apart=True)
        served.await_running()


def leave_by_half_close(served: ServeProcess) -> None:
    """A client that ends its sending side counts as gone, or gets its answer; it doesn't hang."""
    with connect(served) as connection:
        send(connection, served, BODY)
        served.await_running()
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(GONE_S)
        connection.recv(65536)


def leave_before_the_first_byte(served: ServeProcess) -> None:
    with connect(served) as connection:
        send(connection, served, {**BODY, "stream": True})


def leave_against_the_proxys_wishes(served: ServeProcess) -> None:
    """Headers by which Serve lets clients switch its watch off."""
    with connect(served) as connection:
        send(connection, served, BODY, headers="x-request-disconnect-disabled: ?1\r\n", is_apart=True)
        served.await_running()


LEAVES: dict[str, Leave] = {
    "mid-stream": leave_mid_stream,
    "time-out": leave_by_timeout,
    "close": leave_by_close,
    "close, head and body apart": lambda served: leave_by_close(served, is_apart=True),
    "close of a stream, head and body apart": lambda served: leave_by_close(
        served, stream=True, is_apart=True
    ),
    "reset": leave_by_reset,
    "half-close": leave_by_half_close,
    "before the first byte": leave_before_the_first_byte,
    "with Serve's own headers": leave_against_the_proxys_wishes,
}


@pytest.mark.parametrize("leave", LEAVES.values(), ids=LEAVES.keys())
def test_a_client_that_leaves_ends_its_generation(served: ServeProcess, leave: Leave) -> None:
    leave(served)
    served.await_idle(GONE_S)
    served.await_settled(timeout_s=GONE_S)


def test_clients_that_leave_one_after_another_on_warm_connections(served: ServeProcess) -> None:
    for leave in (leave_mid_stream, leave_by_timeout, leave_mid_stream, leave_by_timeout):
        leave(served)
    served.await_idle(GONE_S)


def test_those_who_stay_get_their_answers_while_others_leave(served: ServeProcess) -> None:
    body = {**BODY, "max_tokens": 24, "temperature": 0}
    with served.http() as http:
        alone = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
        with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
            lines = answer.iter_lines()
            first = next(lines)
            leave_before_the_first_byte(served)
            leave_by_timeout(served)
            events = [line[6:] for line in [first, *lines] if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1]) == alone
    served.await_idle(GONE_S)


def connect(served: ServeProcess) -> socket.socket:
    host, port = served.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=10)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def send(
    connection: socket.socket,
    served: ServeProcess,
    body: dict[str, Any],
    *,
    headers: str = "",
    is_apart: bool = False,
) -> None:
    data = json.dumps(body).encode()
    if is_apart:
        headers += "Expect: 100-continue\r\n"
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {served.key()}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n{headers}\r\n"
    ).encode()
    if not is_apart:
        connection.sendall(head + data)
        return
    # The server asks for the body once it has taken the head in.
    connection.sendall(head)
    received = b""
    while b"100 Continue\r\n\r\n" not in received:
        received += connection.recv(1024) or pytest.fail(f"no 100 Continue: {received!r}")
    connection.sendall(data)
