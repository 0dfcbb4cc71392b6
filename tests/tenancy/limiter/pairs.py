"""A limiter and the model beside it: every call goes to both, and both must say the same."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from footplate.tenancy.adapters.valkey.limiter import ValkeyLimiter, ValkeyLimiterConfig, connect
from footplate.tenancy.limiter.decisions import Amounts, Decision
from footplate.tenancy.limiter.limits import Limit
from footplate.tenancy.limiter.local import LocalLimiter
from footplate.tenancy.limiter.reservations import Beat, Limiter, Outcome, ReservationState
from tests.tenancy.limiter.model import Model, counter_of

LEASE_S = 30
_tenant_numbers = count()


@dataclass
class Clock:
    """Moves only when told to. For Valkey it is what is added to the server's own time."""

    offset_ms: int = 0


@dataclass
class Pair:
    """`now_ms` is the time that the limiter's last answer went by."""

    limiter: Limiter
    clock: Clock
    now_ms: Callable[[], int]
    runner: asyncio.Runner
    tenant_id: str = field(default_factory=lambda: f"tenant-{next(_tenant_numbers)}")
    model: Model = field(default_factory=lambda: Model(LEASE_S * 1000))

    def reserve(self, request_id: str, limits: Sequence[Limit], num_tokens: int) -> Decision:
        amounts = Amounts(num_tokens)
        decision = self.runner.run(self.limiter.reserve(self.tenant_id, request_id, limits, amounts))
        now = self.now_ms()
        wanted = self.model.reserve(request_id, limits, num_tokens, now)
        refusal = decision.refusal
        told = (refusal and refusal.kind, refusal and refusal.retry_after_s)
        assert told == wanted
        for state in decision.states:
            assert state.used == self.model.used(state.limit, now)
            assert state.reset_ms == self.model.reset_ms(state.limit, now)
        return decision

    def settle(self, request_id: str, num_tokens: int | None) -> Outcome:
        outcome = self.runner.run(self.limiter.settle(self.tenant_id, request_id, num_tokens))
        return self._same(
            outcome, self.model.end(request_id, ReservationState.SETTLED, num_tokens, self.now_ms())
        )

    def release(self, request_id: str) -> Outcome:
        outcome = self.runner.run(self.limiter.release(self.tenant_id, request_id))
        return self._same(outcome, self.model.end(request_id, ReservationState.RELEASED, 0, self.now_ms()))

    def heartbeat(self, request_id: str, num_tokens: int = 0) -> Outcome:
        beats = [Beat(request_id, num_tokens)]
        [outcome] = self.runner.run(self.limiter.heartbeat(self.tenant_id, beats))
        return self._same(outcome, self.model.heartbeat(request_id, num_tokens, self.now_ms()))

    def sweep(self) -> int:
        num_ended = self.runner.run(self.limiter.sweep(self.tenant_id))
        assert num_ended == self.model.end_leases(self.now_ms())
        return num_ended

    def used(self, *limits: Limit) -> list[int]:
        states = self.runner.run(self.limiter.peek(self.tenant_id, limits))
        self.model.end_leases(self.now_ms())
        for limit in limits:
            self.model.roll(counter_of(limit), self.now_ms())
        used = [state.used for state in states]
        assert used == [self.model.used(limit, self.now_ms()) for limit in limits]
        return used

    def advance(self, seconds: float) -> None:
        self.clock.offset_ms += round(seconds * 1000)

    def _same(self, outcome: Outcome, wanted: tuple[bool, ReservationState]) -> Outcome:
        assert (outcome.is_changed, outcome.state) == wanted
        return outcome


@contextlib.contextmanager
def valkey_pair(url: str) -> Iterator[Pair]:
    """A pair over a real server, for a tenant that no other pair has."""
    clock = Clock()
    client = connect(url, timeout_s=5)
    config = ValkeyLimiterConfig(lease_s=LEASE_S, timeout_s=10)
    limiter = ValkeyLimiter(client, config, clock_offset_ms=lambda: clock.offset_ms)
    with asyncio.Runner() as runner:
        try:
            yield Pair(limiter, clock, lambda: limiter.last_answer_ms, runner)
        finally:
            runner.run(client.aclose())


@contextlib.contextmanager
def local_pair() -> Iterator[Pair]:
    """A pair over this process's memory."""
    # Late enough for a day's window to lie in the past.
    clock = Clock(random.Random(5).randrange(10**9, 10**10))
    limiter = LocalLimiter(lease_s=LEASE_S, clock_ms=lambda: clock.offset_ms)
    with asyncio.Runner() as runner:
        yield Pair(limiter, clock, lambda: clock.offset_ms, runner)
