"""How many replicas a model should have, by what its engines report. Pure: reports and a clock in, a count out.

An engine that decodes is always busy, so neither processor load nor the number of open requests says how much
more it takes. What does: how full its KV cache and its batch are (`use`), and who waits in front of it.

- Up: as many as `use` asks for, with its trend carried on for as long as a replica takes to start. Where more
  wait than may, also as many as the arrivals ask for at the rate at which replicas have been ending requests,
  and what clears the queue; never more than would leave each the queue that it may have.
- Down: only what was never wanted during `calm_s`, with room to spare. So noise moves nothing twice.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

# Reports are taken in at most so often, in seconds.
EVERY_S = 1.0
# The trend of `use` is that of the last so many seconds, told from noise by at least so many points.
TREND_S = 60.0
TREND_POINTS = 10
# A trend may foresee at most so many times what is used now.
MAX_FORESIGHT = 2.0
# A rate of ended requests is a mean over about so many seconds.
RATE_S = 10.0
# A replica is given up only if the others are left below this share of their target.
SPARE = 0.8


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """One engine. `waiting`: requests, batch work left out. `use`: the fuller of its KV cache and its batch,
    0 to 1. `finished`: requests ended since it started."""

    waiting: float
    use: float
    finished: float


@dataclass(frozen=True, slots=True)
class ScalingTarget:
    """Bounds and aims. `lead_s`: how long a replica takes to start. `clear_s`: in what time a queue shall be
    gone. `calm_s`: for how long a replica must have been too many before it goes."""

    min_replicas: int
    max_replicas: int
    waiting_per_replica: float = 4.0
    use: float = 0.75
    lead_s: float = 30.0
    clear_s: float = 30.0
    calm_s: float = 300.0


class ReplicaScaler:
    """Decides again and again for one model, and remembers what it has seen for `calm_s`."""

    def __init__(self, target: ScalingTarget) -> None:
        self.target = target
        self.reason = "start"
        self._wanted = target.min_replicas
        self._uses: deque[tuple[float, float]] = deque()  # when, and the sum over replicas
        self._floors: deque[tuple[float, int]] = deque()  # when, and what had to be there then at least
        self._finished: dict[str, float] = {}
        self._waiting = 0.0
        self._ended_rate = self._arrival_rate = 0.0  # requests/s, of all replicas
        self._began: float | None = None
        self._last: float | None = None

    def decide(
        self,
        reports: Mapping[str, ReplicaReport],
        num_running: int,
        num_wanted: int,
        asked: float,
        now: float,
    ) -> int:
        """Replicas to have.

        Args:
            reports: by replica; of starting ones there is none.
            num_running: replicas that run, whether they report or not.
            num_wanted: what was decided last, or somebody has set.
            asked: requests that wait for a first replica to be there.
            now: seconds; a clock that jumps back begins anew.
        """
        if self._last is not None and now < self._last:
            self.__init__(self.target)  # type: ignore[misc]
        if self._last is not None and now - self._last < EVERY_S:
            return self._bounded(max(self._wanted, math.ceil(min(asked, 1.0))))
        self._take_in(reports, now)
        up, reason = self._wanted_for(reports, asked)
        floor = max(up, self._with_room(reports))
        self._floors.append((now, floor))
        while self._floors[0][0] < now - self.target.calm_s:
            self._floors.popleft()
        wanted = self._bounded(up)
        if wanted <= num_wanted:
            wanted, reason = self._calmed(num_running - len(reports), num_wanted, now)
        self._wanted, self.reason = wanted, reason
        return wanted

    def _take_in(self, reports: Mapping[str, ReplicaReport], now: float) -> None:
        waiting = sum(report.waiting for report in reports.values())
        if self._last is None:
            self._began = now
        else:
            elapsed = now - self._last
            ended = sum(
                max(0.0, report.finished - self._finished.get(name, report.finished))
                for name, report in reports.items()
            )
            share = min(1.0, elapsed / RATE_S)
            self._ended_rate += share * (ended / elapsed - self._ended_rate)
            arrived = max(0.0, ended + waiting - self._waiting)
            self._arrival_rate += share * (arrived / elapsed - self._arrival_rate)
        self._finished = {name: report.finished for name, report in reports.items()}
        self._waiting, self._last = waiting, now
        self._uses.append((now, sum(report.use for report in reports.values())))
        while self._uses[0][0] < now - TREND_S:
            self._uses.popleft()

    def _wanted_for(self, reports: Mapping[str, ReplicaReport], asked: float) -> tuple[int, str]:
        """What is wanted at once, and why."""
        target, used = self.target, self._uses[-1][1]
        if not reports:
            return (1, "asked") if asked > 0 else (0, "use")
        foreseen = min(used * MAX_FORESIGHT, used + max(0.0, self._slope()) * target.lead_s)
        now, then = used / target.use, foreseen / target.use
        queue = self._for_queue(len(reports))
        if queue > max(then, now):
            return math.ceil(queue), "waiting"
        return math.ceil(then), "trend" if math.ceil(then) > math.ceil(now) else "use"

    def _for_queue(self, num_replicas: int) -> float:
        """Replicas that a queue asks for; 0 while no more wait than may."""
        if self._waiting <= self.target.waiting_per_replica * num_replicas:
            return 0.0
        by_count = self._waiting / self.target.waiting_per_replica
        rate = self._ended_rate / num_replicas
        if rate <= 0:
            return max(by_count, num_replicas + 1.0)
        by_rate = self._arrival_rate / rate + self._waiting / (rate * self.target.clear_s)
        return max(min(by_count, by_rate), num_replicas + 1.0)

    def _slope(self) -> float:
        """Of the sum of uses by second, least squares; 0 where the fit says little."""
        points = self._uses
        if len(points) < TREND_POINTS:
            return 0.0
        mean_t = sum(t for t, _ in points) / len(points)
        mean_u = sum(u for _, u in points) / len(points)
        spread = sum((t - mean_t) ** 2 for t, _ in points)
        slope = sum((t - mean_t) * (u - mean_u) for t, u in points) / spread
        noise = sum((u - mean_u - slope * (t - mean_t)) ** 2 for t, u in points) / (len(points) - 2)
        return slope if slope**2 * spread > 16 * noise else 0.0  # four standard errors

    def _with_room(self, reports: Mapping[str, ReplicaReport]) -> int:
        """So many leave room to spare: fewer would soon be more again."""
        queue = self._waiting / self.target.waiting_per_replica
        return math.ceil(max(self._uses[-1][1] / (self.target.use * SPARE), queue if reports else 0.0))

    def _calmed(self, num_silent: int, num_wanted: int, now: float) -> tuple[int, str]:
        """Fewer than there are, or as many: the most that had to be there during the time of calm."""
        assert self._began is not None, "a report was taken in"
        if num_silent > 0 or now - self._began < self.target.calm_s:
            return self._bounded(num_wanted), "hold"
        least = self._bounded(max(floor for _, floor in self._floors))
        return (least, "calm") if least < num_wanted else (self._bounded(num_wanted), "hold")

    def _bounded(self, count: int) -> int:
        return min(max(count, self.target.min_replicas), self.target.max_replicas)
