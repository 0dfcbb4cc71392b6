"""Tenants: made, listed, changed, suspended and resumed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from footplate.tenancy.access import Action, Reach, reach_of, require_reach, require_role
from footplate.tenancy.admin.audit import AuditRecord, Caller, Outcome, Target, TargetKind
from footplate.tenancy.admin.store import Listed, Page, Reader, Writer
from footplate.tenancy.errors import Conflict, InvalidValue, NotFound
from footplate.tenancy.tenants import Tenant, check_labels, check_text, check_timezone, normalised

Fields = Mapping[str, Any]
UPDATABLE = ("name", "cost_center", "share_group", "timezone", "labels", "captures_content")
# Of these null takes away what was set.
_NULLABLE = ("share_group", "timezone")


def create_tenant(writer: Writer, caller: Caller, fields: Fields) -> dict[str, Any]:
    """A new tenant of `name`, and of what else in `UPDATABLE` is given.

    Raises:
        AccessDenied, InvalidValue: see their texts.
        NameTaken: there is one of that name.
    """
    require_role(caller.role, Action.CREATE_TENANT)
    if "name" not in fields:
        raise InvalidValue("a tenant needs a name", "name")
    tenant = writer.add_tenant(_changed(Tenant(id="", name=""), fields))
    _record(writer, caller, Action.CREATE_TENANT, tenant, None)
    return tenant.fields()


def list_tenants(reader: Reader, caller: Caller, page: Page, name: str | None = None) -> Listed[Tenant]:
    """The tenants that the caller may know of, or the one of a name."""
    require_role(caller.role, Action.READ_TENANT)
    is_own = reach_of(caller.role, Action.READ_TENANT) is Reach.OWN
    name = None if name is None else normalised(name)
    return reader.tenants(page, only_id=caller.tenant_id if is_own else None, name=name)


def find_tenant(reader: Reader, caller: Caller, tenant_id: str, action: Action) -> Tenant:
    """A tenant that the caller may do this to.

    Raises:
        AccessDenied: the caller may do it to none.
        NotFound: there is no such tenant, or it is another's.
    """
    require_reach(caller.role, caller.tenant_id, action, tenant_id)
    tenant = reader.tenant(tenant_id)
    if tenant is None:
        raise NotFound("there is no such tenant or key")
    return tenant


def shown_tenant(caller: Caller, tenant: Tenant) -> dict[str, Any]:
    """A tenant as the caller may see it: whom it shares its cache with is the platform's to know."""
    fields = tenant.fields()
    if reach_of(caller.role, Action.READ_TENANT) is not Reach.ALL:
        del fields["share_group"]
    return fields


def update_tenant(writer: Writer, caller: Caller, tenant_id: str, fields: Fields) -> dict[str, Any]:
    """Change what is given of `UPDATABLE`; raises as `create_tenant` and `find_tenant` do."""
    before = find_tenant(writer, caller, tenant_id, Action.UPDATE_TENANT)
    return _save(writer, caller, Action.UPDATE_TENANT, before, _changed(before, fields))


def suspend_tenant(writer: Writer, caller: Caller, tenant_id: str) -> dict[str, Any]:
    """Let no key of a tenant open anything until it is resumed.

    Raises:
        Conflict: the caller's key would be among them, and nobody could undo it.
        AccessDenied, NotFound: as `find_tenant`.
    """
    before = find_tenant(writer, caller, tenant_id, Action.SUSPEND_TENANT)
    if tenant_id == caller.tenant_id:
        raise Conflict("this key belongs to the tenant it is to suspend; use a key of another tenant")
    return _save(writer, caller, Action.SUSPEND_TENANT, before, replace(before, is_suspended=True))


def resume_tenant(writer: Writer, caller: Caller, tenant_id: str) -> dict[str, Any]:
    """Undo a suspension. Raises AccessDenied or NotFound."""
    before = find_tenant(writer, caller, tenant_id, Action.RESUME_TENANT)
    return _save(writer, caller, Action.RESUME_TENANT, before, replace(before, is_suspended=False))


def _changed(tenant: Tenant, fields: Fields) -> Tenant:
    values: dict[str, Any] = {}
    for name in UPDATABLE:
        if name not in fields:
            continue
        value = fields[name]
        if value is None and name not in _NULLABLE:
            raise InvalidValue(f"{name} can't be null; leave it out to keep it", name)
        if name == "labels":
            values[name] = check_labels(value)
        elif name == "captures_content":
            values[name] = bool(value)
        elif name == "timezone" and value is not None:
            values[name] = check_timezone(value)
        elif value is not None:
            values[name] = check_text(name, value, least=0 if name == "cost_center" else 1)
        else:
            values[name] = None
    return replace(tenant, **values)


def _save(writer: Writer, caller: Caller, action: Action, before: Tenant, after: Tenant) -> dict[str, Any]:
    writer.save_tenant(after)
    _record(writer, caller, action, after, before)
    return after.fields()


def _record(writer: Writer, caller: Caller, action: Action, after: Tenant, before: Tenant | None) -> None:
    target = Target(TargetKind.TENANT, after.id, after.id)
    shown = None if before is None else before.fields()
    writer.record(AuditRecord(action, Outcome.DONE, caller, target, shown, after.fields()))
