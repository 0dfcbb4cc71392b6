"""What is held for a request: kept alive while it runs, and ended once, whatever happens to it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from footplate.billing.usage import UsageEvent
from footplate.platform.budgets import Budgets
from footplate.platform.metering import EventSink
from footplate.tenancy.errors import TenancyError
from footplate.tenancy.limiter.decisions import Amounts, Decision, Spending, Spent
from footplate.tenancy.limiter.limits import Limit
from footplate.tenancy.limiter.reservations import Beat, Limiter, Outcome, ReservationState
from footplate.tenancy.quotas import LimitMode

_LOGGER = logging.getLogger(__name__)
# A lease outlives two lost heart-beats.
BEATS_PER_LEASE = 3
# What a gateway that dies has streamed since its last beat is what nobody knows of.
MAX_BEAT_S = 0.5


class Running(Protocol):
    """A request, as far as others must know of it."""

    @property
    def request_id(self) -> str:
        """Its own, never used twice."""
        ...

    def used_so_far(self) -> int:
        """What it counts for in limits of tokens."""
        ...

    def note(self) -> bytes:
        """What whoever finds its lease over needs to know from the start; empty: nothing."""
        ...

    def progress(self) -> bytes:
        """How far it has come by now, for the same."""
        ...


class HoldKeeper(Protocol):
    """Where requests are written down that the shared store may not know of."""

    def keep(self, request_id: str, note: bytes, progress: bytes) -> None:
        """Note one, or how far it has come since."""
        ...

    def drop(self, request_id: str) -> None:
        """It has ended, or the store knows of it; unknown ones are ignored."""
        ...


@dataclass(slots=True, eq=False)
class Hold:
    """What one running request holds of its limits, and the lease under which others know of it."""

    tenant_id: str
    request_id: str
    limits: tuple[Limit, ...]
    num_tokens: int
    running: Running
    note: bytes = b""
    money: Spending | None = None
    # The lease of a request without limits, which nothing waits for until its first token.
    leasing: asyncio.Task[Decision] | None = None
    is_open: bool = True
    # Held in this process alone, since the store was away when it began.
    is_local: bool = False
    told: tuple[int, bytes] = (0, b"")
    beaten_at: float = 0.0
    # Its event on the way, once it has ended with one.
    durable: asyncio.Future[Any] | None = None


class Settlement:
    """All holds of one gateway. One event loop owns it; `start` begins the heart-beats, `close` ends all.

    Ends are sent by tasks of their own, so that neither a client that leaves nor a store that is slow keeps
    one from being sent; the answer does not wait for it. A hold ends after its event is durable.
    """

    def __init__(
        self,
        limiter: Limiter,
        lease_s: float = 30.0,
        sink: EventSink | None = None,
        budgets: Budgets | None = None,
        keeper: HoldKeeper | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limiter = limiter
        self._sink = sink
        self._budgets = budgets
        self._keeper = keeper
        self._clock = clock
        self._renew_s = lease_s / BEATS_PER_LEASE
        self._beat_s = min(self._renew_s, MAX_BEAT_S)
        self._open: set[Hold] = set()
        self._ending: set[asyncio.Task[Any]] = set()
        self._beating: asyncio.Task[None] | None = None

    @property
    def num_open(self) -> int:
        """How many requests hold something."""
        return len(self._open)

    @property
    def num_ending(self) -> int:
        """How many ends are on their way to the limiter."""
        return len(self._ending)

    def open(self, hold: Hold, *, is_local: bool = False) -> None:
        """Keep a hold alive until it ends. `is_local`: the store does not have it."""
        if is_local:
            self._note_local(hold)
        hold.beaten_at = self._clock()
        self._open.add(hold)

    def open_beside(self, hold: Hold) -> None:
        """As `open`, and make the lease of a request that no limit has to admit, while it begins."""

        async def lease() -> Decision:
            decision = await self._limiter.reserve(hold.tenant_id, hold.request_id, (), Amounts(), hold.note)
            if decision.is_local:
                self._note_local(hold)
            return decision

        hold.leasing = asyncio.create_task(lease())
        self.open(hold)

    def settle(self, hold: Hold, num_tokens: int, event: UsageEvent | None = None) -> None:
        """End a hold with what was used. The first end of a hold is the only one."""
        if self._take_out(hold):

            def end() -> Coroutine[Any, Any, Outcome]:
                spent = self._spent(hold, event)
                return self._limiter.settle(hold.tenant_id, hold.request_id, num_tokens, spent)

            self._take_event(hold, event)
            self.spawn(self._end(hold, end))

    def release(self, hold: Hold, event: UsageEvent | None = None) -> None:
        """End a hold as if it had never been: the work did not begin, or gave nothing."""
        if self._take_out(hold):

            def end() -> Coroutine[Any, Any, Outcome]:
                return self._limiter.release(hold.tenant_id, hold.request_id)

            self._take_event(hold, event)
            self.spawn(self._end(hold, end))

    def release_when_decided(self, asking: asyncio.Future[Decision], tenant_id: str, request_id: str) -> None:
        """Give back what is still being asked for: its client has left."""

        async def wait_and_release() -> None:
            decision = await asking
            if decision.is_admitted:
                await self._limiter.release(tenant_id, request_id)

        self.spawn(wait_and_release())

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[None]:
        """Do what belongs to the end of a hold, to its end."""
        task = asyncio.create_task(_said(work))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        return task

    def start(self) -> None:
        """Begin to beat."""
        self._beating = asyncio.create_task(self._beat_forever())

    async def close(self) -> None:
        """Stop beating and wait until every end that was begun is sent."""
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.gather(self._beating, return_exceptions=True)
        while self._ending:
            await asyncio.gather(*self._ending, return_exceptions=True)

    async def beat(self) -> None:
        """Tell how far every open hold has come, and begin its lease anew: one call for each tenant.

        One that has come no further is left out until a third of its lease is over.
        """
        now = self._clock()
        due: defaultdict[str, list[tuple[Hold, Beat]]] = defaultdict(list)
        for hold in self._open:
            beat = self._beat_of(hold, now)
            if beat is not None:
                due[hold.tenant_id].append((hold, beat))
        calls = [self._beat_tenant(tenant_id, beats, now) for tenant_id, beats in due.items()]
        for error in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(error, Exception) and not isinstance(error, TenancyError):
                _LOGGER.error("heart-beats failed", exc_info=error)

    def _take_event(self, hold: Hold, event: UsageEvent | None) -> None:
        if event is not None and self._sink is not None:
            hold.durable = self._sink.take(event)

    def _spent(self, hold: Hold, event: UsageEvent | None) -> Spent | None:
        if hold.money is None or event is None or self._budgets is None:
            return None
        return Spent(self._budgets.cost(event), self._budgets.now_ms())

    async def _end(
        self,
        hold: Hold,
        end: Callable[[], Coroutine[Any, Any, Outcome]],
    ) -> None:
        try:
            if hold.durable is not None:
                await hold.durable
            if hold.leasing is not None:
                await hold.leasing
        finally:
            # Until here its lease is kept up: nobody else is to write what is on its way.
            self._open.discard(hold)
        if self._keeper is not None:
            self._keeper.drop(hold.request_id)
        await end()

    def _note_local(self, hold: Hold) -> None:
        hold.is_local = True
        self._keep(hold, b"")

    def _keep(self, hold: Hold, progress: bytes) -> None:
        if self._keeper is not None and hold.note:
            self._keeper.keep(hold.request_id, hold.note, progress)

    def _take_out(self, hold: Hold) -> bool:
        is_first, hold.is_open = hold.is_open, False
        return is_first

    async def _beat_forever(self) -> None:
        while True:
            await asyncio.sleep(self._beat_s)
            await self.beat()

    def _beat_of(self, hold: Hold, now: float) -> Beat | None:
        if hold.leasing is not None and not hold.leasing.done():
            return None
        now_known = hold.told
        if hold.is_open:
            now_known = (hold.running.used_so_far(), hold.running.progress() if hold.note else b"")
        if now_known == hold.told and now - hold.beaten_at < self._renew_s:
            return None
        return Beat(hold.request_id, *now_known)

    async def _beat_tenant(self, tenant_id: str, beats: Sequence[tuple[Hold, Beat]], now: float) -> None:
        outcomes = await self._limiter.heartbeat(tenant_id, [beat for _, beat in beats])
        for (hold, beat), outcome in zip(beats, outcomes, strict=True):
            self._note_heard(hold, beat, outcome)
            if outcome.state is ReservationState.UNKNOWN and hold.is_open:
                await self._hold_again(hold)
            elif outcome.state is not ReservationState.UNHEARD:
                hold.beaten_at = now
                hold.told = (beat.num_tokens, beat.progress)

    def _note_heard(self, hold: Hold, beat: Beat, outcome: Outcome) -> None:
        """While the store does not hear of a request, it stands on this machine's disk."""
        if hold not in self._open:
            return  # it ended meanwhile
        if outcome.state is ReservationState.UNHEARD or hold.is_local:
            self._keep(hold, beat.progress)
        elif self._keeper is not None:
            self._keeper.drop(hold.request_id)

    async def _hold_again(self, hold: Hold) -> None:
        """The store has lost its data: count what runs anew, whatever the limits say of it now."""
        limits = [replace(limit, mode=LimitMode.SHADOW) for limit in hold.limits]
        amounts = Amounts(hold.num_tokens)
        money = None if hold.money is None else hold.money.only_counted()
        await self._limiter.reserve(hold.tenant_id, hold.request_id, limits, amounts, hold.note, money)
        hold.told = (0, b"")
        if not hold.is_open:
            # It ended meanwhile, and its end may have come before this.
            await self._limiter.settle(hold.tenant_id, hold.request_id, hold.running.used_so_far())


async def _said(work: Coroutine[Any, Any, Any]) -> None:
    """Run the end of a hold. One that can't be told ends with its lease, and a line says so."""
    try:
        await work
    except TenancyError as error:
        _LOGGER.warning("a reservation could not be ended: %s", type(error).__name__)
