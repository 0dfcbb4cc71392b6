"""What a replica ends in a second at a given use of it, learnt from what it does. Pure.

The time that a sequence stays grows with its batch, about in a straight line: reading the weights is shared,
each row's own work is not. By Little's law that time is use over rate, so both show in every report, and a
line through them says which rate a fuller batch would have. A replica of which half is used can do much less
than twice as much.
"""

from __future__ import annotations

import math

# What is seen counts half after so long: prompts and answers change during a day.
HALF_LIFE_S = 1800.0
# Until enough was seen, a full batch is taken to stay twice as long as an empty one: this counts as much as
# so many seconds of reports whose use differs by a tenth.
PRIOR_WEIGHT_S = 60.0
_LEAST = 0.02  # of use: below that a report says more of noise than of time


class ServiceRate:
    """A weighted line through (use, seconds of use for each ended request)."""

    def __init__(self) -> None:
        self._weight = self._use = self._time = self._use_use = self._use_time = 0.0

    @property
    def seen_s(self) -> float:
        """For how many seconds a replica was seen at work, older ones counting less."""
        return self._weight

    def observe(self, use: float, rate: float, seconds: float) -> None:
        """A replica had a mean use (0 to 1) and ended `rate` requests a second, for `seconds`."""
        kept = 0.5 ** (seconds / HALF_LIFE_S)
        for name in ("_weight", "_use", "_time", "_use_use", "_use_time"):
            setattr(self, name, getattr(self, name) * kept)
        if use < _LEAST or rate <= 0:
            return
        time = use / rate
        self._weight += seconds
        self._use += seconds * use
        self._time += seconds * time
        self._use_use += seconds * use * use
        self._use_time += seconds * use * time

    def at(self, use: float) -> float:
        """Requests a second of a replica at that use; infinite while nothing was seen."""
        if not self._weight:
            return math.inf
        mean_use, mean_time = self._use / self._weight, self._time / self._weight
        # The prior's line goes through what was seen on average, and doubles from none to all.
        prior = mean_time / (1 + mean_use)
        spread = self._use_use - self._weight * mean_use**2
        together = self._use_time - self._weight * mean_use * mean_time
        prior_spread = PRIOR_WEIGHT_S * 0.1**2
        slope = (together + prior_spread * prior) / (spread + prior_spread)
        slope = min(max(slope, 0.0), mean_time / mean_use)  # no time is negative
        return use / (mean_time + slope * (use - mean_use))
