"""A model's replicas and its requests on a simulated clock, under a policy that says how many there are.

Requests go to the replica with the fewest. A replica decodes all of its sequences in steps and reads prompts
between them; it is there some time after it was asked for, and ends its requests before it goes. The figures
are those of a small GPU with an 8B model: what matters here is how they stand to one another.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

STEP_S, DECODE_TOKEN_S, PREFILL_TOKEN_S = 0.020, 0.25e-3, 0.12e-3
MAX_RUNNING, KV_TOKENS = 64, 80_000
PROMPT, OUTPUT = 600, 200  # tokens, on average
# What one replica ends in a second when it is full and nobody waits long.
FULL_RATE = 1 / (PROMPT * PREFILL_TOKEN_S + OUTPUT * (STEP_S / MAX_RUNNING + DECODE_TOKEN_S))
SLO_FIRST_S, SLO_TOKEN_S = 1.0, 0.060


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request. Tokens."""

    when: float
    prompt: int
    output: int


@dataclass
class Engine:
    """One replica."""

    name: int
    ready_s: float
    is_leaving: bool = False
    waiting: deque[Arrival] = field(default_factory=deque)
    finished: int = 0
    busy: float = 0.0  # share of the last tick
    _left: np.ndarray = field(default_factory=lambda: np.zeros(0))
    _held: np.ndarray = field(default_factory=lambda: np.zeros(0))
    _first: np.ndarray = field(default_factory=lambda: np.zeros(0))
    _size: np.ndarray = field(default_factory=lambda: np.zeros(0))

    @property
    def running(self) -> int:
        return len(self._left)

    @property
    def kv_usage(self) -> float:
        return float(self._held.sum()) / KV_TOKENS

    @property
    def open(self) -> int:
        return self.running + len(self.waiting)

    def tick(self, now: float, seconds: float, outcome: Outcome) -> None:
        """What happens until `now + seconds`."""
        left_s = seconds
        while self.waiting and self.running < MAX_RUNNING and left_s > 0:
            head = self.waiting[0]
            if self._held.sum() + head.prompt + head.output > KV_TOKENS:
                break
            self.waiting.popleft()
            left_s -= head.prompt * PREFILL_TOKEN_S
            first = max(head.when, now) + (seconds - left_s)
            outcome.first_s.append(first - head.when)
            self._left = np.append(self._left, float(head.output))
            self._held = np.append(self._held, float(head.prompt + head.output))
            self._first = np.append(self._first, first)
            self._size = np.append(self._size, float(head.output))
        self.busy = 1.0 if self.running else 0.0
        if not self.running or left_s <= 0:
            return
        self._left -= left_s / (STEP_S + DECODE_TOKEN_S * self.running)
        done = self._left <= 0
        if done.any():
            self.finished += int(done.sum())
            outcome.token_s += ((now + seconds - self._first[done]) / self._size[done]).tolist()
            keep = ~done
            self._left, self._held = self._left[keep], self._held[keep]
            self._first, self._size = self._first[keep], self._size[keep]


@dataclass(frozen=True, slots=True)
class Seen:
    """What a policy may look at: the replicas that are ready, how many there are to be, and the time."""

    ready: Sequence[Engine]
    num_wanted: int
    now: float


@dataclass
class Outcome:
    """What came of a load."""

    first_s: list[float] = field(default_factory=list)
    token_s: list[float] = field(default_factory=list)
    replica_s: float = 0.0
    changes: list[tuple[float, int, int]] = field(default_factory=list)  # when, from, to

    @property
    def missed(self) -> float:
        """Share of requests whose first token, or whose tokens on average, came too late."""
        late = sum(value > SLO_FIRST_S for value in self.first_s)
        late += sum(value > SLO_TOKEN_S for value in self.token_s)
        return late / max(1, len(self.first_s))

    def returns(self, within_s: float = 900.0) -> int:
        """How often a replica that had been given up was wanted again within a time: flapping."""
        pairs = zip(self.changes, self.changes[1:], strict=False)
        return sum(down[2] < down[1] and up[2] > up[1] and up[0] - down[0] < within_s for down, up in pairs)


def simulate(
    arrivals: Iterator[Arrival], policy: Callable[[Seen], int], end_s: float, tick_s: float, start_s: float
) -> Outcome:
    """Play a load until `end_s`; the policy is asked once a second, and a replica starts within `start_s`."""
    outcome, now, names = Outcome(), 0.0, iter(range(1 << 60))
    engines = [Engine(next(names), 0.0)]
    coming = next(arrivals, None)
    homeless: deque[Arrival] = deque()
    next_look = 0.0
    while now < end_s:
        ready = [each for each in engines if each.ready_s <= now and not each.is_leaving]
        while coming is not None and coming.when <= now + tick_s:
            homeless.append(coming)
            coming = next(arrivals, None)
        while homeless and ready:
            min(ready, key=lambda each: each.open).waiting.append(homeless.popleft())
        for engine in engines:
            if engine.ready_s <= now:
                engine.tick(now, tick_s, outcome)
        now += tick_s
        outcome.replica_s += tick_s * len(engines)
        engines = [each for each in engines if not (each.is_leaving and each.open == 0)]
        if now >= next_look:
            next_look = now + 1.0
            staying = [each for each in engines if not each.is_leaving]
            wanted = policy(Seen([e for e in staying if e.ready_s <= now], len(staying), now))
            if wanted != len(staying):
                outcome.changes.append((now, len(staying), wanted))
            engines += [Engine(next(names), now + start_s) for _ in range(wanted - len(staying))]
            # Those that are not there yet go first, then those with the least to do.
            order = sorted(staying, key=lambda each: (each.ready_s <= now, each.open))
            for engine in order[: max(0, len(staying) - wanted)]:
                engine.is_leaving = True
    return outcome


def poisson(rate: Callable[[float], float], most: float, end_s: float, seed: int) -> Iterator[Arrival]:
    """Arrivals at a rate (1/s) that changes with time and never exceeds `most`, with lengths that vary."""
    rng = np.random.default_rng(seed)
    now = 0.0
    while True:
        now += rng.exponential(1 / most)
        if now >= end_s:
            return
        if rng.random() * most <= rate(now):
            prompt, output = rng.lognormal(-0.18, 0.6), rng.lognormal(-0.18, 0.6)
            yield Arrival(now, max(1, int(PROMPT * prompt)), max(1, int(OUTPUT * output)))


def step_rate(now: float) -> float:
    """One replica's worth of load for three minutes, then eight."""
    return FULL_RATE * 0.7 * (1 if now < 180 else 8)


def ramp_rate(now: float) -> float:
    """From one replica's worth to eight within ten minutes."""
    return FULL_RATE * 0.7 * (1 + 7 * min(1.0, max(0.0, (now - 180) / 600)))


def day_rate(now: float) -> float:
    """A working day: night, morning, lunch, afternoon, evening; five minutes' swell, and bursts each hour."""
    hour = now / 3600
    shape = (
        0.8 + 5.2 * math.exp(-(((hour - 10.5) / 2.2) ** 2)) + 5.0 * math.exp(-(((hour - 15.5) / 2.6) ** 2))
    )
    shape += 1.2 * math.exp(-(((hour - 20.5) / 1.8) ** 2))
    swell = 1 + 0.15 * math.sin(2 * math.pi * now / 300) + 0.1 * math.sin(2 * math.pi * now / 1370)
    burst = 1.5 if (now % 3600) < 90 else 1.0
    return FULL_RATE * 0.7 * shape * swell * burst
