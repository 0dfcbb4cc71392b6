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
LIMIT = 8 << 20


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
    "deep JSON": (CHAT, b"[" * 100_000, 400, "invalid_value"),
    "a number of many digits": (
        TEXT,
        text(seed=1).replace(b": 1", b": " + b"1" * 5000),
        400,
        "invalid_value",
    ),
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


@pytest.mark.parametrize(
    ("method", "headers", "status"),
    [
        ("FOO", {}, 405),
        ("post", {}, 405),
        (
            "GET",
            {
                "Upgrade": "websocket",
                "Connection": "Upgrade",
                "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
            },
            400,
        ),
    ],
    ids=["unknown", "lower case", "websocket"],
)
def test_what_the_parsers_behind_would_refuse_in_their_own_words(
    served: ServeProcess, method: str, headers: dict[str, str], status: int
) -> None:
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    with connect(served) as connection:
        connection.sendall(f"{method} /v1/models HTTP/1.1\r\nHost: localhost\r\n{lines}\r\n".encode())
        answer = read_answer(connection)
    first, _, body = answer.partition(b"\r\n\r\n")
    assert first.split()[1] == str(status).encode(), answer
    assert body.startswith(b"{"), answer
    assert json.loads(body)["error"]["message"]
    assert b"\r\nx-request-id: req_" in first.lower()


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


UNREADABLE = {
    "zeros": b"\0" * 64 + b"\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\0\1",
    "a method alone": b"POST\r\n\r\n",
    "an unknown version": b"GET /healthz HTTP/x.y\r\n\r\n",
    "a header with a space": b"GET /healthz HTTP/1.1\r\nHo st: a\r\n\r\n",
    "two lengths": b"POST /healthz HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
    "too long a head": b"GET /healthz HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 200_000 + b"\r\n\r\n",
}


@pytest.mark.parametrize("data", UNREADABLE.values(), ids=UNREADABLE.keys())
def test_what_is_no_http_is_refused_and_closed(served: ServeProcess, data: bytes) -> None:
    """By a page of HAProxy's parser that no setting changes; see deployments/README.md."""
    with connect(served) as connection:
        # The answer may come, and the connection end, before all is sent.
        with contextlib.suppress(ConnectionError):
            connection.sendall(data)
        answer = read_answer(connection)
    assert answer == b"" or answer.split()[1] == b"400", answer


def test_a_future_version_of_http_is_answered(served: ServeProcess) -> None:
    with connect(served) as connection:
        connection.sendall(b"GET /nothing HTTP/9.9\r\nHost: a\r\nConnection: close\r\n\r\n")
        check_raw_error(read_answer(connection), b"404")


def test_a_half_closed_client_is_told_so(served: ServeProcess) -> None:
    data = text(max_tokens=1900, ignore_eos=True)
    with connect(served) as connection:
        connection.sendall(head(served, f"Content-Length: {len(data)}", TEXT) + data)
        served.await_running()
        connection.shutdown(socket.SHUT_WR)
        answer = read_answer(connection)
    check_raw_error(answer, b"400")
    assert b"closed for sending before the answer was ready" in answer


def test_connections_are_kept_between_requests(served: ServeProcess) -> None:
    data = text()
    with connect(served) as connection:
        for _ in range(3):
            connection.sendall(head(served, f"Content-Length: {len(data)}", TEXT) + data)
            assert read_answer(connection).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("path", ["/-/routes", "/-/healthz", "/%2d/routes", "/-%2Froutes", "/-/"])
def test_serves_own_pages_are_not_shown(served: ServeProcess, path: str) -> None:
    for key in (None, "tenant", "admin"):
        with served.http(key) as http:
            check_error(http.get(path), 404, "unknown_url")


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


def check_raw_error(answer: bytes, status: bytes) -> None:
    before, _, body = answer.partition(b"\r\n\r\n")
    lines = before.lower().split(b"\r\n")
    assert lines[0].split()[1] == status, answer
    assert b"content-type: application/json" in lines
    assert sum(line.startswith(b"x-request-id: req_") for line in lines) == 1, lines
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


def head(served: ServeProcess, length: str, path: str = CHAT) -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {served.key()}\r\n"
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
