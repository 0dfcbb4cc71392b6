"""The endpoints of `/admin/v1`, and the table of them that routes, OpenAPI and tests are made from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse, Response

from footplate.platform.http.admin.billing_endpoints import billing_routes
from footplate.platform.http.admin.capture_endpoints import capture_routes
from footplate.platform.http.admin.exchange import PAGE_PARAMETERS, PREFIX, AdminExchange, AdminRoute, listed
from footplate.platform.http.admin.model_endpoints import model_routes
from footplate.platform.http.admin.route_endpoints import route_routes
from footplate.platform.http.admin.schemas import (
    AuditAnswer,
    EmptyBody,
    HealthAnswer,
    KeyAnswer,
    KeyBody,
    NewKeyAnswer,
    QuotaAnswer,
    QuotaBody,
    RotatedKeyAnswer,
    RotationBody,
    TenantAnswer,
    TenantBody,
    TenantChangeBody,
)
from footplate.platform.http.health import ReadinessCheck, dependency_states
from footplate.tenancy.access import Action
from footplate.tenancy.admin import keys, quotas, tenants
from footplate.tenancy.api_keys import Role


async def create_tenant(exchange: AdminExchange) -> Response:
    """Make a tenant."""
    return await exchange.change(
        lambda writer: tenants.create_tenant(writer, exchange.caller, exchange.given)
    )


async def list_tenants(exchange: AdminExchange) -> Response:
    """Tenants in the order they were made, or the one of a name."""
    page, name = exchange.page(), exchange.query("name")
    found = await exchange.desk.read(lambda reader: tenants.list_tenants(reader, exchange.caller, page, name))
    shown = [tenants.shown_tenant(exchange.caller, tenant) for tenant in found.items]
    return listed(shown, has_more=found.has_more)


async def show_tenant(exchange: AdminExchange) -> Response:
    """One tenant."""
    tenant_id = exchange.tenant_id
    found = await exchange.desk.read(
        lambda reader: tenants.find_tenant(reader, exchange.caller, tenant_id, Action.READ_TENANT)
    )
    return JSONResponse(tenants.shown_tenant(exchange.caller, found))


async def update_tenant(exchange: AdminExchange) -> Response:
    """Change a tenant's name, cost centre, share group, labels or whether its content may be kept."""
    tenant_id = exchange.tenant_id
    return await exchange.change(
        lambda writer: tenants.update_tenant(writer, exchange.caller, tenant_id, exchange.given)
    )


async def suspend_tenant(exchange: AdminExchange) -> Response:
    """Let none of a tenant's keys open anything."""
    tenant_id = exchange.tenant_id
    return await exchange.change(lambda writer: tenants.suspend_tenant(writer, exchange.caller, tenant_id))


async def resume_tenant(exchange: AdminExchange) -> Response:
    """Undo a suspension."""
    tenant_id = exchange.tenant_id
    return await exchange.change(lambda writer: tenants.resume_tenant(writer, exchange.caller, tenant_id))


async def create_key(exchange: AdminExchange) -> Response:
    """Make a key; its text is in this answer and nowhere else."""
    tenant_id, desk = exchange.tenant_id, exchange.desk
    fields = {"role": Role.MEMBER, **exchange.given}
    return await exchange.change(
        lambda writer: keys.create_key(
            writer, exchange.caller, tenant_id, fields, pepper=desk.pepper, now=desk.now()
        )
    )


async def list_keys(exchange: AdminExchange) -> Response:
    """A tenant's keys in the order they were made, ended ones too."""
    tenant_id, page, now = exchange.tenant_id, exchange.page(), exchange.desk.now()
    found = await exchange.desk.read(lambda reader: keys.list_keys(reader, exchange.caller, tenant_id, page))
    return listed([keys.key_fields(key, now) for key in found.items], has_more=found.has_more)


async def rotate_key(exchange: AdminExchange) -> Response:
    """Make a key in place of one that goes on working for a while."""
    key_id, desk = exchange.key_id, exchange.desk
    options = {name: value for name, value in exchange.given.items() if value is not None}
    return await exchange.change(
        lambda writer: keys.rotate_key(
            writer, exchange.caller, key_id, pepper=desk.pepper, now=desk.now(), **options
        )
    )


async def revoke_key(exchange: AdminExchange) -> Response:
    """End a key for good."""
    key_id, desk = exchange.key_id, exchange.desk
    return await exchange.change(
        lambda writer: keys.revoke_key(writer, exchange.caller, key_id, now=desk.now())
    )


async def show_tenant_quota(exchange: AdminExchange) -> Response:
    """A tenant's quota, or the default where it has none."""
    tenant_id, default = exchange.tenant_id, exchange.desk.default_quota
    return JSONResponse(
        await exchange.desk.read(
            lambda reader: quotas.tenant_quota(reader, exchange.caller, tenant_id, default=default)
        )
    )


async def set_tenant_quota(exchange: AdminExchange) -> Response:
    """Put a quota in place of what a tenant had."""
    tenant_id, fields = exchange.tenant_id, _written(exchange)
    return await exchange.change(
        lambda writer: quotas.set_tenant_quota(writer, exchange.caller, tenant_id, fields)
    )


async def show_key_quota(exchange: AdminExchange) -> Response:
    """A key's own limits, beside which its tenant's hold."""
    key_id = exchange.key_id
    return JSONResponse(
        await exchange.desk.read(lambda reader: quotas.key_quota(reader, exchange.caller, key_id))
    )


async def set_key_quota(exchange: AdminExchange) -> Response:
    """Put a quota in place of what a key had."""
    key_id, fields = exchange.key_id, _written(exchange)
    return await exchange.change(lambda writer: quotas.set_key_quota(writer, exchange.caller, key_id, fields))


def _written(exchange: AdminExchange) -> dict[str, Any]:
    return exchange.body.model_dump(exclude_unset=True)


async def list_records(exchange: AdminExchange) -> Response:
    """Audit records in the order in which changes took hold; `order=desc` begins with the last."""
    page, tenant_id, target_id = exchange.page(), exchange.query("tenant_id"), exchange.query("target_id")
    found = await exchange.desk.read(
        lambda reader: reader.records(page, tenant_id=tenant_id, target_id=target_id)
    )
    return listed([record.fields() for record in found.items], has_more=found.has_more)


def admin_routes(checks: Mapping[str, ReadinessCheck]) -> tuple[AdminRoute, ...]:
    """Every endpoint of the admin API. `checks` are those of `/readyz`."""

    async def show_health(exchange: AdminExchange) -> Response:
        """Each dependency and its mode; 200 whatever they are, for a page that shows them."""
        body, _ = await dependency_states(checks)
        return JSONResponse(body)

    tenant, key, paged = f"{PREFIX}/tenants/{{tenant_id}}", f"{PREFIX}/keys/{{key_id}}", PAGE_PARAMETERS
    every, filters = f"{PREFIX}/tenants", ("tenant_id", "target_id")
    a = Action
    return (
        AdminRoute("POST", every, a.CREATE_TENANT, create_tenant, TenantAnswer, TenantBody),
        AdminRoute(
            "GET", every, a.READ_TENANT, list_tenants, TenantAnswer, None, (*paged, "name"), is_list=True
        ),
        AdminRoute("GET", tenant, a.READ_TENANT, show_tenant, TenantAnswer),
        AdminRoute("PATCH", tenant, a.UPDATE_TENANT, update_tenant, TenantAnswer, TenantChangeBody),
        AdminRoute("POST", f"{tenant}/suspend", a.SUSPEND_TENANT, suspend_tenant, TenantAnswer, EmptyBody),
        AdminRoute("POST", f"{tenant}/resume", a.RESUME_TENANT, resume_tenant, TenantAnswer, EmptyBody),
        AdminRoute("POST", f"{tenant}/keys", a.CREATE_KEY, create_key, NewKeyAnswer, KeyBody),
        AdminRoute("GET", f"{tenant}/keys", a.READ_KEY, list_keys, KeyAnswer, None, paged, is_list=True),
        AdminRoute("POST", f"{key}/rotate", a.ROTATE_KEY, rotate_key, RotatedKeyAnswer, RotationBody),
        AdminRoute("POST", f"{key}/revoke", a.REVOKE_KEY, revoke_key, KeyAnswer, EmptyBody),
        AdminRoute("GET", f"{tenant}/quota", a.READ_QUOTA, show_tenant_quota, QuotaAnswer),
        AdminRoute("PUT", f"{tenant}/quota", a.SET_TENANT_QUOTA, set_tenant_quota, QuotaAnswer, QuotaBody),
        AdminRoute("GET", f"{key}/quota", a.READ_KEY_QUOTA, show_key_quota, QuotaAnswer),
        AdminRoute("PUT", f"{key}/quota", a.SET_KEY_QUOTA, set_key_quota, QuotaAnswer, QuotaBody),
        *model_routes(),
        AdminRoute(
            "GET",
            f"{PREFIX}/audit",
            a.READ_AUDIT,
            list_records,
            AuditAnswer,
            None,
            (*paged, *filters),
            is_list=True,
        ),
        AdminRoute("GET", f"{PREFIX}/health", a.READ_HEALTH, show_health, HealthAnswer),
        *billing_routes(paged),
        *route_routes(),
        *capture_routes(paged),
    )
