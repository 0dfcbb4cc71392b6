"""A breaker: after some failures in a row nobody waits for the store, until one trial call finds it back."""

from __future__ import annotations

import time
from collections.abc import Callable


class Breaker:
    """Closed: calls go through. Open: none does, but one trial each `retry_s`. One event loop owns it."""

    def __init__(
        self,
        *,
        max_failures: int = 3,
        retry_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_failures = max_failures
        self._retry_s = retry_s
        self._clock = clock
        self._num_failures = 0
        self._next_trial_at = 0.0

    @property
    def is_open(self) -> bool:
        """Whether the store counts as away."""
        return self._num_failures >= self._max_failures

    def lets_through(self) -> bool:
        """Whether to call the store now. While open, True once each `retry_s`: that caller is the trial."""
        if not self.is_open:
            return True
        if self._clock() < self._next_trial_at:
            return False
        # Set before the trial's answer: a trial that waits must not let others follow it.
        self._next_trial_at = self._clock() + self._retry_s
        return True

    def succeed(self) -> None:
        """The store has answered."""
        self._num_failures = 0

    def fail(self) -> None:
        """The store has not."""
        self._num_failures += 1
        if self.is_open:
            self._next_trial_at = self._clock() + self._retry_s
