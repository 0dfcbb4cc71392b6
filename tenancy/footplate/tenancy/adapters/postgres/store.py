"""Tenants and keys in PostgreSQL; see `KeyStore`."""

from __future__ import annotations

import secrets
from datetime import datetime

from sqlalchemy import Engine, RowMapping, create_engine, insert, select, update
from sqlalchemy.exc import IntegrityError, InterfaceError, OperationalError, TimeoutError

from footplate.tenancy.adapters.postgres.tables import api_keys, tenants
from footplate.tenancy.api_keys import NewKey, Role, StoredKey
from footplate.tenancy.errors import NameTaken, NotFound, StoreUnavailable
from footplate.tenancy.store import Tenant

CONNECT_S = 3


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


class PostgresKeyStore:
    """Short transactions on a pool; safe from any thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def find_key(self, public_id: str) -> StoredKey | None:
        query = (
            select(
                api_keys.c.public_id,
                api_keys.c.hashed,
                api_keys.c.role,
                api_keys.c.tenant_id,
                api_keys.c.expires_at,
                api_keys.c.revoked_at,
                tenants.c.is_suspended.label("is_tenant_suspended"),
                tenants.c.share_group,
            )
            .join(tenants, tenants.c.id == api_keys.c.tenant_id)
            .where(api_keys.c.public_id == public_id)
        )
        try:
            with self._engine.connect() as connection:
                row = connection.execute(query).mappings().one_or_none()
        except (OperationalError, InterfaceError, TimeoutError) as error:
            raise StoreUnavailable("PostgreSQL gave no answer") from error
        return (
            StoredKey(**{**row, "hashed": bytes(row["hashed"]), "role": Role(row["role"])}) if row else None
        )

    def find_tenant(self, name: str) -> Tenant | None:
        with self._engine.connect() as connection:
            row = connection.execute(select(tenants).where(tenants.c.name == name)).mappings().one_or_none()
        return _tenant(row) if row else None

    def create_tenant(self, name: str, *, cost_center: str = "", share_group: str | None = None) -> Tenant:
        values = {
            "id": f"tnt_{secrets.token_hex(8)}",
            "name": name,
            "cost_center": cost_center,
            "share_group": share_group,
        }
        try:
            with self._engine.begin() as connection:
                row = connection.execute(insert(tenants).values(values).returning(tenants)).mappings().one()
        except IntegrityError as error:
            raise NameTaken(f"a tenant named {name!r} exists; choose another name") from error
        return _tenant(row)

    def add_key(
        self, key: NewKey, tenant_id: str, role: Role, *, name: str = "", expires_at: datetime | None = None
    ) -> None:
        values = {
            "public_id": key.public_id,
            "hashed": key.hashed,
            "role": str(role),
            "tenant_id": tenant_id,
            "name": name,
            "expires_at": expires_at,
        }
        try:
            with self._engine.begin() as connection:
                connection.execute(insert(api_keys).values(values))
        except IntegrityError as error:
            raise NotFound(f"there is no tenant with id {tenant_id!r}") from error

    def revoke_key(self, public_id: str, at: datetime) -> None:
        with self._engine.begin() as connection:
            found = connection.execute(
                select(api_keys.c.revoked_at).where(api_keys.c.public_id == public_id)
            ).first()
            if found is None:
                raise NotFound(f"there is no key with id {public_id!r}")
            if found.revoked_at is None:
                connection.execute(
                    update(api_keys).where(api_keys.c.public_id == public_id).values(revoked_at=at)
                )


def _tenant(row: RowMapping) -> Tenant:
    return Tenant(**{str(name): value for name, value in row.items()})
