"""The limiter of one gateway over Valkey, with what keeps it right in the background."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from footplate.platform.admission import Admission
from footplate.platform.budgets import Budgets
from footplate.platform.http.health import Readiness
from footplate.platform.idempotency import RequestClaims
from footplate.platform.metering import LostRequestMeter, Metering
from footplate.platform.metrics import LimitMetrics
from footplate.platform.settings import LimitSettings
from footplate.platform.settlement import HoldKeeper, Settlement
from footplate.tenancy.adapters.valkey.active_tenants import ValkeyActiveTenants
from footplate.tenancy.adapters.valkey.limiter import ValkeyLimiter, ValkeyLimiterConfig, connect
from footplate.tenancy.limiter.breaker import Breaker
from footplate.tenancy.limiter.degrading import DegradedConfig, DegradedMode, DegradingLimiter
from footplate.tenancy.limiter.limits import LimitKind
from footplate.tenancy.limiter.local import LocalLimiter
from footplate.tenancy.limiter.reaper import Reaper

LOOK_S = 0.5
STORE_TIMEOUT_S = (
    0.3  # of a connection and of an answer: a refusal by the declared mode comes well within 1 s
)


class GatewayLimits:
    """Owns the client to Valkey and all background work of the limits; belongs to one event loop."""

    def __init__(
        self,
        redis_url: str,
        settings: LimitSettings,
        *,
        num_gateways: int = 1,
        metering: Metering | None = None,
        budgets: Budgets | None = None,
        claims: RequestClaims | None = None,
        keeper: HoldKeeper | None = None,
    ) -> None:
        lease_s = settings.lease_s
        self._client = connect(redis_url, timeout_s=STORE_TIMEOUT_S)
        tenants = ValkeyActiveTenants(self._client, lease_s=lease_s)
        config = ValkeyLimiterConfig(lease_s=lease_s, timeout_s=STORE_TIMEOUT_S)
        shared = ValkeyLimiter(self._client, config, tenants=tenants)
        # Every kind of limit is a rate: budgets are closed while the store is away.
        mode = DegradedMode(settings.degraded_mode.rate)
        degraded = DegradedConfig(dict.fromkeys(LimitKind, mode), local_share=1 / num_gateways)
        self.limiter = DegradingLimiter(shared, LocalLimiter(lease_s=lease_s), Breaker(), degraded)
        sink = None if metering is None else metering.sink
        settlement = Settlement(self.limiter, lease_s, sink, budgets, keeper)
        gauges: tuple[tuple[str, str, Callable[[], float]], ...] = (
            ("limits_degraded", "1 while the shared limits can't be asked", lambda: self.limiter.is_degraded),
            ("limits_mode_changes", "Times the shared limits were lost or found", self._num_changes),
            ("reservations_open", "Requests that hold a reservation", lambda: settlement.num_open),
            ("reservations_unsent", "Ends of reservations not told yet", lambda: self.limiter.num_unsent),
        )
        self.admission = Admission(self.limiter, settlement, LimitMetrics(gauges), metering, budgets, claims)
        port = None if metering is None else LostRequestMeter(metering)
        self._reaper = Reaper(shared, tenants, period_s=max(1.0, lease_s / 3), lost=shared, port=port)
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to beat for open reservations, to look after the store and to reap."""
        self.admission.settlement.start()
        work: tuple[Coroutine[Any, Any, None], ...] = (self._reaper.run(), self._look())
        self._tasks = [asyncio.create_task(item) for item in work]

    async def close(self) -> None:
        """End the background work once all reservations that have ended are told."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.admission.settlement.close()
        await self.limiter.send_unsent()
        await self._client.aclose()

    def readiness_check(self) -> Callable[[], Awaitable[Readiness]]:
        """For `/readyz`: `shared`, or what the limits do while Valkey is away."""

        async def check() -> Readiness:
            if not self.limiter.is_degraded:
                return Readiness(True, "shared")
            mode = self.limiter.modes()[LimitKind.REQUESTS_PER_MINUTE]
            return Readiness(mode is not DegradedMode.CLOSED, str(mode))

        return check

    def _num_changes(self) -> float:
        return self.limiter.num_changes

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            await self.limiter.look_after_store()
