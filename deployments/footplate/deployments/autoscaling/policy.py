"""How many replicas a model should have, by what its engines report. Pure: a clock comes in as an argument.

An engine that decodes is always busy, so neither processor load nor the number of open requests says how much
more it takes. What does: how full its KV cache and its batch are (`use`), and who waits in front of it.

- Up: as many as `use` asks for, with its trend carried on for as long as a replica takes to start. Where open
  requests grow so fast that replicas will be too full by then, before anybody waits, also as many as the
  arrivals ask for by what a replica has been seen to end (`service_rate`). Where more wait than may, as many
  as they ask for at the rate at which requests end now, and what clears the queue; never more than would
  leave each the queue that it may have.
- Down: one that was not wanted at any time during `calm_s`, if the rest can end what comes with room to spare
  (`service_rate`), and then no other before the rest have shown what they are left with.

Requests come by chance: `use` is a mean over some seconds, and a trend has to stand out of what chance makes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from footplate.deployments.autoscaling.service_rate import ServiceRate

# Reports are taken in at most so often, in seconds.
EVERY_S = 1.0
# `use` is a mean over so many seconds: longer than answers take, shorter than a replica needs to start.
USE_S = 15.0
# Its trend is that of the last so many seconds, of so many at least.
TREND_S = 60.0
LEAST_TREND_S = 20.0
# Reports that are closer together than that tell the same: whoever runs now still runs then.
INDEPENDENT_S = 10.0
# A trend may foresee at most so many times what is used now.
MAX_FORESIGHT = 2.0
# A rate of ended requests is a mean over about so many seconds.
RATE_S = 10.0
# Where arrivals have jumped beyond what chance makes, so few seconds tell enough: each second that a step is
# underrated makes the last replicas that it needs start that much later.
FAST_RATE_S = 3.0
# And what is learnt of a replica, one over so many.
SLOW_RATE_S = 60.0
# What is left of a mean that counts for nothing, in replicas.
FADED = 0.01
# A replica is given up only if the others are left below this share of their target.
SPARE = 0.8
# One that is wanted again so soon after it went had better stayed: each such return of the last hours doubles
# the time of calm, a few times at most.
RETURN_S = 900.0
REMEMBERED_S = 12 * 3600.0
MAX_DOUBLINGS = 2


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """One engine. `waiting`, `running`: requests, batch work left out. `use`: the fuller of its KV cache and
    its batch, 0 to 1. `finished`: requests ended since it started."""

    waiting: float
    running: float
    use: float
    finished: float


@dataclass(frozen=True, slots=True)
class ScalingTarget:
    """Bounds and aims. `lead_s`: how long a replica takes to start. `clear_s`: in what time a queue shall be
    gone. `calm_s`: for how long a replica must have been too many before it goes. `settle_s`: how long the
    rest take to show what they are left with then."""

    min_replicas: int
    max_replicas: int
    waiting_per_replica: float = 4.0
    use: float = 0.75
    lead_s: float = 30.0
    clear_s: float = 30.0
    calm_s: float = 900.0
    settle_s: float = 60.0


class ReplicaScaler:
    """Decides again and again for one model, and remembers what it has seen for `calm_s`."""

    def __init__(self, target: ScalingTarget) -> None:
        self.target = target
        self.reason = "start"
        self._wanted = target.min_replicas
        self._used = 0.0  # the sum over replicas, a mean over some seconds
        self._uses: deque[tuple[float, float]] = deque()  # when, and the sum then
        self._trend_from = 0.0
        # When, and what had to be there then at least; each less than the ones before it.
        self._floors: deque[tuple[float, int]] = deque()
        self._finished: dict[str, float] = {}
        self._waiting = self._open = 0.0
        self._ended_rate = self._arrival_rate = self._fast_arrival_rate = 0.0  # requests/s, of all replicas
        self._growth = 0.0  # of open requests, 1/s, over a few seconds
        self._service = ServiceRate()
        self._slow_use = self._slow_rate = 0.0
        self._began: float | None = None
        self._last: float | None = None
        self._num_reports = 0
        self._went: float | None = None  # when the last one was given up
        self._returns: deque[float] = deque()  # when one was wanted that had gone shortly before

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
        # Only what no later one exceeds can still be the most of some time.
        while self._floors and self._floors[-1][1] <= floor:
            self._floors.pop()
        self._floors.append((now, floor))
        wanted = self._bounded(up)
        if wanted <= num_wanted:
            all_tell = len(reports) >= num_running >= num_wanted
            wanted, reason = (
                self._calmed(num_wanted, now) if all_tell else (self._bounded(num_wanted), "hold")
            )
        elif self._went is not None and now - self._went < RETURN_S:
            self._returns.append(now)
            self._went = None
        self._wanted, self.reason = wanted, reason
        return wanted

    def _take_in(self, reports: Mapping[str, ReplicaReport], now: float) -> None:
        waiting = sum(report.waiting for report in reports.values())
        open_now = waiting + sum(report.running for report in reports.values())
        elapsed = 0.0 if self._last is None else now - self._last
        if self._began is None and reports:
            self._began = now
        if elapsed > 0:
            ended = sum(
                max(0.0, report.finished - self._finished.get(name, report.finished))
                for name, report in reports.items()
            )
            share = min(1.0, elapsed / RATE_S)
            self._ended_rate += share * (ended / elapsed - self._ended_rate)
            arrived = max(0.0, ended + open_now - self._open)
            self._arrival_rate += share * (arrived / elapsed - self._arrival_rate)
            fast_share = min(1.0, elapsed / FAST_RATE_S)
            self._fast_arrival_rate += fast_share * (arrived / elapsed - self._fast_arrival_rate)
            self._growth += fast_share * ((open_now - self._open) / elapsed - self._growth)
            self._learn(reports, ended, elapsed)
        self._finished = {name: report.finished for name, report in reports.items()}
        self._waiting, self._open, self._last = waiting, open_now, now
        used = sum(report.use for report in reports.values())
        if len(reports) != self._num_reports:
            # What moves between replicas is no trend, and it moves for a while.
            self._uses.clear()
            self._num_reports, self._trend_from = len(reports), now + USE_S
            self._used = used
        self._used += min(1.0, elapsed / USE_S) * (used - self._used)
        if now >= self._trend_from:
            self._uses.append((now, used))
        while self._uses and self._uses[0][0] < now - TREND_S:
            self._uses.popleft()

    def _learn(self, reports: Mapping[str, ReplicaReport], ended: float, elapsed: float) -> None:
        share, count = min(1.0, elapsed / SLOW_RATE_S), max(1, len(reports))
        self._slow_use += share * (sum(report.use for report in reports.values()) - self._slow_use)
        self._slow_rate += share * (ended / elapsed - self._slow_rate)
        self._service.observe(self._slow_use / count, self._slow_rate / count, elapsed)

    def _wanted_for(self, reports: Mapping[str, ReplicaReport], asked: float) -> tuple[int, str]:
        """What is wanted at once, and why."""
        target, used = self.target, self._used
        if not reports:
            return (1, "asked") if asked > 0 else (0, "use")
        foreseen = min(used * MAX_FORESIGHT, used + max(0.0, self._slope()) * target.lead_s)
        now, then = used / target.use, foreseen / target.use
        arriving = self._for_arrivals(reports)
        if arriving > max(then, now):
            return math.ceil(arriving - FADED), "waiting" if self._has_queue(len(reports)) else "arrivals"
        wanted = math.ceil(then - FADED)
        return wanted, "trend" if wanted > math.ceil(now - FADED) else "use"

    def _has_queue(self, num_replicas: int) -> bool:
        return self._waiting > self.target.waiting_per_replica * num_replicas

    def _for_arrivals(self, reports: Mapping[str, ReplicaReport]) -> float:
        """Replicas that arrivals and a queue ask for; 0 while replicas are no fuller than they should be."""
        num_replicas = len(reports)
        # Two standard errors of a mean over an exponential window of so many seconds (Poisson arrivals).
        fast = self._fast_arrival_rate
        arrivals = max(self._arrival_rate, fast - 2 * math.sqrt(fast / (2 * FAST_RATE_S)))
        if not self._has_queue(num_replicas):
            is_known = self._service.seen_s >= SLOW_RATE_S
            is_enough = not is_known or self._soon(reports) <= self.target.use * num_replicas
            return 0.0 if is_enough else arrivals / self._service.at(self.target.use)
        by_count = self._waiting / self.target.waiting_per_replica
        rate = self._ended_rate / num_replicas
        if rate <= 0:
            return max(by_count, num_replicas + 1.0)
        by_rate = arrivals / rate + self._waiting / (rate * self.target.clear_s)
        return max(min(by_count, by_rate), num_replicas + 1.0)

    def _soon(self, reports: Mapping[str, ReplicaReport]) -> float:
        """The sum of uses when a replica that is asked for now is there, if open requests go on to grow as in
        the last seconds, less what chance may have made of that."""
        used = sum(report.use for report in reports.values())
        growth = self._growth - 2 * math.sqrt(self._fast_arrival_rate / (2 * FAST_RATE_S))
        return used + max(0.0, growth) * self.target.lead_s * used / max(1.0, self._open)

    def _slope(self) -> float:
        """Of the sum of uses by second, least squares; 0 where chance may have made it."""
        points = self._uses
        if len(points) < 3 or points[-1][0] - points[0][0] < LEAST_TREND_S:
            return 0.0
        mean_t = sum(t for t, _ in points) / len(points)
        mean_u = sum(u for _, u in points) / len(points)
        spread = sum((t - mean_t) ** 2 for t, _ in points)
        slope = sum((t - mean_t) * (u - mean_u) for t, u in points) / spread
        noise = sum((u - mean_u - slope * (t - mean_t)) ** 2 for t, u in points) / (len(points) - 2)
        same = max(1.0, INDEPENDENT_S * len(points) / (points[-1][0] - points[0][0]))
        return slope if slope**2 * spread > 9 * same * noise else 0.0  # three standard errors

    def _with_room(self, reports: Mapping[str, ReplicaReport]) -> int:
        """So many leave room to spare: fewer would soon be more again."""
        spare = self.target.use * SPARE
        by_queue = self._waiting / self.target.waiting_per_replica if reports else 0.0
        by_rate = max(self._slow_rate, self._arrival_rate) / self._service.at(spare)
        # Means fade slowly. Whoever is there now is a reason to be there, and without anybody there is none.
        if not any(report.use > 0 or report.waiting > 0 for report in reports.values()):
            return 0
        return max(1, math.ceil(max(self._used / spare, by_rate, by_queue) - FADED))

    def _calmed(self, num_wanted: int, now: float) -> tuple[int, str]:
        """One fewer than there are, or as many: the most that had to be there during the time of calm."""
        while self._returns and self._returns[0] < now - REMEMBERED_S:
            self._returns.popleft()
        calm_s = self.target.calm_s * 2 ** min(len(self._returns), MAX_DOUBLINGS)
        is_known = self._began is not None and now - self._began >= calm_s
        has_settled = self._went is None or now - self._went >= self.target.settle_s
        while len(self._floors) > 1 and self._floors[0][0] < now - calm_s:
            self._floors.popleft()
        least = self._floors[0][1]
        if is_known and has_settled and self._bounded(least) < num_wanted:
            self._went = now
            return self._bounded(num_wanted - 1), "calm"
        return self._bounded(num_wanted), "hold"

    def _bounded(self, count: int) -> int:
        return min(max(count, self.target.min_replicas), self.target.max_replicas)
