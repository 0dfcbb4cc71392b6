"""Ends leases that nobody else comes to: those of tenants that call no more.

Every call of a tenant ends its leases that are over, so nobody waits for this: it only lets a gateway's death
be known, counters be right for those who read them, and what was noted of its requests come to whoever
takes care of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from footplate.tenancy.errors import LimiterCallFailed, LimiterUnavailable
from footplate.tenancy.limiter.reservations import Limiter, LostRequest, LostRequests

_LOGGER = logging.getLogger(__name__)
MAX_SWEEPS_AT_ONCE = 16


class ActiveTenants(Protocol):
    """Which tenants may have leases, as all gateways know it together."""

    async def claim_round(self, for_s: float) -> bool:
        """Whether this gateway is the one to sweep for the next seconds.

        Raises:
            LimiterUnavailable: the store can't be asked.
        """
        ...

    async def listed(self) -> Sequence[str]:
        """Every tenant that a gateway has reserved or beaten for, until it is dropped.

        Raises:
            LimiterUnavailable: as above.
        """
        ...

    async def drop_if_idle(self, tenant_id: str) -> None:
        """Take a tenant that has no lease off the list, unless a gateway has noted it in recent time.

        Raises:
            LimiterUnavailable: as above.
        """
        ...


class LostPort(Protocol):
    """Takes care of requests whose gateways died. May be told of the same request more than once."""

    async def take_care(self, lost: Sequence[LostRequest]) -> None:
        """Returns when nothing more has to be known of them; whatever it raises, they will come again."""
        ...


class Reaper:
    """Every gateway runs one; of them all, one sweeps in each period.

    What was noted of requests whose leases are over goes to `port`, and is forgotten only when that returns.
    """

    def __init__(
        self,
        limiter: Limiter,
        tenants: ActiveTenants,
        period_s: float,
        lost: LostRequests,
        port: LostPort | None = None,
    ) -> None:
        self._limiter = limiter
        self._lost = lost
        self._port = port
        self._tenants = tenants
        self._period_s = period_s

    async def run(self) -> None:
        """Sweep until cancelled. While the store is away there is nothing to sweep."""
        while True:
            await asyncio.sleep(self._period_s)
            try:
                num_ended = await self.sweep_round()
            except LimiterUnavailable:
                continue
            except Exception:
                _LOGGER.exception("a round of the reaper failed; the next one does its work too")
                continue
            if num_ended:
                _LOGGER.info("%d reservations ended with their leases", num_ended)

    async def sweep_round(self) -> int:
        """One round over all tenants, if it is this gateway's turn; how many leases were ended.

        Raises:
            LimiterUnavailable: the store can't be asked.
        """
        if not await self._tenants.claim_round(self._period_s):
            return 0
        names = await self._tenants.listed()
        num_ended = 0
        for first in range(0, len(names), MAX_SWEEPS_AT_ONCE):
            part = names[first : first + MAX_SWEEPS_AT_ONCE]
            num_ended += sum(await asyncio.gather(*(self._sweep(name) for name in part)))
        return num_ended

    async def _sweep(self, tenant_id: str) -> int:
        num_ended = 0
        try:
            while found := await self._limiter.sweep(tenant_id):
                num_ended += found
            await self._hand_over(tenant_id)
        except LimiterCallFailed:
            _LOGGER.warning("the leases of one tenant can't be swept: a value is damaged")
        return num_ended

    async def _hand_over(self, tenant_id: str) -> None:
        """Tell of every lost request of a tenant; one that has nothing left leaves the list."""
        found, num_left = await self._lost.lost(tenant_id)
        while found and self._port is not None:
            await self._port.take_care(found)
            await self._lost.forget_lost(tenant_id, [request.request_id for request in found])
            found, num_left = await self._lost.lost(tenant_id)
        if not found and not num_left:
            await self._tenants.drop_if_idle(tenant_id)
