"""Quotas: shown and set, of a tenant or of a key. Setting replaces the whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from footplate.tenancy.access import PLATFORM_QUOTA_FIELDS, Action, require_grant
from footplate.tenancy.admin.audit import AuditRecord, Caller, Outcome, Target, TargetKind
from footplate.tenancy.admin.keys import find_key
from footplate.tenancy.admin.store import Reader, Writer
from footplate.tenancy.admin.tenants import find_tenant
from footplate.tenancy.api_keys import Role
from footplate.tenancy.errors import AccessDenied
from footplate.tenancy.quotas import FIELDS, Quota


def tenant_quota(reader: Reader, caller: Caller, tenant_id: str, *, default: Quota) -> dict[str, Any]:
    """A tenant's quota, or the default where it has none. Raises AccessDenied or NotFound."""
    tenant = find_tenant(reader, caller, tenant_id, Action.READ_QUOTA)
    return shown_quota(tenant.quota, default)


def set_tenant_quota(
    writer: Writer, caller: Caller, tenant_id: str, fields: Mapping[str, Any]
) -> dict[str, Any]:
    """Put a tenant's quota in place of what it had.

    Raises:
        InvalidQuota: a field can't be so.
        AccessDenied, NotFound: as `find_tenant`.
    """
    tenant = find_tenant(writer, caller, tenant_id, Action.SET_TENANT_QUOTA)
    quota = Quota.parse_new(fields)
    writer.save_tenant(replace(tenant, quota=quota))
    target = Target(TargetKind.TENANT, tenant.id, tenant.id)
    _record(writer, caller, Action.SET_TENANT_QUOTA, target, tenant.quota, quota)
    return shown_quota(quota, None)


def key_quota(reader: Reader, caller: Caller, key_id: str) -> dict[str, Any]:
    """A key's own limits; its tenant's hold beside them. Raises AccessDenied or NotFound."""
    return shown_quota(find_key(reader, caller, key_id, Action.READ_KEY_QUOTA).quota, None)


def set_key_quota(writer: Writer, caller: Caller, key_id: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Put a key's quota in place of what it had.

    A tenant's admin may set what limits the key within its tenant. Fields beyond that stay as they are, and
    naming one with another value is refused.

    Raises:
        InvalidQuota: a field can't be so.
        AccessDenied: the caller may not limit this key, or not set a field.
        NotFound: as `find_key`.
    """
    key = find_key(writer, caller, key_id, Action.SET_KEY_QUOTA)
    require_grant(caller.role, key.role)
    if caller.role is not Role.PLATFORM_ADMIN:
        fields = _kept_platform_fields(key.quota, fields)
    quota = Quota.parse_new(fields)
    writer.save_key(replace(key, quota=quota))
    target = Target(TargetKind.KEY, key.public_id, key.tenant_id)
    _record(writer, caller, Action.SET_KEY_QUOTA, target, key.quota, quota)
    return shown_quota(quota, None)


def shown_quota(own: Quota | None, default: Quota | None) -> dict[str, Any]:
    """Every field of a quota, and whether it is the holder's own, the default, or none at all."""
    quota = own or default or Quota()
    source = "own" if own is not None else "none" if default is None else "default"
    return {"object": "quota", "source": source, **dict.fromkeys(FIELDS), **quota.fields()}


def _kept_platform_fields(before: Quota | None, fields: Mapping[str, Any]) -> dict[str, Any]:
    present = {} if before is None else before.fields()
    kept = dict(fields)
    for name in sorted(PLATFORM_QUOTA_FIELDS):
        if kept.get(name) not in (None, present.get(name)):
            raise AccessDenied(f"{name} is set by the platform's admins")
        kept[name] = present.get(name)
    return kept


def _record(
    writer: Writer, caller: Caller, action: Action, target: Target, before: Quota | None, after: Quota
) -> None:
    shown = None if before is None else before.fields()
    writer.record(AuditRecord(action, Outcome.DONE, caller, target, shown, after.fields()))
