"""Strings that are planted in requests, and all that they must not be found in."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

_FOUND = re.compile(rb"zq[0-9]{5}[nf]kanari", re.IGNORECASE)
_MAX_DEPTH = 3
# Longer than any parameter's name: what an error names is known parameters, and short unknown ones.
_KEY_TAIL = "_" + "k" * 48


@dataclass
class Canaries:
    """Makes strings that no list of characters keeps out, and remembers where each was planted.

    Names that administrators give (`n`) stand in what administrators are answered; all others (`f`) nowhere.
    """

    planted: dict[str, str] = field(default_factory=dict)

    def new(self, place: str, *, is_name: bool = False) -> str:
        """A string for a place."""
        text = f"zq{len(self.planted):05d}{'n' if is_name else 'f'}kanari"
        self.planted[text] = place
        return text

    def found_in(self, data: bytes | str, *, names_too: bool = True) -> list[str]:
        """Where the strings in it were planted."""
        raw = data.encode("utf-8", "surrogateescape") if isinstance(data, str) else data
        found = {match.decode().lower() for match in _FOUND.findall(raw)}
        return sorted(
            f"{text}: {self.planted.get(text, '?')}" for text in found if names_too or text[7] == "f"
        )

    def headers(self, place: str) -> dict[str, str]:
        """Every header that a client may think of."""
        names = (
            "user-agent tracestate baggage x-client-request-id x-request-id openai-organization "
            "openai-project idempotency-key referer cookie origin accept accept-language x-forwarded-for "
            "x-forwarded-host x-stainless-retry-count anthropic-version b3 x-amzn-trace-id"
        ).split()
        found = {name: self.new(f"{place} header {name}") for name in names}
        found["traceparent"] = f"00-{self.new(f'{place} header traceparent')}-00f067aa0ba902b7-01"
        return found

    def query(self, place: str) -> str:
        """A query string with strings in names and values."""
        name = self.new(f"{place} query name") + _KEY_TAIL
        value, limit = self.new(f"{place} query value"), self.new(f"{place} query limit")
        return f"{name}={value}&limit={limit}"


def plantings(
    schema: Mapping[str, Any], base: Any, canaries: Canaries, place: str, *, is_name: bool
) -> Iterator[Any]:
    """Bodies with strings in one field each, of each type; made from the schema, so that none is left out."""
    for path in _paths(schema, schema.get("$defs", {}), ()):
        where = f"{place} {'.'.join(map(str, path))}"
        for value in _values(canaries, where, is_name=is_name):
            yield _with(base, path, value)
    key = canaries.new(f"{place} unknown field", is_name=is_name) + _KEY_TAIL
    yield {**base, key: canaries.new(f"{place} unknown field's value", is_name=is_name)}


def raw_plantings(canaries: Canaries, place: str) -> Iterator[bytes]:
    """Bodies that are no JSON, or not of an object."""
    text = canaries.new(f"{place} broken body").encode()
    yield from (text, b'{"model": "' + text, b'{"' + text + b'": ', b"\xff\xfe" + text, b'"' + text + b'"')
    yield from (
        b'["' + text + b'"]',
        b'{"a": NaN, "' + text + _KEY_TAIL.encode() + b'": 1}',
        text + b"\0",
        b"{" * 300 + text,
    )


def _values(canaries: Canaries, where: str, *, is_name: bool) -> Iterator[Any]:
    new = canaries.new(where, is_name=is_name)
    yield from (new, [new], {new + _KEY_TAIL: new}, [{"type": new, "text": f"{new} {new}"}])


def _paths(
    schema: Mapping[str, Any], defs: Mapping[str, Any], before: tuple[Any, ...]
) -> Iterator[tuple[Any, ...]]:
    if before:
        yield before
    if len(before) >= _MAX_DEPTH:
        return
    for part in _parts(schema, defs):
        for name, inner in part.get("properties", {}).items():
            yield from _paths(inner, defs, (*before, name))
        items = part.get("items")
        if isinstance(items, dict) and before:
            yield from _paths(items, defs, (*before, 0))


def _parts(schema: Mapping[str, Any], defs: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if "$ref" in schema:
        yield from _parts(defs[schema["$ref"].rpartition("/")[2]], defs)
        return
    yield schema
    for name in ("anyOf", "allOf", "oneOf"):
        for inner in schema.get(name, ()):
            yield from _parts(inner, defs)


def _with(base: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy of `base` with a value at a path, which is made where it isn't there."""
    body = copy.deepcopy(base)
    place = body
    for step, following in itertools.pairwise(path):
        inner: Any = [] if isinstance(following, int) else {}
        if isinstance(step, int):
            if not place:
                place.append(inner)
            if not isinstance(place[0], type(inner)):
                place[0] = inner
            place = place[0]
        else:
            if not isinstance(place.get(step), type(inner)):
                place[step] = inner
            place = place[step]
    if isinstance(path[-1], int):
        place[:] = [value]
    else:
        place[path[-1]] = value
    return body
