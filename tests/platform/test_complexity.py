"""Bodies that would make millions of objects are refused before any is made; long texts are not."""

from __future__ import annotations

import pytest

from footplate.platform.errors import BodyTooComplex
from footplate.platform.http.complexity import (
    MAX_ALL_KEYS,
    MAX_CONTAINERS,
    MAX_KEYS,
    MAX_VALUES,
    check_complexity,
)
from footplate.platform.http.schemas import MAX_LOGIT_BIASES, ChatMessage, CompletionBody, parse_body


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


@pytest.mark.parametrize("end", [b"", b"\\", b'"'])
def test_a_text_that_does_not_end_is_looked_at_once(end: bytes) -> None:
    # Two megabytes: a look from every quote to the end would take longer than any test may.
    body = b"[" * (MAX_CONTAINERS + 1) + b'"' + b'\\"' * 1_000_000 + end
    with pytest.raises(BodyTooComplex):
        check_complexity(body)


def _objects(*num_keys: int) -> bytes:
    objects = (b"{" + b",".join(b'"k%d":{}' % number for number in range(num)) + b"}" for num in num_keys)
    return b'{"messages":[' + b",".join(objects) + b"]}"


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":1,"metadata":{' + b'"":1,' * MAX_KEYS + b'"":1}}',
        b'{"a":{"b":1},' + b'"":1,' * MAX_KEYS + b'"":1}',
        _objects(3, MAX_KEYS + 1),
        b"}}" + b'{"":1,' + b'"":1,' * MAX_KEYS + b'"":1}',
    ],
    ids=["inner", "outer", "in a list", "odd brackets"],
)
def test_an_object_of_too_many_keys_is_refused_before_they_are_parsed(body: bytes) -> None:
    for kind in (CompletionBody, ChatMessage):
        with pytest.raises(BodyTooComplex, match=f"more than {MAX_KEYS} keys"):
            parse_body(kind, body)


def test_many_objects_of_few_keys_are_fine_up_to_the_limit_of_all() -> None:
    check_complexity(_objects(*[5] * 3000, MAX_KEYS))
    check_complexity(b'{"prompt": "' + b"a: {" * 100_000 + b'"}')
    with pytest.raises(BodyTooComplex, match=f"keys; the limit is {MAX_ALL_KEYS}"):
        check_complexity(_objects(*[1000] * 101).replace(b"{}", b"1"))


def test_the_largest_logit_bias_passes() -> None:
    biases = ",".join(f'"{number}":1' for number in range(MAX_LOGIT_BIASES))
    body = parse_body(CompletionBody, f'{{"model":"m","prompt":"a","logit_bias":{{{biases}}}}}'.encode())
    assert body.logit_bias is not None and len(body.logit_bias) == MAX_LOGIT_BIASES
