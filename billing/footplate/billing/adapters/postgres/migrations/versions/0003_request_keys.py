"""Idempotency keys of requests: which request came first under a key."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

SCHEMA = "billing"


def upgrade() -> None:
    """Make the table."""
    op.create_table(
        "request_keys",
        sa.Column("tenant_id", sa.Text, nullable=False),
        sa.Column("key_digest", sa.LargeBinary, nullable=False),
        sa.Column("event_id", sa.Text, nullable=False),
        sa.Column("claimed_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", "key_digest"),
        schema=SCHEMA,
    )
    op.create_index("request_keys_by_age", "request_keys", ["claimed_at"], schema=SCHEMA)


def downgrade() -> None:
    """Drop it with its rows."""
    op.drop_table("request_keys", schema=SCHEMA)
