"""Tenants, keys and audit records in PostgreSQL, read and changed; see `admin.store`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, TypeVar

from sqlalchemy import (
    Connection,
    Engine,
    RowMapping,
    Select,
    Table,
    delete,
    func,
    insert,
    select,
    text,
    update,
)

from footplate.tenancy.access import Action
from footplate.tenancy.adapters.postgres.store import (
    as_quota,
    as_tenant,
    keep_others_out,
    new_tenant_id,
    reading,
    writing,
)
from footplate.tenancy.adapters.postgres.tables import api_keys, audit_records, idempotent_answers, tenants
from footplate.tenancy.admin.audit import AuditRecord, Caller, Outcome, Target, TargetKind
from footplate.tenancy.admin.store import Listed, Page, Reader, RememberedAnswer, Writer
from footplate.tenancy.api_keys import KeyRecord, Role
from footplate.tenancy.changes import FOLLOWED, Change, Changes
from footplate.tenancy.errors import InvalidValue, NameTaken
from footplate.tenancy.quotas import Quota
from footplate.tenancy.tenants import Tenant, mask_keys, refuse_keys

MAX_CHANGES = 1000
REMEMBERED = text("interval '24 hours'")
_Item = TypeVar("_Item")


class PostgresAdminStore:
    """Transactions on a pool; safe from any thread. Also the `ChangeLog` of what was changed here."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @contextmanager
    def reading(self) -> Iterator[Reader]:
        """As `AdminStore.reading`."""
        with reading(self._engine) as connection:
            yield _Reader(connection)

    @contextmanager
    def writing(self, within: object | None = None) -> Iterator[Writer]:
        """As `AdminStore.writing`; `within` is a SQLAlchemy connection."""
        if within is None:
            with writing(self._engine) as connection:
                yield _Writer(connection)
            return
        assert isinstance(within, Connection)
        keep_others_out(within)
        yield _Writer(within)

    def changes_after(self, last: int | None) -> Changes:
        """As `ChangeLog.changes_after`."""
        seq = audit_records.c.seq
        with reading(self._engine) as connection:
            end = connection.execute(select(func.max(seq))).scalar() or 0
            if last is None or end <= last:
                return Changes(end, ())
            query = (
                select(audit_records.c.target_kind, audit_records.c.target_id)
                .where(seq > last, seq <= end, audit_records.c.outcome == Outcome.DONE.value)
                # Other things, also those of newer versions, are held by nobody.
                .where(audit_records.c.target_kind.in_([kind.value for kind in FOLLOWED]))
                .limit(MAX_CHANGES + 1)
            )
            rows = connection.execute(query).all()
        if len(rows) > MAX_CHANGES:
            return Changes(end, None)
        return Changes(end, [Change(TargetKind(kind), name) for kind, name in rows])


class _Reader:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def tenant(self, tenant_id: str) -> Tenant | None:
        row = self._row(select(tenants).where(tenants.c.id == tenant_id))
        return None if row is None else as_tenant(row)

    def tenants(self, page: Page, *, only_id: str | None = None, name: str | None = None) -> Listed[Tenant]:
        query = select(tenants)
        if only_id is not None:
            query = query.where(tenants.c.id == only_id)
        if name is not None:
            query = query.where(tenants.c.name == name)
        return self._page(query, tenants, "id", page, as_tenant)

    def key(self, public_id: str) -> KeyRecord | None:
        row = self._row(select(api_keys).where(api_keys.c.public_id == public_id))
        return None if row is None else _as_key(row)

    def replacement(self, key: KeyRecord) -> KeyRecord | None:
        columns = api_keys.c  # the tenant has an index
        is_it = (columns.tenant_id == key.tenant_id) & (columns.replaces == key.public_id)
        row = self._row(select(api_keys).where(is_it).limit(1))
        return None if row is None else _as_key(row)

    def count_live_keys(self, tenant_id: str, now: datetime) -> int:
        columns = api_keys.c
        has_time = columns.expires_at.is_(None) | (columns.expires_at > now)
        is_live = (columns.tenant_id == tenant_id) & columns.revoked_at.is_(None) & has_time
        return int(self._connection.execute(select(func.count()).where(is_live)).scalar_one())

    def keys(self, tenant_id: str, page: Page) -> Listed[KeyRecord]:
        query = select(api_keys).where(api_keys.c.tenant_id == tenant_id)
        return self._page(query, api_keys, "public_id", page, _as_key)

    def records(
        self, page: Page, *, tenant_id: str | None = None, target_id: str | None = None
    ) -> Listed[AuditRecord]:
        query = select(audit_records)
        if tenant_id is not None:
            query = query.where(audit_records.c.tenant_id == tenant_id)
        if target_id is not None:
            query = query.where(audit_records.c.target_id == target_id)
        return self._page(query, audit_records, "seq", page, _as_record)

    def _row(self, query: Select[Any]) -> RowMapping | None:
        return self._connection.execute(query).mappings().one_or_none()

    def _page(
        self,
        query: Select[Any],
        table: Table,
        id_column: str,
        page: Page,
        read: Callable[[RowMapping], _Item],
    ) -> Listed[_Item]:
        seq = table.c.seq
        if page.after is not None:
            begin = self._seq_of(query, table, id_column, page.after)
            query = query.where(seq < begin if page.is_newest_first else seq > begin)
        query = query.order_by(seq.desc() if page.is_newest_first else seq).limit(page.limit + 1)
        rows = self._connection.execute(query).mappings().all()
        return Listed([read(row) for row in rows[: page.limit]], len(rows) > page.limit)

    def _seq_of(self, query: Select[Any], table: Table, id_column: str, after: str) -> int:
        """Where a row stands in the list of `query`; other lists' rows are as unknown as none."""
        if id_column == "seq":
            # Any number will do: records of a filtered list have gaps between them.
            if after.isascii() and after.isdigit() and len(after) < 19:
                return int(after)
            found = None
        else:
            # No row is ever deleted, so a cursor stays good.
            found = self._connection.execute(
                query.with_only_columns(table.c.seq).where(table.c[id_column] == after)
            ).scalar()
        if found is None:
            raise InvalidValue("after names no row of this list; give the `next` of an answer", "after")
        return int(found)


class _Writer(_Reader):
    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._recorded: list[AuditRecord] = []

    @property
    def recorded(self) -> Sequence[AuditRecord]:
        return self._recorded

    def add_tenant(self, tenant: Tenant) -> Tenant:
        self._refuse_taken(tenant)
        values = _checked({"id": new_tenant_id(), **_tenant_values(tenant)})
        query = insert(tenants).values(values).returning(tenants)
        return as_tenant(self._connection.execute(query).mappings().one())

    def save_tenant(self, tenant: Tenant) -> None:
        self._refuse_taken(tenant)
        self._connection.execute(
            update(tenants).where(tenants.c.id == tenant.id).values(_checked(_tenant_values(tenant)))
        )

    def add_key(self, key: KeyRecord, hashed: bytes) -> KeyRecord:
        values = {
            "public_id": key.public_id,
            "hashed": hashed,
            "name": key.name,
            "role": key.role.value,
            "tenant_id": key.tenant_id,
            "labels": dict(key.labels),
            "quota": _quota_value(key.quota),
            "replaces": key.replaces,
            "created_at": key.created_at,
            "expires_at": key.expires_at,
        }
        query = insert(api_keys).values(_checked(values)).returning(api_keys)
        return _as_key(self._connection.execute(query).mappings().one())

    def save_key(self, key: KeyRecord) -> None:
        values = {
            "quota": _quota_value(key.quota),
            "expires_at": key.expires_at,
            "revoked_at": key.revoked_at,
        }
        query = update(api_keys).where(api_keys.c.public_id == key.public_id)
        self._connection.execute(query.values(_checked(values)))

    def record(self, record: AuditRecord) -> None:
        target = record.target
        values = {
            "action": record.action.value,
            "outcome": record.outcome.value,
            "code": record.code,
            "actor_key_id": record.caller.key_id,
            "actor_tenant_id": record.caller.tenant_id,
            "actor_role": record.caller.role.value,
            "source": record.caller.source,
            "request_id": record.caller.request_id,
            "target_kind": None if target is None else target.kind.value,
            "target_id": None if target is None else target.id,
            "tenant_id": None if target is None else target.tenant_id,
            # What an older version let in must not stand against the change that removes it.
            "before": None if record.before is None else mask_keys(record.before),
            "after": None if record.after is None else dict(record.after),
        }
        self._connection.execute(insert(audit_records).values(_checked(values)))
        self._recorded.append(record)

    def recall(self, caller_key_id: str, idempotency_key: str) -> RememberedAnswer | None:
        table = idempotent_answers
        row = self._row(
            select(table.c.request_hash, table.c.answer)
            .where(table.c.caller_key_id == caller_key_id, table.c.idempotency_key == idempotency_key)
            .where(table.c.created_at > func.now() - REMEMBERED)
        )
        return None if row is None else RememberedAnswer(bytes(row["request_hash"]), row["answer"])

    def remember(self, caller_key_id: str, idempotency_key: str, answer: RememberedAnswer) -> None:
        table = idempotent_answers
        self._connection.execute(delete(table).where(table.c.created_at <= func.now() - REMEMBERED))
        values = {
            "caller_key_id": caller_key_id,
            "idempotency_key": idempotency_key,
            "request_hash": answer.request_hash,
            "answer": dict(answer.answer),
        }
        self._connection.execute(insert(table).values(_checked(values)))

    def _refuse_taken(self, tenant: Tenant) -> None:
        # Nobody else writes now, so what is free here stays free.
        query = select(tenants.c.id).where(tenants.c.name == tenant.name, tenants.c.id != tenant.id)
        if self._connection.execute(query).first() is not None:
            raise NameTaken(f"a tenant named {tenant.name!r} exists; choose another name")


def _checked(values: dict[str, Any]) -> dict[str, Any]:
    """The one guard before all that is stored. Raises InvalidValue."""
    refuse_keys(values)
    return values


def _tenant_values(tenant: Tenant) -> dict[str, Any]:
    return {
        "name": tenant.name,
        "cost_center": tenant.cost_center,
        "share_group": tenant.share_group,
        "timezone": tenant.timezone,
        "labels": dict(tenant.labels),
        "quota": _quota_value(tenant.quota),
        "captures_content": tenant.captures_content,
        "is_suspended": tenant.is_suspended,
    }


def _quota_value(quota: Quota | None) -> dict[str, Any] | None:
    return None if quota is None else quota.fields()


def _as_key(row: RowMapping) -> KeyRecord:
    names = ("replaces", "created_at", "expires_at", "revoked_at", "last_used_at")
    return KeyRecord(
        row["public_id"],
        row["tenant_id"],
        Role(row["role"]),
        row["name"],
        row["labels"],
        as_quota(row["quota"]),
        *(row[name] for name in names),
    )


def _as_record(row: RowMapping) -> AuditRecord:
    kind = row["target_kind"]
    return AuditRecord(
        Action(row["action"]),
        Outcome(row["outcome"]),
        Caller(
            row["actor_key_id"],
            row["actor_tenant_id"],
            Role(row["actor_role"]),
            row["source"],
            row["request_id"],
        ),
        None if kind is None else Target(TargetKind(kind), row["target_id"], row["tenant_id"]),
        row["before"],
        row["after"],
        row["code"],
        row["seq"],
        row["at"],
    )
