"""What is held for a request: kept alive while it runs, and ended once, whatever happens to it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

from footplate.tenancy.errors import TenancyError
from footplate.tenancy.limiter.decisions import Amounts, Decision
from footplate.tenancy.limiter.limits import Limit
from footplate.tenancy.limiter.reservations import Limiter, Outcome, ReservationState
from footplate.tenancy.quotas import LimitMode

_LOGGER = logging.getLogger(__name__)
# A lease outlives two lost heart-beats.
BEATS_PER_LEASE = 3
MAX_BEATS_AT_ONCE = 32


@dataclass(slots=True, eq=False)
class Hold:
    """What one running request holds of its limits."""

    tenant_id: str
    request_id: str
    limits: tuple[Limit, ...]
    num_tokens: int
    used_so_far: Callable[[], int]
    is_open: bool = True


class Settlement:
    """All holds of one gateway. One event loop owns it; `start` begins the heart-beats, `close` ends all.

    Ends are sent by tasks of their own, so that neither a client that leaves nor a store that is slow keeps
    one from being sent; the answer does not wait for it.
    """

    def __init__(self, limiter: Limiter, lease_s: float = 30.0) -> None:
        self._limiter = limiter
        self._beat_s = lease_s / BEATS_PER_LEASE
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

    def open(self, hold: Hold) -> None:
        """Keep a hold alive until it ends."""
        self._open.add(hold)

    def settle(self, hold: Hold, num_tokens: int) -> None:
        """End a hold with what was used. The first end of a hold is the only one."""
        if self._take_out(hold):
            self._spawn(self._limiter.settle(hold.tenant_id, hold.request_id, num_tokens))

    def release(self, hold: Hold) -> None:
        """End a hold as if it had never been: the work did not begin."""
        if self._take_out(hold):
            self._spawn(self._limiter.release(hold.tenant_id, hold.request_id))

    def release_when_decided(self, asking: asyncio.Future[Decision], tenant_id: str, request_id: str) -> None:
        """Give back what is still being asked for: its client has left."""

        async def wait_and_release() -> None:
            decision = await asking
            if decision.is_admitted:
                await self._limiter.release(tenant_id, request_id)

        self._spawn(wait_and_release())

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
        """Begin the lease of every open hold anew."""
        holds = list(self._open)
        for first in range(0, len(holds), MAX_BEATS_AT_ONCE):
            batch = holds[first : first + MAX_BEATS_AT_ONCE]
            await asyncio.gather(*(self._beat_one(hold) for hold in batch), return_exceptions=True)

    def _take_out(self, hold: Hold) -> bool:
        is_first, hold.is_open = hold.is_open, False
        self._open.discard(hold)
        return is_first

    async def _beat_forever(self) -> None:
        while True:
            await asyncio.sleep(self._beat_s)
            await self.beat()

    async def _beat_one(self, hold: Hold) -> None:
        if not hold.is_open:
            return
        outcome = await self._limiter.heartbeat(hold.tenant_id, hold.request_id, hold.used_so_far())
        if outcome.state is ReservationState.UNKNOWN and hold.is_open:
            await self._hold_again(hold)

    async def _hold_again(self, hold: Hold) -> None:
        """The store has lost its data: count what runs anew, whatever the limits say of it now."""
        limits = [replace(limit, mode=LimitMode.SHADOW) for limit in hold.limits]
        await self._limiter.reserve(hold.tenant_id, hold.request_id, limits, Amounts(hold.num_tokens))
        if not hold.is_open:
            # It ended meanwhile, and its end may have come before this.
            await self._limiter.settle(hold.tenant_id, hold.request_id, hold.used_so_far())

    def _spawn(self, work: Coroutine[Any, Any, Outcome | None]) -> None:
        task = asyncio.create_task(_said(work))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)


async def _said(work: Coroutine[Any, Any, Outcome | None]) -> None:
    """Run the end of a hold. One that can't be told ends with its lease, and a line says so."""
    try:
        await work
    except TenancyError as error:
        _LOGGER.warning("a reservation could not be ended: %s", type(error).__name__)
