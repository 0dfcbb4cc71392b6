"""The tables of tenancy, in a schema of their own.

`seq` numbers rows in the order of their commits: all who insert hold one lock from before a number is drawn
until they commit. So a reader that has seen a number has seen all below it, and a list's cursor loses no row.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    DateTime,
    ForeignKey,
    Identity,
    Index,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    Text,
    func,
)
from sqlalchemy.dialects.postgresql import JSONB

SCHEMA = "tenancy"
metadata = MetaData(schema=SCHEMA)

tenants = Table(
    "tenants",
    metadata,
    Column("id", Text, primary_key=True),
    Column("seq", BigInteger, Identity(always=True), nullable=False, unique=True),
    Column("name", Text, nullable=False, unique=True),
    Column("cost_center", Text, nullable=False, server_default=""),
    Column("share_group", Text),
    Column("timezone", Text),  # of reports; null: that of the books
    Column("labels", JSONB, nullable=False, server_default="{}"),
    Column("quota", JSONB(none_as_null=True)),  # null: the default holds
    Column("captures_content", Boolean, nullable=False, server_default="false"),
    Column("is_suspended", Boolean, nullable=False, server_default="false"),
    Column("created_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
)

api_keys = Table(
    "api_keys",
    metadata,
    Column("public_id", Text, primary_key=True),
    Column("seq", BigInteger, Identity(always=True), nullable=False),
    Column("hashed", LargeBinary, nullable=False),  # HMAC-SHA256 under the pepper; never the secret
    Column("name", Text, nullable=False, server_default=""),
    Column("role", Text, nullable=False),
    Column("tenant_id", Text, ForeignKey(f"{SCHEMA}.tenants.id"), nullable=False),
    Column("labels", JSONB, nullable=False, server_default="{}"),
    Column("quota", JSONB(none_as_null=True)),  # null: no limits of its own
    Column("replaces", Text),  # the key that it was rotated from
    Column("created_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
    Column("expires_at", DateTime(timezone=True)),
    Column("revoked_at", DateTime(timezone=True)),
    # Written in batches, up to a minute late.
    Column("last_used_at", DateTime(timezone=True)),
    Index("api_keys_of_tenant", "tenant_id", "seq"),
)

audit_records = Table(
    "audit_records",
    metadata,
    Column("seq", BigInteger, Identity(always=True), primary_key=True),
    Column("at", DateTime(timezone=True), nullable=False, server_default=func.clock_timestamp()),
    Column("action", Text, nullable=False),
    Column("outcome", Text, nullable=False),  # done, refused
    Column("code", Text),  # why refused
    Column("actor_key_id", Text, nullable=False),
    Column("actor_tenant_id", Text, nullable=False),
    Column("actor_role", Text, nullable=False),
    Column("source", Text, nullable=False),
    Column("request_id", Text, nullable=False),
    Column("target_kind", Text),
    Column("target_id", Text),
    Column("tenant_id", Text),
    Column("before", JSONB(none_as_null=True)),
    Column("after", JSONB(none_as_null=True)),
    Index("audit_records_of_tenant", "tenant_id", "seq"),
    Index("audit_records_of_target", "target_id", "seq"),
)

# Answers to requests that came with an Idempotency-Key, without secrets, for a day.
idempotent_answers = Table(
    "idempotent_answers",
    metadata,
    Column("caller_key_id", Text, nullable=False),
    Column("idempotency_key", Text, nullable=False),
    Column("request_hash", LargeBinary, nullable=False),
    Column("answer", JSONB, nullable=False),
    Column("created_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
    PrimaryKeyConstraint("caller_key_id", "idempotency_key"),
    Index("idempotent_answers_by_age", "created_at"),
)
