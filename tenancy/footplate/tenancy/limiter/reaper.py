"""Ends leases that nobody else comes to: those of tenants that call no more.

Every call of a tenant ends its leases that are over, so nobody waits for this: it only lets a gateway's death
be known, and counters be right for those who read them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from footplate.tenancy.errors import LimiterCallFailed, LimiterUnavailable
from footplate.tenancy.limiter.reservations import Limiter

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
        """Every tenant that a gateway has reserved or beaten for in recent time.

        Raises:
            LimiterUnavailable: as above.
        """
        ...


class Reaper:
    """Every gateway runs one; of them all, one sweeps in each period."""

    def __init__(self, limiter: Limiter, tenants: ActiveTenants, period_s: float) -> None:
        self._limiter = limiter
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
        except LimiterCallFailed:
            _LOGGER.warning("the leases of one tenant can't be swept: a value is damaged")
        return num_ended
