"""Wanted models, and what was last seen of each."""

from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

WANTED = """
create table models.wanted (
    name text primary key,
    -- null: the configuration file's
    settings jsonb,
    generation integer not null,
    is_removed boolean not null,
    changed_by text not null,
    added_at timestamptz not null default now(),
    changed_at timestamptz not null default now()
)
"""
SEEN = """
create table models.seen (
    name text primary key,
    state text not null,
    generation integer not null,
    serving integer,
    num_replicas integer not null,
    reason text not null,
    retry_at timestamptz,
    since timestamptz not null default now()
)
"""


def upgrade() -> None:
    """Make the tables."""
    op.execute(WANTED)
    op.execute(SEEN)


def downgrade() -> None:
    """Drop them with their rows."""
    op.execute("drop table models.seen")
    op.execute("drop table models.wanted")
