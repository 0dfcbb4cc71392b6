"""Whether a tenant's prompts and answers may be kept. Only adds, as the one before."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

SCHEMA = "tenancy"


def upgrade() -> None:
    """Add the column; nobody has opted in."""
    column = sa.Column("captures_content", sa.Boolean, nullable=False, server_default="false")
    op.add_column("tenants", column, schema=SCHEMA)


def downgrade() -> None:
    """Drop it with what stands in it."""
    op.drop_column("tenants", "captures_content", schema=SCHEMA)
