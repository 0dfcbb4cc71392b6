"""`GET /v1/me`: the caller's tenant, key, limits, and what it has used of them."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from footplate.platform.access import ME_ROLES
from footplate.platform.administration import AdminDesk
from footplate.platform.http.gateway import Gateway
from footplate.platform.ports import Principal, UseReader
from footplate.tenancy.admin.keys import key_fields
from footplate.tenancy.admin.quotas import shown_quota
from footplate.tenancy.admin.store import Reader
from footplate.tenancy.errors import LimiterUnavailable
from footplate.tenancy.limiter.decisions import LimitState


async def show_me(desk: AdminDesk, gateway: Gateway, request: Request) -> Response:
    """Who the key stands for. `use` is null while the counters can't be asked."""
    principal = await gateway.authenticate(request, ME_ROLES)
    tenant, key = await desk.read_own(lambda rows: _rows(rows, principal, desk))
    body = {
        "object": "me",
        "tenant": {**tenant, "quota": _quota(shown_quota(principal.tenant_quota, None))},
        "key": {**key, "quota": _quota(shown_quota(principal.key_quota, None))},
        "use": await _use(desk.use, principal),
    }
    return JSONResponse(body)


def _rows(rows: Reader, principal: Principal, desk: AdminDesk) -> tuple[dict[str, Any], dict[str, Any]]:
    tenant, key = rows.tenant(principal.tenant_id), rows.key(principal.key_id)
    shown = {} if tenant is None else tenant.fields()
    # What a tenant shares its cache with is the platform's to know.
    shown.pop("share_group", None)
    return shown, {} if key is None else key_fields(key, desk.now())


def _quota(shown: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in shown.items() if name not in ("object", "source")}


async def _use(reader: UseReader | None, principal: Principal) -> list[dict[str, Any]] | None:
    if reader is None:
        return None
    try:
        return [_state(state) for state in await reader.use(principal)]
    except LimiterUnavailable:
        return None


def _state(state: LimitState) -> dict[str, Any]:
    limit = state.limit
    return {
        "scope": "tenant" if limit.scope.key_id is None else "key",
        "model": limit.scope.model,
        "kind": limit.kind.value,
        "limit": limit.max_amount,
        "used": state.used,
        "remaining": state.remaining,
        "resets_in_s": -(-state.reset_ms // 1000),
        "mode": limit.mode.value,
    }
