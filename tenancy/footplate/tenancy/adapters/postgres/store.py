"""Keys in PostgreSQL; see `KeyStore`."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from datetime import datetime
from typing import Any

import psycopg
from sqlalchemy import (
    Connection,
    Engine,
    PoolProxiedConnection,
    RowMapping,
    create_engine,
    insert,
    select,
    text,
)
from sqlalchemy.exc import DBAPIError, IntegrityError, InterfaceError, OperationalError, TimeoutError

from footplate.tenancy.adapters.postgres.tables import SCHEMA, api_keys, tenants
from footplate.tenancy.api_keys import NewKey, Role, StoredKey
from footplate.tenancy.errors import NameTaken, NotFound, StoreUnavailable
from footplate.tenancy.quotas import Quota
from footplate.tenancy.tenants import Tenant

CONNECT_S = 3
# In UTC no moment that a key may end at falls into the year 10000, which dates of Python can't hold.
_CONNECT_ARGUMENTS = {
    "connect_timeout": CONNECT_S,
    "options": "-c statement_timeout=5000 -c timezone=UTC",
}
# The driver's own errors too: look-ups of keys go past SQLAlchemy.
_UNAVAILABLE = (
    OperationalError,
    InterfaceError,
    TimeoutError,
    psycopg.OperationalError,
    psycopg.InterfaceError,
)
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
        connect_args=_CONNECT_ARGUMENTS,
    )


@contextmanager
def reading(engine: Engine) -> Iterator[Connection]:
    """A connection to read on. Raises StoreUnavailable when the server gives no answer."""
    try:
        with engine.connect() as connection:
            yield connection
    except _UNAVAILABLE as error:
        raise StoreUnavailable("PostgreSQL gave no answer") from error


@contextmanager
def writing(engine: Engine) -> Iterator[Connection]:
    """A transaction, alone among all that write; commits when the block ends. Raises StoreUnavailable."""
    try:
        with engine.begin() as connection:
            keep_others_out(connection)
            yield connection
    except _UNAVAILABLE as error:
        raise StoreUnavailable("PostgreSQL gave no answer") from error


def keep_others_out(connection: Connection) -> None:
    """Wait until nobody else writes; nobody does before this transaction ends."""
    connection.execute(text("select pg_advisory_xact_lock(:id)"), {"id": _WRITE_LOCK_ID})


class PostgresKeyStore:
    """Short transactions on a pool; safe from any thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def find_key(self, public_id: str) -> StoredKey | None:
        with reading(self._engine) as connection:
            return _find_key(connection.connection, public_id)

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


class PostgresKeyReader:
    """Look-ups of keys on a pool of its own, for requests that wait; safe from any thread.

    They go to the driver, one round trip each: SQLAlchemy's statements, its ping and its transaction would
    cost several times the look-up. So a connection that died while nobody used it is found by the look-up
    itself, which then asks once more over a new one.
    """

    def __init__(self, database_url: str, *, pool_size: int = 4) -> None:
        self._engine = create_engine(
            database_url,
            pool_size=pool_size,
            max_overflow=2,
            pool_timeout=CONNECT_S,
            isolation_level="AUTOCOMMIT",
            connect_args=_CONNECT_ARGUMENTS,
        )

    def find_key(self, public_id: str) -> StoredKey | None:
        try:
            try:
                return self._find_key(public_id)
            except _LostConnection:
                # Those beside it were made before the server went away, too.
                self._engine.dispose()
                return self._find_key(public_id)
        except (*_UNAVAILABLE, _LostConnection) as error:
            raise StoreUnavailable("PostgreSQL gave no answer") from error

    def close(self) -> None:
        """Drop all connections."""
        self._engine.dispose()

    def _find_key(self, public_id: str) -> StoredKey | None:
        with closing(self._engine.raw_connection()) as connection:
            try:
                return _find_key(connection, public_id)
            except psycopg.Error as error:
                driver = connection.driver_connection
                if driver is not None and driver.closed:
                    connection.invalidate(error)
                    raise _LostConnection from error
                raise


class _LostConnection(Exception):
    """The connection was there and is no more; the server may answer over another."""


_FIND_KEY = (
    "select k.hashed, k.role, k.tenant_id, t.is_suspended, t.share_group, k.expires_at, k.revoked_at, "
    f"t.quota, k.quota, t.cost_center, t.labels, k.labels, "
    f"t.captures_content from {SCHEMA}.api_keys k "
    f"join {SCHEMA}.tenants t on t.id = k.tenant_id where k.public_id = %s"
)


def _find_key(connection: PoolProxiedConnection, public_id: str) -> StoredKey | None:
    driver = connection.driver_connection
    assert driver is not None
    row = driver.execute(_FIND_KEY, (public_id,)).fetchone()
    if row is None:
        return None
    hashed, role, *plain, tenant_quota, key_quota, cost_center, tenant_labels, key_labels, captures = row
    quotas = (as_quota(tenant_quota), as_quota(key_quota))
    named = (*quotas, cost_center, tenant_labels, key_labels, captures)
    found = (public_id, bytes(hashed), Role(role), *plain, *named)
    return StoredKey(*found)


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
        row["timezone"],
        row["captures_content"],
    )
