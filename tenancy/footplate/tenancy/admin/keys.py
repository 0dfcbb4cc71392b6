"""Keys: made, listed, rotated with an overlap, revoked. A key's text is in the answer that makes it, once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from footplate.tenancy.access import Action, require_grant, require_reach
from footplate.tenancy.admin.audit import AuditRecord, Caller, Outcome, Target, TargetKind
from footplate.tenancy.admin.store import Listed, Page, Reader, Writer
from footplate.tenancy.admin.tenants import find_tenant
from footplate.tenancy.api_keys import KeyRecord, Role, make_key
from footplate.tenancy.errors import AccessDenied, Conflict, InvalidValue, NotFound
from footplate.tenancy.tenants import check_labels, check_text, time_text

DEFAULT_OVERLAP_S = 24 * 3600
MAX_OVERLAP_S = 30 * 24 * 3600
MAX_LIVE_KEYS = 1_000  # of one tenant
# The last second that a date can name.
LAST_EXPIRY = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)


def create_key(
    writer: Writer, caller: Caller, tenant_id: str, fields: Mapping[str, Any], *, pepper: bytes, now: datetime
) -> dict[str, Any]:
    """A new key of `role`, `name`, `labels` and `expires_at`; the answer's `key` is its text.

    What a tenant's admin makes with a key that expires, ends with that key at the latest.

    Raises:
        AccessDenied: the caller may make no keys, or none of that role, or none that lives so long.
        NotFound: there is no such tenant, or it is another's.
        Conflict: the tenant has as many live keys as a tenant may have.
        InvalidValue: a field can't be so.
    """
    tenant = find_tenant(writer, caller, tenant_id, Action.CREATE_KEY)
    role: Role = fields["role"]
    require_grant(caller.role, role)
    expires_at = fields.get("expires_at")
    _check_expiry(expires_at, now)
    expires_at = _within(expires_at, _latest_end(writer, caller))
    wanted = KeyRecord(
        "",
        tenant.id,
        role,
        check_text("name", fields.get("name") or ""),
        check_labels(fields.get("labels") or {}),
        expires_at=expires_at,
    )
    key, made_text = _add(writer, wanted, pepper=pepper, now=now)
    target = Target(TargetKind.KEY, key.public_id, key.tenant_id)
    shown = key_fields(key, now)
    writer.record(AuditRecord(Action.CREATE_KEY, Outcome.DONE, caller, target, None, shown))
    return {**shown, "key": made_text}


def list_keys(reader: Reader, caller: Caller, tenant_id: str, page: Page) -> Listed[KeyRecord]:
    """A tenant's keys, ended ones too. Raises AccessDenied or NotFound."""
    return reader.keys(find_tenant(reader, caller, tenant_id, Action.READ_KEY).id, page)


def find_key(reader: Reader, caller: Caller, key_id: str, action: Action) -> KeyRecord:
    """A key that the caller may do this to.

    Raises:
        AccessDenied: the caller may do it to none.
        NotFound: there is no such key, or it is another tenant's.
    """
    key = reader.key(key_id)
    # Of a key that is not there the caller learns as much as of another's.
    require_reach(caller.role, caller.tenant_id, action, "" if key is None else key.tenant_id)
    if key is None:
        raise NotFound("there is no such tenant or key")
    return key


def rotate_key(
    writer: Writer,
    caller: Caller,
    key_id: str,
    *,
    pepper: bytes,
    now: datetime,
    overlap_s: int = DEFAULT_OVERLAP_S,
    expires_at: datetime | None = None,
) -> dict[str, Any]:
    """A new key in place of one, which goes on working for `overlap_s`; 0 ends it at once.

    The new one has the old one's role, name, labels and quota, and as long a life unless `expires_at` says
    otherwise. Only the platform's admins prolong: for others it ends no later than the old one would have,
    nor later than the key that they ask with.

    Raises:
        Conflict: the key has ended or was rotated already, so there is nothing to take over from; or the
            tenant has as many live keys as a tenant may have.
        AccessDenied, NotFound, InvalidValue: as in `create_key`.
    """
    before = find_key(writer, caller, key_id, Action.ROTATE_KEY)
    require_grant(caller.role, before.role)
    if not 0 <= overlap_s <= MAX_OVERLAP_S:
        raise InvalidValue(f"overlap_s must be from 0 to {MAX_OVERLAP_S}", "overlap_s")
    _check_expiry(expires_at, now)
    state = before.state(now)
    if state != "live":
        raise Conflict(f"this key is {state}; create a new one instead")
    # Its end is no longer the one that it was made with: a second key would take over the rest of an overlap.
    made = writer.replacement(before)
    if made is not None:
        raise Conflict(
            f"this key was rotated already, into {made.public_id}; rotate that one, or create a new one"
        )
    is_prolonged = expires_at is None and caller.role is Role.PLATFORM_ADMIN
    if is_prolonged and before.expires_at is not None and before.created_at is not None:
        expires_at = now + min(before.expires_at - before.created_at, LAST_EXPIRY - now)
    expires_at = _within(expires_at, _latest_end(writer, caller, before))
    if overlap_s:
        end = now + timedelta(seconds=overlap_s)
        ended = replace(before, expires_at=min(end, before.expires_at or end))
    else:
        # Not an expiry: another gateway's clock may be behind.
        ended = replace(before, revoked_at=now)
    writer.save_key(ended)
    wanted = replace(
        before, public_id="", replaces=before.public_id, expires_at=expires_at, last_used_at=None
    )
    key, made_text = _add(writer, wanted, pepper=pepper, now=now)
    # One change, of the old key: that is the one that gateways know, and are told of.
    target = Target(TargetKind.KEY, before.public_id, before.tenant_id)
    after = {**key_fields(ended, now), "replacement": key_fields(key, now)}
    writer.record(
        AuditRecord(Action.ROTATE_KEY, Outcome.DONE, caller, target, key_fields(before, now), after)
    )
    return {**key_fields(key, now), "key": made_text, "replaced": key_fields(ended, now)}


def revoke_key(writer: Writer, caller: Caller, key_id: str, *, now: datetime) -> dict[str, Any]:
    """End a key for good; an earlier revocation stays. Raises AccessDenied or NotFound."""
    before = find_key(writer, caller, key_id, Action.REVOKE_KEY)
    require_grant(caller.role, before.role)
    after = replace(before, revoked_at=before.revoked_at or now)
    writer.save_key(after)
    target = Target(TargetKind.KEY, after.public_id, after.tenant_id)
    shown = key_fields(before, now), key_fields(after, now)
    writer.record(AuditRecord(Action.REVOKE_KEY, Outcome.DONE, caller, target, *shown))
    return key_fields(after, now)


def key_fields(key: KeyRecord, now: datetime) -> dict[str, Any]:
    """A key as it is shown and as it stands in audit records; its quota is shown apart."""
    return {
        "id": key.public_id,
        "object": "api_key",
        "tenant_id": key.tenant_id,
        "name": key.name,
        "role": key.role.value,
        "labels": dict(key.labels),
        "state": key.state(now),
        "created_at": time_text(key.created_at),
        "expires_at": time_text(key.expires_at),
        "revoked_at": time_text(key.revoked_at),
        "last_used_at": time_text(key.last_used_at),
        "replaces": key.replaces,
    }


def _check_expiry(expires_at: datetime | None, now: datetime) -> None:
    if expires_at is not None and expires_at <= now:
        raise InvalidValue("expires_at is over already; give a time to come", "expires_at")


def _latest_end(writer: Writer, caller: Caller, replaced: KeyRecord | None = None) -> datetime | None:
    """Until when a key may live that the caller makes; None is for ever.

    Otherwise a key could prolong itself, by its own rotation or by making another.
    """
    if caller.role is Role.PLATFORM_ADMIN:
        return None
    ends = [key.expires_at for key in (writer.key(caller.key_id), replaced) if key is not None]
    return min((end for end in ends if end is not None), default=None)


def _within(expires_at: datetime | None, latest: datetime | None) -> datetime | None:
    if expires_at is None or latest is None:
        return expires_at or latest
    if expires_at > latest:
        raise AccessDenied(
            f"expires_at is after {time_text(latest)}, when the key ends that asks or is replaced; "
            "only the platform's admins prolong keys"
        )
    return expires_at


def _add(writer: Writer, wanted: KeyRecord, *, pepper: bytes, now: datetime) -> tuple[KeyRecord, str]:
    num_live = writer.count_live_keys(wanted.tenant_id, now)
    if num_live >= MAX_LIVE_KEYS:
        raise Conflict(
            f"this tenant has {num_live} live keys, and the limit is {MAX_LIVE_KEYS}; revoke keys that "
            "nobody uses, or rotate without an overlap"
        )
    made = make_key(pepper)
    return writer.add_key(replace(wanted, public_id=made.public_id, created_at=now), made.hashed), made.text
