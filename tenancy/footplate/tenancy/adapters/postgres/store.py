"""Keys in PostgreSQL; see `KeyStore`."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Engine, RowMapping, create_engine, insert, select, text
from sqlalchemy.exc import DBAPIError, IntegrityError, InterfaceError, OperationalError, TimeoutError

from footplate.tenancy.adapters.postgres.tables import SCHEMA, api_keys, tenants
from footplate.tenancy.api_keys import NewKey, Role, StoredKey
from footplate.tenancy.errors import NameTaken, NotFound, StoreUnavailable
from footplate.tenancy.quotas import Quota
from footplate.tenancy.tenants import Tenant

CONNECT_S = 3
# Any number, as long as each component has its own: see `tables`.
_WRITE_LOCK_ID = 0x66705F77


def connect(database_url: str, *, pool_size: int = 4) -> Engine:
    """A pool for one process: `postgresql+psycopg://…`. Waits for a server are bounded."""
    return create_engine(
        database_url,
        pool_size=pool_size,
        max_overflow=2,
        pool_pre_ping=True,
        pool_timeout=CONNECT_S,
        connect_args={"connect_timeout": CONNECT_S, "options": "-c statement_timeout=5000"},
    )


@contextmanager
def reading(engine: Engine) -> Iterator[Connection]:
    """A connection to read on. Raises StoreUnavailable when the server gives no answer."""
    try:
        with engine.connect() as connection:
            yield connection
    except (OperationalError, InterfaceError, TimeoutError) as error:
        raise StoreUnavailable("PostgreSQL gave no answer") from error


@contextmanager
def writing(engine: Engine) -> Iterator[Connection]:
    """A transaction, alone among all that write; commits when the block ends. Raises StoreUnavailable."""
    try:
        with engine.begin() as connection:
            connection.execute(text("select pg_advisory_xact_lock(:id)"), {"id": _WRITE_LOCK_ID})
            yield connection
    except (OperationalError, InterfaceError, TimeoutError) as error:
        raise StoreUnavailable("PostgreSQL gave no answer") from error


class PostgresKeyStore:
    """Short transactions on a pool; safe from any thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def find_key(self, public_id: str) -> StoredKey | None:
        with reading(self._engine) as connection:
            row = connection.execute(_FIND_KEY, {"public_id": public_id}).one_or_none()
        if row is None:
            return None
        return StoredKey(
            row.public_id,
            bytes(row.hashed),
            Role(row.role),
            row.tenant_id,
            row.is_suspended,
            row.share_group,
            row.expires_at,
            row.revoked_at,
            as_quota(row.tenant_quota),
            as_quota(row.key_quota),
        )

    def note_uses(self, uses: Mapping[str, datetime]) -> None:
        # In one order everywhere, so that two gateways never wait for each other's rows.
        rows = [{"public_id": public_id, "at": uses[public_id]} for public_id in sorted(uses)]
        for begin in range(0, len(rows), _MAX_USES):
            try:
                with self._engine.begin() as connection:
                    connection.execute(_NOTE_USE, rows[begin : begin + _MAX_USES])
            except (DBAPIError, TimeoutError) as error:
                raise StoreUnavailable("PostgreSQL gave no answer") from error

    def find_tenant(self, name: str) -> Tenant | None:
        with reading(self._engine) as connection:
            row = connection.execute(select(tenants).where(tenants.c.name == name)).mappings().one_or_none()
        return as_tenant(row) if row else None

    def create_tenant(self, name: str) -> Tenant:
        try:
            with writing(self._engine) as connection:
                values = {"id": new_tenant_id(), "name": name}
                row = connection.execute(insert(tenants).values(values).returning(tenants)).mappings().one()
        except IntegrityError as error:
            raise NameTaken(f"a tenant named {name!r} exists; choose another name") from error
        return as_tenant(row)

    def add_key(self, key: NewKey, tenant_id: str, role: Role, *, name: str = "") -> None:
        values = {
            "public_id": key.public_id,
            "hashed": key.hashed,
            "role": role.value,
            "tenant_id": tenant_id,
            "name": name,
        }
        try:
            with writing(self._engine) as connection:
                connection.execute(insert(api_keys).values(values))
        except IntegrityError as error:
            raise NotFound(f"there is no tenant with id {tenant_id!r}") from error


# On the way of a request, so as text: built anew each time, a statement costs more than its answer.
_FIND_KEY = text(
    "select k.public_id, k.hashed, k.role, k.tenant_id, t.is_suspended, t.share_group, k.expires_at, "
    "k.revoked_at, t.quota as tenant_quota, k.quota as key_quota "
    f"from {SCHEMA}.api_keys k join {SCHEMA}.tenants t on t.id = k.tenant_id where k.public_id = :public_id"
)
_NOTE_USE = text(
    f"update {SCHEMA}.api_keys set last_used_at = :at "
    "where public_id = :public_id and (last_used_at is null or last_used_at < :at)"
)
_MAX_USES = 500


def new_tenant_id() -> str:
    """A random id."""
    return f"tnt_{secrets.token_hex(8)}"


def as_quota(fields: Mapping[str, Any] | None) -> Quota | None:
    """A column's quota."""
    return None if fields is None else Quota.parse(fields)


def as_tenant(row: RowMapping) -> Tenant:
    """A row of `tenants`."""
    return Tenant(
        row["id"],
        row["name"],
        row["cost_center"],
        row["share_group"],
        row["is_suspended"],
        row["created_at"],
        row["labels"],
        as_quota(row["quota"]),
    )
