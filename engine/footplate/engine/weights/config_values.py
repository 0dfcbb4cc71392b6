"""Numbers of a model's description, each refused by name where it is none that a model could have."""

from __future__ import annotations

import math
from typing import Any

from footplate.engine.errors import LoadError

_MAX_INTEGER = 1 << 53  # beyond it floats, which some files write them as, skip integers


def checked_number(value: Any, where: str, *, zero: bool = False) -> float:
    """A finite number above 0, or from 0 on with `zero`. Raises LoadError that begins with `where`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise LoadError(f"{where} is {_shown(value)}, a number is needed")
    if isinstance(value, int) and abs(value) > _MAX_INTEGER:
        raise LoadError(f"{where} is beyond what any model has")
    if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        least = "a finite number of at least 0" if zero else "a finite number above 0"
        raise LoadError(f"{where} is {value!r}, {least} is needed")
    return value


def checked_integer(value: Any, where: str, *, zero: bool = False) -> int:
    """A whole number of at least 1, or 0 with `zero`. Raises LoadError that begins with `where`."""
    number = checked_number(value, where, zero=zero)
    if number != int(number):
        raise LoadError(f"{where} is {number!r}, an integer is needed")
    return int(number)


def checked_ids(value: Any, where: str) -> tuple[int, ...]:
    """One token id, several in a list, or none. Raises LoadError that begins with `where`."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    return tuple(checked_integer(each, where, zero=True) for each in ids)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
