"""A limiter in this process's memory: for one gateway alone, or while the shared store is away."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from footplate.tenancy.limiter.counters import BucketWindow, RunningRequests
from footplate.tenancy.limiter.decisions import (
    NEVER_MS,
    Amounts,
    BudgetSeed,
    Decision,
    LimitState,
    Reading,
    Refusal,
    RefusalKind,
    Spending,
    Spent,
    is_too_large,
    judge,
)
from footplate.tenancy.limiter.limits import TOKEN_KINDS, WINDOWS, Limit, LimitKind
from footplate.tenancy.limiter.reservations import Beat, Outcome, ReservationState


def _monotonic_ms() -> int:
    return time.monotonic_ns() // 1_000_000


@dataclass(slots=True)
class _Reservation:
    state: ReservationState
    lease_end_ms: int
    num_tokens: int | None
    # Limit, what was taken of it, and the bucket it came from.
    taken: list[tuple[Limit, int, int]]
    num_tokens_so_far: int = 0


class LocalLimiter:
    """A `Limiter` over dictionaries, for one event loop. It never waits and never raises LimiterUnavailable.

    Notes are not kept: they are for others to find, and what is here dies with this process. Money is not
    held either: what others spend can't be known here, so whoever holds others to a budget refuses before.
    At most `max_remembered` reservations are known; the oldest is forgotten first, what it took stays used.
    Counters stay, one for each limit that was ever met.
    """

    def __init__(
        self,
        *,
        lease_s: float = 30.0,
        max_remembered: int = 100_000,
        clock_ms: Callable[[], int] = _monotonic_ms,
    ) -> None:
        self._lease_ms = round(lease_s * 1000)
        self._max_remembered = max_remembered
        self._clock_ms = clock_ms
        self._windows: dict[tuple[object, LimitKind], BucketWindow] = {}
        self._running: dict[object, RunningRequests] = {}
        self._reservations: OrderedDict[tuple[str, str], _Reservation] = OrderedDict()
        # Held ones of a tenant, the one whose lease ends first in front.
        self._held: dict[str, OrderedDict[str, _Reservation]] = {}

    def knows(self, tenant_id: str, request_id: str) -> bool:
        """Whether this reservation was made here."""
        return (tenant_id, request_id) in self._reservations

    def now_ms(self) -> int:
        """The time that it goes by."""
        return self._clock_ms()

    def learn(self, limit: Limit, used: int, until_ms: int) -> None:
        """Count what is known to be used of a window elsewhere, until it has left it."""
        self._window(limit).learn(used, until_ms)

    async def reserve(
        self,
        tenant_id: str,
        request_id: str,
        limits: Sequence[Limit],
        amounts: Amounts,
        note: bytes = b"",
        money: Spending | None = None,
    ) -> Decision:
        """As `Limiter.reserve`."""
        now_ms = self._clock_ms()
        self._end_leases(tenant_id, now_ms)
        asked = [amounts.of(limit) for limit in limits]
        readings = [self._read(limit, amount, now_ms) for limit, amount in zip(limits, asked, strict=True)]
        decision = judge(request_id, limits, readings)
        earlier = self._reservations.get((tenant_id, request_id))
        if earlier is not None:
            is_held = earlier.state is ReservationState.HELD
            refusal = None if is_held else Refusal(RefusalKind.REPEATED)
            return Decision(request_id, decision.states, refusal, is_repeated=True)
        if not decision.is_admitted:
            return decision
        end_ms = now_ms + self._lease_ms
        taken = [
            (limit, amount, self._take(limit, amount, request_id, now_ms))
            for limit, amount in zip(limits, asked, strict=True)
        ]
        held = _Reservation(ReservationState.HELD, end_ms, amounts.num_tokens, taken)
        self._remember(tenant_id, request_id, held)
        after = [
            Reading(self._used(limit, now_ms), self._reset_ms(limit, now_ms), reading.wait_ms)
            for limit, reading in zip(limits, readings, strict=True)
        ]
        return judge(request_id, limits, after)

    async def seed(self, tenant_id: str, seeds: Sequence[BudgetSeed]) -> None:
        """As `Limiter.seed`; there is nothing to remember."""

    async def settle(
        self, tenant_id: str, request_id: str, num_tokens: int | None, spent: Spent | None = None
    ) -> Outcome:
        """As `Limiter.settle`."""
        now_ms = self._clock_ms()
        held, outcome = self._find(tenant_id, request_id, now_ms)
        if held is None:
            return outcome
        used = num_tokens if num_tokens is not None else held.num_tokens or 0
        return self._finish(tenant_id, request_id, ReservationState.SETTLED, used, now_ms)

    async def release(self, tenant_id: str, request_id: str) -> Outcome:
        """As `Limiter.release`."""
        now_ms = self._clock_ms()
        held, outcome = self._find(tenant_id, request_id, now_ms)
        if held is None:
            return outcome
        for limit, amount, bucket in held.taken:
            if limit.kind is LimitKind.REQUESTS_PER_MINUTE:
                self._window(limit).give_back(amount, bucket, now_ms)
        return self._finish(tenant_id, request_id, ReservationState.RELEASED, 0, now_ms)

    async def heartbeat(self, tenant_id: str, beats: Sequence[Beat]) -> list[Outcome]:
        """As `Limiter.heartbeat`."""
        return [self._beat(tenant_id, beat) for beat in beats]

    def _beat(self, tenant_id: str, beat: Beat) -> Outcome:
        now_ms = self._clock_ms()
        held, outcome = self._find(tenant_id, beat.request_id, now_ms)
        if held is None:
            return outcome
        held.lease_end_ms = now_ms + self._lease_ms
        held.num_tokens_so_far = max(held.num_tokens_so_far, beat.num_tokens)
        self._held[tenant_id].move_to_end(beat.request_id)
        for limit, _, _ in held.taken:
            if limit.kind not in WINDOWS:
                self._requests(limit).hold(beat.request_id, held.lease_end_ms)
        return Outcome(True, ReservationState.HELD)

    async def peek(self, tenant_id: str, limits: Sequence[Limit]) -> tuple[LimitState, ...]:
        """As `Limiter.peek`."""
        now_ms = self._clock_ms()
        self._end_leases(tenant_id, now_ms)
        return judge("", limits, [self._read(limit, 0, now_ms) for limit in limits]).states

    async def sweep(self, tenant_id: str) -> int:
        """As `Limiter.sweep`."""
        return self._end_leases(tenant_id, self._clock_ms())

    def _end_leases(self, tenant_id: str, now_ms: int) -> int:
        held = self._held.get(tenant_id, OrderedDict())
        self._shorten_leases(held, now_ms + self._lease_ms)
        num_ended = 0
        while held:
            request_id, first = next(iter(held.items()))
            if first.lease_end_ms > now_ms:
                break
            used = first.num_tokens_so_far
            self._finish(tenant_id, request_id, ReservationState.EXPIRED, used, now_ms)
            num_ended += 1
        return num_ended

    def _shorten_leases(self, held: OrderedDict[str, _Reservation], latest_ms: int) -> None:
        """By a clock that stepped back no lease may end later than one that begins now."""
        for request_id, reservation in reversed(held.items()):
            if reservation.lease_end_ms <= latest_ms:
                break
            reservation.lease_end_ms = latest_ms
            for limit, _, _ in reservation.taken:
                if limit.kind not in WINDOWS:
                    self._requests(limit).hold(request_id, latest_ms)

    def _find(self, tenant_id: str, request_id: str, now_ms: int) -> tuple[_Reservation | None, Outcome]:
        self._end_leases(tenant_id, now_ms)
        known = self._reservations.get((tenant_id, request_id))
        state = ReservationState.UNKNOWN if known is None else known.state
        return known if state is ReservationState.HELD else None, Outcome(False, state)

    def _remember(self, tenant_id: str, request_id: str, held: _Reservation) -> None:
        self._reservations[tenant_id, request_id] = held
        self._held.setdefault(tenant_id, OrderedDict())[request_id] = held
        while len(self._reservations) > self._max_remembered:
            (tenant_id, request_id), _ = self._reservations.popitem(last=False)
            self._unhold(tenant_id, request_id)

    def _unhold(self, tenant_id: str, request_id: str) -> None:
        held = self._held.get(tenant_id, OrderedDict())
        held.pop(request_id, None)
        if not held:
            self._held.pop(tenant_id, None)

    def _finish(
        self, tenant_id: str, request_id: str, state: ReservationState, used: int, now_ms: int
    ) -> Outcome:
        ended = self._reservations[tenant_id, request_id]
        for limit, amount, bucket in ended.taken:
            if limit.kind not in WINDOWS:
                self._requests(limit).drop(request_id)
            elif limit.kind in TOKEN_KINDS and used > amount:
                self._window(limit).take(used - amount, now_ms)
            elif limit.kind in TOKEN_KINDS:
                self._window(limit).give_back(amount - used, bucket, now_ms)
        ended.state, ended.taken = state, []
        self._unhold(tenant_id, request_id)
        return Outcome(True, state)

    def _window(self, limit: Limit) -> BucketWindow:
        counter = self._windows.get((limit.scope, limit.kind))
        if counter is None:
            counter = self._windows[limit.scope, limit.kind] = BucketWindow(WINDOWS[limit.kind])
        return counter

    def _requests(self, limit: Limit) -> RunningRequests:
        return self._running.setdefault(limit.scope, RunningRequests())

    def _used(self, limit: Limit, now_ms: int) -> int:
        return (self._window(limit) if limit.kind in WINDOWS else self._requests(limit)).used(now_ms)

    def _reset_ms(self, limit: Limit, now_ms: int) -> int:
        return (self._window(limit) if limit.kind in WINDOWS else self._requests(limit)).reset_ms(now_ms)

    def _read(self, limit: Limit, amount: int, now_ms: int) -> Reading:
        used = self._used(limit, now_ms)
        excess = used + amount - limit.max_amount
        if is_too_large(limit, amount):
            wait_ms = NEVER_MS
        elif excess <= 0:
            wait_ms = 0
        elif limit.kind in WINDOWS:
            wait_ms = self._window(limit).wait_ms(excess, now_ms)
        else:
            wait_ms = 1
        return Reading(used, self._reset_ms(limit, now_ms), wait_ms)

    def _take(self, limit: Limit, amount: int, request_id: str, now_ms: int) -> int:
        if limit.kind in WINDOWS:
            return self._window(limit).take(amount, now_ms)
        self._requests(limit).hold(request_id, now_ms + self._lease_ms)
        return 0
