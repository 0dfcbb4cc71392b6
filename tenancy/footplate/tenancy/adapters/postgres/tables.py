"""The tables of tenancy, in a schema of their own."""

from __future__ import annotations

from sqlalchemy import Boolean, Column, DateTime, ForeignKey, Index, LargeBinary, MetaData, Table, Text, func

SCHEMA = "tenancy"
metadata = MetaData(schema=SCHEMA)

tenants = Table(
    "tenants",
    metadata,
    Column("id", Text, primary_key=True),
    Column("name", Text, nullable=False, unique=True),
    Column("cost_center", Text, nullable=False, server_default=""),
    Column("share_group", Text),
    Column("is_suspended", Boolean, nullable=False, server_default="false"),
    Column("created_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
)

api_keys = Table(
    "api_keys",
    metadata,
    Column("public_id", Text, primary_key=True),
    Column("hashed", LargeBinary, nullable=False),  # HMAC-SHA256 under the pepper; never the secret
    Column("name", Text, nullable=False, server_default=""),
    Column("role", Text, nullable=False),
    Column("tenant_id", Text, ForeignKey(f"{SCHEMA}.tenants.id"), nullable=False),
    Column("created_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
    Column("expires_at", DateTime(timezone=True)),
    Column("revoked_at", DateTime(timezone=True)),
    Index("api_keys_by_tenant", "tenant_id"),
)
