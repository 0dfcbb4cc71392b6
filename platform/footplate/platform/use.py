"""How much of its limits a caller has used, as the limiter counts it."""

from __future__ import annotations

from collections.abc import Sequence

from footplate.platform.ports import Principal
from footplate.tenancy.limiter.decisions import LimitState
from footplate.tenancy.limiter.limits import Limit, limits_for
from footplate.tenancy.limiter.reservations import Limiter


class LimiterUse:
    """A `ports.UseReader` over any limiter. Nothing is taken."""

    def __init__(self, limiter: Limiter) -> None:
        self._limiter = limiter

    async def use(self, principal: Principal) -> Sequence[LimitState]:
        """Every limit that some request of the principal meets. Raises LimiterUnavailable."""
        limits = all_limits(principal)
        return await self._limiter.peek(principal.tenant_id, limits) if limits else ()


def all_limits(principal: Principal) -> list[Limit]:
    """The limits of a principal's tenant and key, over all models and for each that has its own."""
    tenant_quota, key_quota = principal.tenant_quota, principal.key_quota
    models = {"", *tenant_quota.per_model, *(key_quota.per_model if key_quota is not None else ())}
    found = {
        (limit.scope, limit.kind): limit
        for model in sorted(models)
        for limit in limits_for(
            principal.tenant_id,
            principal.key_id,
            model,
            tenant_quota=tenant_quota,
            key_quota=key_quota,
        )
    }
    return list(found.values())
