"""The time zone that a tenant's reports are in. Only adds, as the one before."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

SCHEMA = "tenancy"


def upgrade() -> None:
    """Add the column; null is the billing time zone."""
    op.add_column("tenants", sa.Column("timezone", sa.Text), schema=SCHEMA)


def downgrade() -> None:
    """Drop it with what stands in it."""
    op.drop_column("tenants", "timezone", schema=SCHEMA)
