"""Tenants and their API keys."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

SCHEMA = "tenancy"


def upgrade() -> None:
    """Make both tables."""
    op.create_table(
        "tenants",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("name", sa.Text, nullable=False, unique=True),
        sa.Column("cost_center", sa.Text, nullable=False, server_default=""),
        sa.Column("share_group", sa.Text),
        sa.Column("is_suspended", sa.Boolean, nullable=False, server_default="false"),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.func.now()),
        schema=SCHEMA,
    )
    op.create_table(
        "api_keys",
        sa.Column("public_id", sa.Text, primary_key=True),
        sa.Column("hashed", sa.LargeBinary, nullable=False),
        sa.Column("name", sa.Text, nullable=False, server_default=""),
        sa.Column("role", sa.Text, nullable=False),
        sa.Column("tenant_id", sa.Text, sa.ForeignKey(f"{SCHEMA}.tenants.id"), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.func.now()),
        sa.Column("expires_at", sa.DateTime(timezone=True)),
        sa.Column("revoked_at", sa.DateTime(timezone=True)),
        schema=SCHEMA,
    )
    op.create_index("api_keys_by_tenant", "api_keys", ["tenant_id"], schema=SCHEMA)


def downgrade() -> None:
    """Drop both tables with their rows."""
    op.drop_table("api_keys", schema=SCHEMA)
    op.drop_table("tenants", schema=SCHEMA)
