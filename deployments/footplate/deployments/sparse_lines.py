"""Which lines of a loop that tries again and again are worth writing. Pure but for its clock."""

from __future__ import annotations

import time
from collections.abc import Callable

_MAX_REMEMBERED = 1_024


class SparseLines:
    """A line is due when what it tells is new, and again every `every_s` seconds while it stays so.

    What comes and goes counts as told in between: a loop that fails in two ways in turn tells each once.
    """

    def __init__(self, every_s: float = 300.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._every_s = every_s
        self._clock = clock
        self._told_at: dict[tuple[object, ...], float] = {}

    def is_due(self, *what: object) -> bool:
        """Whether to tell this now; asking counts as telling."""
        now = self._clock()
        told_at = self._told_at.get(what)
        if told_at is not None and now - told_at < self._every_s:
            return False
        if len(self._told_at) >= _MAX_REMEMBERED:
            self._told_at.clear()
        self._told_at[what] = now
        return True
