"""Forms of several parts, however their bytes come."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from footplate.engine.errors import InvalidRequest
from footplate.platform.http.multipart import MultipartParser, PartBegin, PartEnd, boundary_of

HEAD = b'--b\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n'
FILE = b'--b\r\nContent-Disposition: form-data; name="file"; filename="%s"\r\nContent-Type: x/y\r\n\r\n%s\r\n'
END = b"--b--\r\n"


def parse(data: bytes, piece: int = 1 << 20) -> list[tuple[str, str | None, bytes]]:
    parser = MultipartParser(b"b")
    found: list[tuple[str, str | None, bytes]] = []
    for begin in range(0, len(data), piece):
        for event in parser.feed(data[begin : begin + piece]):
            if isinstance(event, PartBegin):
                found.append((event.name, event.filename, b""))
            elif not isinstance(event, PartEnd):
                name, filename, before = found.pop()
                found.append((name, filename, before + event))
    parser.close()
    return found


@given(
    st.lists(
        st.sampled_from([b"\r", b"\n", b"-", b"--", b"b", b"x", b"\r\n--", b"\r\n-", b"\0"]), max_size=30
    ),
    st.integers(1, 40),
)
def test_bytes_come_out_as_they_went_in_whatever_they_look_like(parts: list[bytes], piece: int) -> None:
    content = b"".join(parts).replace(b"\r\n--b", b"")
    if b"\r\n--b" in b"\r\n" + content:
        return
    data = HEAD % (b"purpose", b"batch") + FILE % (b"a.jsonl", content) + END
    assert parse(data, piece) == [("purpose", None, b"batch"), ("file", "a.jsonl", content)]


def test_names_are_read_as_clients_write_them() -> None:
    data = FILE % ('\u00e4 \\"b\\".txt'.encode(), b"") + END + b"epilogue"
    assert parse(data) == [("file", '\u00e4 "b".txt', b"")]
    assert boundary_of('multipart/form-data; charset=utf-8; boundary="a b"') == b"a b"
    assert boundary_of("Multipart/Form-Data;boundary=xyz") == b"xyz"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no form",
        b"--b",
        b"--bx\r\n",
        HEAD % (b"a", b"b"),
        b"--b\r\n\r\n\r\n" + END,
        b"--b\r\nContent-Disposition: form-data\r\n\r\n\r\n" + END,
        b"--b\r\n" + b"x" * 10_000,
        b"--b" + b" " * 10_000,
        HEAD % (b"a", b"") * 30 + END,
    ],
)
def test_what_is_no_form_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse(data, 7)


@pytest.mark.parametrize(
    "kind", ["", "application/json", "multipart/form-data", "multipart/form-data; boundary="]
)
def test_a_form_says_what_it_is(kind: str) -> None:
    with pytest.raises(InvalidRequest):
        boundary_of(kind)
