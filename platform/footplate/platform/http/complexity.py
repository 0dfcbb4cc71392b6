"""A cheap look at a body before it is parsed: parsing makes an object of every value, on the event loop.

A megabyte of text is one value and costs next to nothing; a megabyte of `[1],[1],` is a quarter of a million
lists, and other clients' answers wait while they are made. So they do while a fault is described for every
key that an object should not have.
"""

from __future__ import annotations

import re

from footplate.platform.errors import BodyTooComplex

MAX_CONTAINERS = 20_000  # lists and objects
MAX_VALUES = 1_500_000  # a batch of long prompts as token ids
MAX_TEXTS = 200_000  # names of parameters and texts: some for each object
MAX_KEYS = 1_024  # of one object: as many as `logit_bias` may have
MAX_ALL_KEYS = 100_000  # of all objects
_OF_OBJECTS = re.compile(rb"[{}:]")


def check_complexity(data: bytes, max_keys: int = MAX_KEYS) -> None:
    """Takes time that grows with the length of `data` and no faster, whether or not it is JSON.

    Raises:
        BodyTooComplex: it holds too many lists and objects, values, texts, or keys (of one object
            over `max_keys`).
    """
    if _is_simple(data, max_keys):
        return
    # Text may hold as many brackets, commas and colons as it likes.
    bare = _without_texts(data)
    if _containers(bare) > MAX_CONTAINERS or bare.count(b",") > MAX_VALUES:
        found = f"{_containers(bare)} lists and objects and {bare.count(b',')} values"
        limits = f"{MAX_CONTAINERS} and {MAX_VALUES}"
        raise BodyTooComplex(f"The body holds {found}; the limits are {limits}.")
    num_keys = bare.count(b":")
    if num_keys > MAX_ALL_KEYS:
        raise BodyTooComplex(f"The body's objects hold {num_keys} keys; the limit is {MAX_ALL_KEYS}.")
    if num_keys > max_keys:
        _check_keys(bare, max_keys)


def _is_simple(data: bytes, max_keys: int) -> bool:
    return (
        _containers(data) <= MAX_CONTAINERS
        and data.count(b",") <= MAX_VALUES
        and data.count(b":") <= max_keys
    )


def _containers(data: bytes) -> int:
    return data.count(b"[") + data.count(b"{")


def _without_texts(data: bytes) -> bytes:
    """What stands outside of texts; one that does not end goes on to the end of the body.

    An expression for a whole text would look for its end anew from every quote inside it.
    """
    # In this order: a backslash that is escaped escapes nothing.
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    num_texts = plain.count(b'"') // 2
    if num_texts > MAX_TEXTS:
        raise BodyTooComplex(f"The body holds {num_texts} texts and names; the limit is {MAX_TEXTS}.")
    return b"".join(plain.split(b'"')[::2])


def _check_keys(bare: bytes, max_keys: int) -> None:
    """Count the keys of each object; a colon belongs to the innermost open one."""
    counts = [0]
    for found in _OF_OBJECTS.finditer(bare):
        sign = found[0]
        if sign == b":":
            counts[-1] += 1
            if counts[-1] > max_keys:
                raise BodyTooComplex(f"An object in the body has more than {max_keys} keys, the limit.")
        elif sign == b"{":
            counts.append(0)
        elif len(counts) > 1:
            counts.pop()
