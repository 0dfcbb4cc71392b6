"""What bad input gets over real sockets: an error in the API's shape, and everybody else is still served."""

from __future__ import annotations

import contextlib
import json
import select
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.serve_process import SMALL, ServeProcess
from tests.e2e.test_disconnects import connect

pytestmark = pytest.mark.e2e
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LIMIT = 16 << 20


@pytest.fixture(autouse=True)
def a_normal_call_works_afterwards(served: ServeProcess) -> Iterator[None]:
    yield
    with served.http() as http:
        answer = http.post(TEXT, json={"model": SMALL, "prompt": "Hello", "max_tokens": 2})
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] > 0


def text(**fields: Any) -> bytes:
    return json.dumps({"model": SMALL, "prompt": "Hi", "max_tokens": 2, **fields}).encode()


def chat(**fields: Any) -> bytes:
    return json.dumps({"model": SMALL, "messages": [{"role": "user", "content": "Hi"}], **fields}).encode()


BODIES: dict[str, tuple[str, bytes, int, str | None]] = {
    "too many ids": (TEXT, text(prompt=[1] * 100_000), 400, "context_length_exceeded"),
    "too long a text": (TEXT, text(prompt="word " * 200_000), 400, "context_length_exceeded"),
    "too long a chat": (
        CHAT,
        chat(messages=[{"role": "user", "content": "word " * 200_000}]),
        400,
        "context_length_exceeded",
    ),
    "more tokens than fit": (TEXT, text(max_tokens=2**30), 400, "context_length_exceeded"),
    "empty prompt": (TEXT, text(prompt=""), 400, "invalid_value"),
    "no ids": (TEXT, text(prompt=[]), 400, "invalid_value"),
    "no ids in a list": (TEXT, text(prompt=[[]]), 400, "invalid_value"),
    "no messages": (CHAT, chat(messages=[]), 400, "invalid_value"),
    "wrong type of messages": (CHAT, chat(messages="Hi"), 400, "invalid_value"),
    "wrong type of a number": (TEXT, text(temperature="hot"), 400, "invalid_value"),
    "wrong type of a flag": (TEXT, text(stream="yes"), 400, "invalid_value"),
    "wrong type of a body": (TEXT, b'["a"]', 400, "invalid_value"),
    "mixed prompt": (TEXT, text(prompt=["a", 1]), 400, "invalid_value"),
    "ids below zero": (TEXT, text(prompt=[-1]), 400, "invalid_value"),
    "ids beyond the vocabulary": (TEXT, text(prompt=[10**6]), 400, "invalid_value"),
    "huge ids": (TEXT, text(prompt=[10**30]), 400, "invalid_value"),
    "NaN": (TEXT, text(temperature=float("nan")), 400, None),
    "infinity": (TEXT, text(top_p=float("inf")), 400, None),
    "a number beyond floats": (TEXT, text().replace(b'"max_tokens": 2', b'"temperature": 1e999'), 400, None),
    "a huge number": (TEXT, text(seed=10**40), 400, "invalid_value"),
    "a huge n": (TEXT, text(n=10**9), 400, "invalid_value"),
    "bad UTF-8": (TEXT, text().replace(b"Hi", b"\xff\xfe\x80"), 400, "invalid_json"),
    "a lone surrogate": (TEXT, text().replace(b"Hi", b"\\ud800"), 400, None),
    "bad JSON": (CHAT, b"{", 400, "invalid_json"),
    "deep JSON": (CHAT, b"[" * 100_000, 400, "invalid_json"),
    "no body": (CHAT, b"", 400, "invalid_json"),
    "unknown parameter": (CHAT, chat(temprature=1), 400, "unsupported_parameter"),
    "unknown model": (CHAT, chat(model="nobody"), 404, "model_not_found"),
    "unknown path": ("/v1/nothing", chat(), 404, "unknown_url"),
    "encoded path": ("/v1/%ff%00/..%2f", chat(), 404, "unknown_url"),
}


@pytest.mark.parametrize("case", BODIES.values(), ids=BODIES.keys())
def test_a_bad_body_gets_an_error_in_the_apis_shape(
    served: ServeProcess, case: tuple[str, bytes, int, str | None]
) -> None:
    path, body, status, code = case
    with served.http() as http:
        answer = http.post(path, content=body, headers={"content-type": "application/json"})
    check_error(answer, status, code)
    assert b"word word" not in answer.content


def test_a_method_that_a_path_does_not_answer(served: ServeProcess) -> None:
    with served.http() as http:
        check_error(http.get(CHAT), 405, "method_not_allowed")
        check_error(http.delete("/v1/models"), 405, "method_not_allowed")


@pytest.mark.parametrize("is_chunked", [False, True], ids=["announced", "chunked"])
def test_a_body_over_the_limit_is_refused_before_it_is_read(served: ServeProcess, is_chunked: bool) -> None:
    """100 MB are offered; what was not read when the answer came is not sent."""
    length = "Transfer-Encoding: chunked" if is_chunked else "Content-Length: 104857600"
    with connect(served) as connection:
        connection.sendall(head(served, length))
        sent = push(connection, 100 << 20, is_chunked=is_chunked)
        answer = read_answer(connection)
    assert answer.startswith(b"HTTP/1.1 413"), answer[:200]
    assert b'"request_too_large"' in answer
    # The limit, and what sockets and the proxy hold on the way.
    assert sent < LIMIT * (2 if is_chunked else 1) + (16 << 20)


def test_what_is_no_http_is_refused_and_closed(served: ServeProcess) -> None:
    for data in (
        b"\0" * 64 + b"\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST\r\n\r\n",
        b"\x16\x03\x01\x02\0\1",
    ):
        with connect(served) as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            answer = read_answer(connection)
        # Where the proxy can't parse, its own page; what passes for HTTP may reach the app before the close.
        assert answer == b"" or answer.split()[1] in (b"400", b"404", b"405"), answer


def test_clients_that_never_finish_their_request_hold_nobody_up(served: ServeProcess) -> None:
    beginnings = (
        b"POST /v1/chat",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n",
        head(served, "Content-Length: 1000"),
        head(served, "Content-Length: 1000") + b'{"model": ',
        head(served, "Transfer-Encoding: chunked") + b'5\r\n{"mod',
    )
    with contextlib.ExitStack() as stack:
        for beginning in beginnings * 10:
            stack.enter_context(connect(served)).sendall(beginning)
        with served.http(timeout_s=20) as http:
            for _ in range(3):
                assert http.post(TEXT, content=text()).status_code == 200


def test_a_body_that_comes_in_small_pieces_is_taken(served: ServeProcess) -> None:
    data = chat(max_tokens=2)
    with connect(served) as connection:
        connection.sendall(head(served, f"Content-Length: {len(data)}\r\nConnection: close"))
        for position in range(len(data)):
            connection.sendall(data[position : position + 1])
        answer = read_answer(connection)
    assert answer.startswith(b"HTTP/1.1 200")


def check_error(answer: httpx.Response, status: int, code: str | None) -> None:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    if code is not None:
        assert error["code"] == code, error
    assert answer.headers["x-request-id"].startswith("req_")


def head(served: ServeProcess, length: str) -> bytes:
    return (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {served.key()}\r\n"
        f"Content-Type: application/json\r\n{length}\r\n\r\n"
    ).encode()


def push(connection: socket.socket, num_bytes: int, *, is_chunked: bool) -> int:
    """Send until all is sent, an answer is there, or the peer takes no more; bytes that went out."""
    piece = b" " * 65536
    data = b"10000\r\n" + piece + b"\r\n" if is_chunked else piece
    sent = 0
    connection.settimeout(5)
    with contextlib.suppress(OSError):
        while sent < num_bytes and not has_answer(connection):
            connection.sendall(data)
            sent += len(piece)
    return sent


def has_answer(connection: socket.socket) -> bool:
    return bool(select.select([connection], [], [], 0)[0])


def read_answer(connection: socket.socket) -> bytes:
    """All that comes until the peer closes or has answered with an announced body."""
    connection.settimeout(20)
    answer = b""
    with contextlib.suppress(ConnectionError):
        while piece := connection.recv(65536):
            answer += piece
            before, _, body = answer.partition(b"\r\n\r\n")
            lengths = [line for line in before.lower().split(b"\r\n") if line.startswith(b"content-length:")]
            if lengths and len(body) >= int(lengths[0].split(b":")[1]):
                break
    return answer
