"""Bodies that would make millions of objects are refused before any is made; long texts are not."""

from __future__ import annotations

import pytest

from footplate.platform.errors import BodyTooComplex
from footplate.platform.http.complexity import MAX_CONTAINERS, MAX_VALUES, check_complexity
from footplate.platform.http.schemas import ChatMessage, CompletionBody, parse_body


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": [' + b"[1]," * MAX_CONTAINERS + b"[1]]}",
        b'{"messages": [' + b"{}," * MAX_CONTAINERS + b"{}]}",
        b'{"allowed_token_ids": [' + b"1," * (MAX_VALUES + 1) + b"1]}",
        b'{"a": "x\\"", "b": [' + b"[]," * MAX_CONTAINERS + b"[]]}",
    ],
    ids=["prompts", "messages", "ids", "after an escaped quote"],
)
def test_too_many_values_are_counted_not_parsed(body: bytes) -> None:
    for kind in (CompletionBody, ChatMessage):
        with pytest.raises(BodyTooComplex, match=f"{MAX_CONTAINERS} and {MAX_VALUES}"):
            parse_body(kind, body)


@pytest.mark.parametrize("text", ["[{,", '\\"[', "\\\\", "é,["])
def test_what_stands_in_a_text_does_not_count(text: str) -> None:
    body = '{"model": "m", "prompt": "' + text * (MAX_VALUES // 2) + '"}'
    check_complexity(body.encode())
    check_complexity(('{"prompt": [' + '"[", ' * (MAX_CONTAINERS + 5) + '"["]}').encode())
