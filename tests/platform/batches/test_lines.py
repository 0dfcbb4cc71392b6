"""What is found wrong with a batch's file, piece by piece as it is read, and that none of it is repeated."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from footplate.platform.batches.lines import Limits, LineScanner, read_line
from footplate.platform.batches.values import MAX_SHOWN_FAULTS

CHAT = "/v1/chat/completions"
CANARY = "canary-7719"


def line(custom_id: Any = "a", **changes: Any) -> bytes:
    body = {"model": "m", "messages": [{"role": "user", "content": CANARY}]}
    fields = {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body}
    return json.dumps({**fields, **changes}).encode()


def scan(data: bytes, piece: int = 1 << 20, **limits: int) -> LineScanner:
    scanner = LineScanner(CHAT, Limits(**limits))
    for begin in range(0, len(data), piece):
        scanner.feed(data[begin : begin + piece])
    scanner.close()
    return scanner


def codes(data: bytes, **limits: int) -> list[tuple[str, int | None, str | None]]:
    found = scan(data, **limits).faults
    assert not any(CANARY in fault.message for fault in found)
    return [(fault.code, fault.line, fault.param) for fault in found]


@given(st.integers(1, 400), st.sampled_from([b"\n", b"\r\n", b"\n\n", b"\n \t\n"]), st.booleans())
def test_lines_are_found_where_they_are_however_the_bytes_come(piece: int, end: bytes, is_open: bool) -> None:
    lines = [line(f"id-{number}") for number in range(5)]
    data = b"\xef\xbb\xbf" + end.join(lines) + (b"" if is_open else end)
    scanner = scan(data, piece)
    assert scanner.faults == [] and scanner.model == "m"
    found = [data[span.offset : span.offset + span.num_bytes] for span in scanner.spans]
    assert [read_line(each).custom_id for each in found] == [f"id-{number}" for number in range(5)]
    # As an editor numbers them.
    assert [span.number for span in scanner.spans] == [
        data[: span.offset].count(b"\n") + 1 for span in scanner.spans
    ]


@pytest.mark.parametrize(
    ("data", "code", "param"),
    [
        (b"{" + CANARY.encode(), "invalid_json_line", None),
        (b"\xff\xfe", "invalid_json_line", None),
        (b'{"custom_id":"\xff"}', "invalid_json_line", None),
        (b"[]", "invalid_request", None),
        (b'"text"', "invalid_request", None),
        (line(extra=CANARY), "invalid_request", None),
        (line(custom_id=7), "invalid_request", "custom_id"),
        (line(custom_id=""), "invalid_custom_id", "custom_id"),
        (line(custom_id="x" * 513), "invalid_custom_id", "custom_id"),
        (b"{}", "missing_required_parameter", "custom_id"),
        (line(method="GET"), "invalid_method", "method"),
        (line(url="/v1/completions"), "mismatched_endpoint", "url"),
        (line(url=CANARY), "mismatched_endpoint", "url"),
        (line(body=CANARY), "invalid_request", "body"),
        (line(body={}), "missing_required_parameter", "body.model"),
        (line(body={"model": 3}), "invalid_request", "body.model"),
        (line(body={"model": CANARY * 30}), "model_not_found", "body.model"),
        (line(body={"model": "m", "stream": True}), "streaming_not_supported", "body.stream"),
        (line(body={"model": "m", "stream": CANARY}), "invalid_request", "body.stream"),
        (line(body={"model": "m", "x": [[]] * 30_000}), "request_too_complex", None),
        (b'{"body":' + b"[" * 10_000, "invalid_json_line", None),
    ],
)
def test_each_fault_names_its_line_and_field(data: bytes, code: str, param: str | None) -> None:
    assert codes(line("first") + b"\n" + data + b"\n" + line("last")) == [(code, 2, param)]


def test_names_and_models_are_held_against_the_lines_before() -> None:
    other = line("b", body={"model": "other"})
    data = b"\n".join([line("a"), line("a"), other, line("c", body={"model": "m", "stream": False})])
    assert codes(data) == [("duplicate_custom_id", 2, "custom_id"), ("mismatched_model", 3, "body.model")]


def test_a_file_has_its_bounds() -> None:
    three = b"\n".join(map(line, "abc"))
    assert codes(three, max_lines=3) == []
    assert codes(three, max_lines=2) == [("too_many_requests", None, None)]
    assert codes(three, max_file_bytes=len(three)) == []
    assert codes(three, max_file_bytes=len(three) - 1) == [("file_too_large", None, None)]
    assert codes(three, max_line_bytes=len(line("a"))) == []
    assert codes(three, max_line_bytes=len(line("a")) - 1)[0] == ("request_too_large", 1, None)
    # One that never ends is not gathered.
    endless = LineScanner(CHAT, Limits(max_line_bytes=100))
    for _ in range(50):
        endless.feed(b"x" * 60)
    endless.close()
    assert [(fault.code, fault.line) for fault in endless.faults] == [("request_too_large", 1)]
    for empty in (b"", b"\n \r\n\t"):
        assert codes(empty) == [("empty_file", None, None)]


def test_of_many_faults_the_first_are_shown() -> None:
    found = codes(b"\n".join([b"{"] * 1_000))
    assert found == [("invalid_json_line", number, None) for number in range(1, MAX_SHOWN_FAULTS + 1)]
