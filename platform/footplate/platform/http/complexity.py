"""A cheap look at a body before it is parsed: parsing makes an object of every value, on the event loop.

A megabyte of text is one value and costs next to nothing; a megabyte of `[1],[1],` is a quarter of a million
lists, and other clients' answers wait while they are made.
"""

from __future__ import annotations

import re

from footplate.platform.errors import BodyTooComplex

MAX_CONTAINERS = 20_000  # lists and objects
MAX_VALUES = 1_500_000  # a batch of long prompts as token ids
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"')


def check_complexity(data: bytes) -> None:
    """
    Raises:
        BodyTooComplex: the JSON in `data` holds too many lists and objects, or too many values.
    """
    if _is_simple(data):
        return
    # Text may hold as many brackets and commas as it likes.
    bare = _STRING.sub(b"", data)
    if not _is_simple(bare):
        found = f"{_containers(bare)} lists and objects and {bare.count(b',')} values"
        limits = f"{MAX_CONTAINERS} and {MAX_VALUES}"
        raise BodyTooComplex(f"The body holds {found}; the limits are {limits}.")


def _is_simple(data: bytes) -> bool:
    return _containers(data) <= MAX_CONTAINERS and data.count(b",") <= MAX_VALUES


def _containers(data: bytes) -> int:
    return data.count(b"[") + data.count(b"{")
