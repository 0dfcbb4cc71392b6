"""What the limiter promises, said shortly: one list of takings, summed anew for every question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from footplate.tenancy.limiter.decisions import RefusalKind
from footplate.tenancy.limiter.limits import TOKEN_KINDS, WINDOWS, Limit, LimitKind, Scope
from footplate.tenancy.limiter.reservations import ReservationState

Counter = tuple[Scope, LimitKind]


def counter_of(limit: Limit) -> Counter:
    return limit.scope, limit.kind


@dataclass
class Taking:
    request_id: str
    counter: Counter
    amount: int
    until_ms: int  # when it leaves: the end of its window, or of its lease
    has_left: bool = False  # for good, whatever the clock says later


@dataclass
class Model:
    """One tenant's limiter. Each method is told the time that the real one went by."""

    lease_ms: int
    takings: list[Taking] = field(default_factory=list)
    states: dict[str, ReservationState] = field(default_factory=dict)
    leases: dict[str, tuple[int, int, int]] = field(default_factory=dict)  # end, reserved, used so far

    def used(self, limit: Limit, now_ms: int) -> int:
        return sum(t.amount for t in self._alive(counter_of(limit)) if t.until_ms > now_ms)

    def reset_ms(self, limit: Limit, now_ms: int) -> int:
        alive = [t.until_ms for t in self._alive(counter_of(limit))]
        longest = max([until - now_ms for until in alive if until > now_ms], default=0)
        return min(longest, self.longest_ms(limit.kind))

    def longest_ms(self, kind: LimitKind) -> int:
        """What no wait is longer than: a window and a bucket, or a lease."""
        window = WINDOWS.get(kind)
        return self.lease_ms if window is None else (window.num_buckets + 1) * window.bucket_ms

    def roll(self, counter: Counter, now_ms: int) -> None:
        """What leaves now has left; what lies ahead by more than its window is taken now, by nobody."""
        window = WINDOWS.get(counter[1])
        alive = self._alive(counter)
        if window is None or not alive:
            return
        end_ms = window.end_ms(now_ms // window.bucket_ms)
        is_far_ahead = max(t.until_ms for t in alive) > end_ms + window.num_buckets * window.bucket_ms
        for taking in alive:
            taking.has_left = is_far_ahead or taking.until_ms <= now_ms
        if is_far_ahead:
            self.takings.append(Taking("", counter, sum(t.amount for t in alive), end_ms))

    def _alive(self, counter: Counter) -> list[Taking]:
        return [t for t in self.takings if t.counter == counter and t.amount and not t.has_left]

    def wait_ms(self, limit: Limit, amount: int, now_ms: int) -> int | None:
        """0 when it fits, None when it never will; else tried at every moment at which something leaves."""
        if limit.max_amount == 0 or amount > limit.max_amount:
            return None
        moments = sorted({now_ms, *(t.until_ms for t in self.takings if t.until_ms > now_ms)})
        wait = next(m for m in moments if self.used(limit, m) + amount <= limit.max_amount) - now_ms
        return min(wait, self.longest_ms(limit.kind))

    def reserve(
        self, request_id: str, limits: Sequence[Limit], num_tokens: int, now_ms: int
    ) -> tuple[RefusalKind | None, int | None]:
        """Why it is refused, and the seconds to wait where a window says so."""
        self.end_leases(now_ms)
        for limit in limits:
            self.roll(counter_of(limit), now_ms)
        if request_id in self.states:
            is_held = self.states[request_id] is ReservationState.HELD
            return (None if is_held else RefusalKind.REPEATED), None
        asked = [num_tokens if limit.kind in TOKEN_KINDS else 1 for limit in limits]
        waits = [(lim, self.wait_ms(lim, a, now_ms)) for lim, a in zip(limits, asked, strict=True)]
        waits = [(lim, wait) for lim, wait in waits if lim.is_enforced and wait != 0]
        if any(wait is None for _, wait in waits):
            return RefusalKind.TOO_LARGE, None
        windows = [wait for lim, wait in waits if lim.kind in WINDOWS and wait is not None]
        if windows:
            return RefusalKind.OVER_WINDOW, (max(windows) + 999) // 1000
        if waits:
            return RefusalKind.CONCURRENCY, 1
        for limit, amount in zip(limits, asked, strict=True):
            self.take(request_id, counter_of(limit), amount, now_ms)
        self.states[request_id] = ReservationState.HELD
        self.leases[request_id] = (now_ms + self.lease_ms, num_tokens, 0)
        return None, None

    def take(self, request_id: str, counter: Counter, amount: int, now_ms: int) -> None:
        window = WINDOWS.get(counter[1])
        until = now_ms + self.lease_ms if window is None else window.end_ms(now_ms // window.bucket_ms)
        self.roll(counter, now_ms)
        if window is not None:
            until = max([until, *(t.until_ms for t in self._alive(counter))])
        self.takings.append(Taking(request_id, counter, amount, until))

    def end(
        self, request_id: str, state: ReservationState, num_tokens: int | None, now_ms: int
    ) -> tuple[bool, ReservationState]:
        self.end_leases(now_ms)
        found = self.states.get(request_id, ReservationState.UNKNOWN)
        if found is not ReservationState.HELD:
            return False, found
        used = self.leases[request_id][1] if num_tokens is None else num_tokens
        self._finish(request_id, state, used, now_ms)
        return True, state

    def heartbeat(self, request_id: str, num_tokens: int, now_ms: int) -> tuple[bool, ReservationState]:
        self.end_leases(now_ms)
        found = self.states.get(request_id, ReservationState.UNKNOWN)
        if found is not ReservationState.HELD:
            return False, found
        _, reserved, so_far = self.leases[request_id]
        self.leases[request_id] = (now_ms + self.lease_ms, reserved, max(so_far, num_tokens))
        for taking in self._of(request_id):
            if taking.counter[1] not in WINDOWS:
                taking.until_ms = now_ms + self.lease_ms
        return True, ReservationState.HELD

    def end_leases(self, now_ms: int) -> int:
        latest = now_ms + self.lease_ms
        for name, (end_ms, reserved, so_far) in self.leases.items():
            self.leases[name] = (min(end_ms, latest), reserved, so_far)
            for taking in self._of(name):
                if taking.counter[1] not in WINDOWS:
                    taking.until_ms = min(taking.until_ms, latest)
        over = [name for name, (end_ms, _, _) in self.leases.items() if end_ms <= now_ms]
        for name in over:
            self._finish(name, ReservationState.EXPIRED, self.leases[name][2], now_ms)
        return len(over)

    def _finish(self, request_id: str, state: ReservationState, used: int, now_ms: int) -> None:
        for taking in self._of(request_id):
            kind = taking.counter[1]
            if kind in TOKEN_KINDS or state is ReservationState.RELEASED:
                self.roll(taking.counter, now_ms)
            if kind in TOKEN_KINDS and used > taking.amount and state is not ReservationState.RELEASED:
                self.take(request_id, taking.counter, used - taking.amount, now_ms)
            elif kind in TOKEN_KINDS:
                taking.amount = 0 if state is ReservationState.RELEASED else used
            elif kind not in WINDOWS or state is ReservationState.RELEASED:
                taking.amount = 0
        self.states[request_id] = state
        del self.leases[request_id]

    def _of(self, request_id: str) -> list[Taking]:
        return [taking for taking in self.takings if taking.request_id == request_id]
