"""Kept prompts and answers, in a schema of their own."""

from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

RECORDS = """
create table capture.records (
    id bigint generated always as identity primary key,
    request_id text not null,
    tenant_id text not null,
    key_id text not null,
    model text not null,
    endpoint text not null,
    why text not null,
    error text,
    first_token_s double precision,
    prompts jsonb not null,
    answers jsonb not null,
    redacted jsonb not null,
    is_cut boolean not null,
    captured_at timestamptz not null,
    expires_at timestamptz not null
)
"""


def upgrade() -> None:
    """Make the table."""
    op.execute(RECORDS)
    op.execute("create index records_of_tenant on capture.records (tenant_id, id)")
    op.execute("create index records_by_end on capture.records (expires_at)")


def downgrade() -> None:
    """Drop it with its rows."""
    op.execute("drop table capture.records")
