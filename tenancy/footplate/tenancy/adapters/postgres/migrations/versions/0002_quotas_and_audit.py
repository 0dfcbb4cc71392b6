"""Quotas, labels, rotation and last use of keys; audit records; answers to repeated requests.

Only adds, so that gateways of the version before keep working beside it.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

SCHEMA = "tenancy"


def upgrade() -> None:
    """Add columns to both tables and make two more."""
    for table in ("tenants", "api_keys"):
        # Rows that are there get their numbers in the order that PostgreSQL keeps them in.
        seq = sa.Column("seq", sa.BigInteger, sa.Identity(always=True), nullable=False)
        op.add_column(table, seq, schema=SCHEMA)
        labels = sa.Column("labels", JSONB, nullable=False, server_default="{}")
        op.add_column(table, labels, schema=SCHEMA)
        op.add_column(table, sa.Column("quota", JSONB), schema=SCHEMA)
    op.create_unique_constraint("tenants_seq_key", "tenants", ["seq"], schema=SCHEMA)
    op.add_column("api_keys", sa.Column("replaces", sa.Text), schema=SCHEMA)
    op.add_column("api_keys", sa.Column("last_used_at", sa.DateTime(timezone=True)), schema=SCHEMA)
    op.create_index("api_keys_of_tenant", "api_keys", ["tenant_id", "seq"], schema=SCHEMA)
    op.drop_index("api_keys_by_tenant", "api_keys", schema=SCHEMA)
    _create_audit_records()
    _create_idempotent_answers()


def _create_audit_records() -> None:
    op.create_table(
        "audit_records",
        sa.Column("seq", sa.BigInteger, sa.Identity(always=True), primary_key=True),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False, server_default=sa.func.clock_timestamp()),
        sa.Column("action", sa.Text, nullable=False),
        sa.Column("outcome", sa.Text, nullable=False),
        sa.Column("code", sa.Text),
        sa.Column("actor_key_id", sa.Text, nullable=False),
        sa.Column("actor_tenant_id", sa.Text, nullable=False),
        sa.Column("actor_role", sa.Text, nullable=False),
        sa.Column("source", sa.Text, nullable=False),
        sa.Column("request_id", sa.Text, nullable=False),
        sa.Column("target_kind", sa.Text),
        sa.Column("target_id", sa.Text),
        sa.Column("tenant_id", sa.Text),
        sa.Column("before", JSONB),
        sa.Column("after", JSONB),
        schema=SCHEMA,
    )
    for column in ("tenant", "target"):
        op.create_index(f"audit_records_of_{column}", "audit_records", [f"{column}_id", "seq"], schema=SCHEMA)


def _create_idempotent_answers() -> None:
    op.create_table(
        "idempotent_answers",
        sa.Column("caller_key_id", sa.Text, nullable=False),
        sa.Column("idempotency_key", sa.Text, nullable=False),
        sa.Column("request_hash", sa.LargeBinary, nullable=False),
        sa.Column("answer", JSONB, nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.func.now()),
        sa.PrimaryKeyConstraint("caller_key_id", "idempotency_key"),
        schema=SCHEMA,
    )
    op.create_index("idempotent_answers_by_age", "idempotent_answers", ["created_at"], schema=SCHEMA)


def downgrade() -> None:
    """Drop what `upgrade` made, with its rows."""
    op.drop_table("idempotent_answers", schema=SCHEMA)
    op.drop_table("audit_records", schema=SCHEMA)
    op.create_index("api_keys_by_tenant", "api_keys", ["tenant_id"], schema=SCHEMA)
    op.drop_index("api_keys_of_tenant", "api_keys", schema=SCHEMA)
    for column in ("replaces", "last_used_at"):
        op.drop_column("api_keys", column, schema=SCHEMA)
    for table in ("tenants", "api_keys"):
        for column in ("seq", "labels", "quota"):
            op.drop_column(table, column, schema=SCHEMA)
