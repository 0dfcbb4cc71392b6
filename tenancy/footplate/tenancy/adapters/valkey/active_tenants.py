"""The list of tenants that may have leases, in Valkey: one key, in a slot of its own."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from footplate.tenancy.adapters.valkey.calls import answer_in_time
from footplate.tenancy.errors import LimiterCallFailed

# Longer than all gateways may be away: what they left open is found by whoever comes back.
KEPT_MS = 7 * 86_400 * 1000
# A tenant is put on the list again only after so long, so that a decision stays one round trip.
NOTED_S = 600.0
MAX_NOTED = 100_000
_Answer = TypeVar("_Answer")


class ValkeyActiveTenants:
    """See `ActiveTenants`. A tenant is idle from two leases and twice `NOTED_S` after it was last noted.

    Times here are the gateways' own; minutes of difference between them do no harm.
    """

    def __init__(
        self,
        client: Any,
        *,
        lease_s: float = 30.0,
        timeout_s: float = 0.5,
        key_prefix: str = "footplate:limits",
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._client = client
        self._idle_s = 2 * NOTED_S + 2 * lease_s
        self._timeout_s = timeout_s
        self._key = f"{key_prefix}:tenants"
        self._turn = f"{key_prefix}:reaper"
        self._clock = clock
        self._now = now
        # Tenants that this gateway has put on the list, the longest ago first.
        self._noted: OrderedDict[str, float] = OrderedDict()

    async def note(self, tenant_id: str) -> None:
        """Put a tenant on the list, unless that was done a short while ago.

        Raises:
            LimiterUnavailable: the store can't be asked.
        """
        noted_at = self._noted.get(tenant_id)
        if noted_at is not None and self._clock() - noted_at < NOTED_S:
            return
        try:
            await self._ask(lambda: self._client.zadd(self._key, {tenant_id: self._now()}))
        except LimiterCallFailed:
            # Somebody wrote another thing there: nobody's decision may wait for that.
            await self._ask(lambda: self._client.delete(self._key))
            await self._ask(lambda: self._client.zadd(self._key, {tenant_id: self._now()}))
        await self._ask(lambda: self._client.pexpire(self._key, KEPT_MS))
        self._noted[tenant_id] = self._clock()
        self._noted.move_to_end(tenant_id)
        if len(self._noted) > MAX_NOTED:
            self._noted.popitem(last=False)

    def forget(self, tenant_id: str) -> None:
        """The store has lost its data, this list perhaps too."""
        self._noted.pop(tenant_id, None)

    async def claim_round(self, for_s: float) -> bool:
        """As `ActiveTenants.claim_round`. A claim ends before the next round begins."""
        claim_ms = max(1, round(for_s * 900))
        if await self._ask(lambda: self._client.set(self._turn, "1", nx=True, px=claim_ms)):
            return True
        # The end of a claim is a moment of the server's clock: once that is set back it would hold till then.
        await self._ask(lambda: self._client.pexpire(self._turn, claim_ms, lt=True))
        return False

    async def listed(self) -> Sequence[str]:
        """As `ActiveTenants.listed`."""
        names: list[bytes] = await self._ask(lambda: self._client.zrange(self._key, 0, -1))
        return [name.decode() for name in names]

    async def drop_if_idle(self, tenant_id: str) -> None:
        """As `ActiveTenants.drop_if_idle`."""
        oldest = self._now() - self._idle_s
        noted_at = await self._ask(lambda: self._client.zscore(self._key, tenant_id))
        if noted_at is not None and noted_at <= oldest:
            await self._ask(lambda: self._client.zrem(self._key, tenant_id))

    async def _ask(self, call: Callable[[], Awaitable[_Answer]]) -> _Answer:
        return await answer_in_time(call, self._timeout_s)
