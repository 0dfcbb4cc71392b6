"""Exports: files that somebody has asked for."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

SCHEMA = "billing"


def upgrade() -> None:
    """Make the table."""
    op.create_table(
        "exports",
        sa.Column("seq", sa.BigInteger, sa.Identity(always=True), primary_key=True),
        sa.Column("id", sa.Text, nullable=False, unique=True),
        sa.Column("request", JSONB, nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("created_by", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("rows_done", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("rows_total", sa.BigInteger),
        sa.Column("sidecar", JSONB),
        sa.Column("error", sa.Text),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        schema=SCHEMA,
    )


def downgrade() -> None:
    """Drop it with its rows."""
    op.drop_table("exports", schema=SCHEMA)
