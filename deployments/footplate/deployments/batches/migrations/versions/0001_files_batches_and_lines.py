"""Files, batches, and their lines: a work queue. No column holds anything that stands in a file."""

from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

FILES = """
create table batches.files (
    seq bigint generated always as identity primary key,
    id text not null unique,
    tenant_id text not null,
    purpose text not null,
    filename text not null,
    num_bytes bigint not null default 0,
    -- receiving, ready, deleted: the last until its bytes are gone
    state text not null,
    created_at timestamptz not null,
    expires_at timestamptz
);
create index on batches.files (tenant_id, seq);
create index on batches.files (expires_at) where state = 'ready' and expires_at is not null;
create index on batches.files (created_at) where state <> 'ready';
"""
BATCHES = """
create table batches.batches (
    seq bigint generated always as identity primary key,
    id text not null unique,
    tenant_id text not null,
    key_id text not null,
    endpoint text not null,
    input_file_id text not null,
    metadata jsonb not null,
    output_expires_after_s integer,
    status text not null,
    -- what a finalizing one ends as
    ending text,
    stamps jsonb not null default '{}',
    created_at timestamptz not null,
    expires_at timestamptz not null,
    model text,
    faults jsonb not null default '[]',
    -- of one that is over: while it runs its lines are counted
    total integer not null default 0,
    completed integer not null default 0,
    failed integer not null default 0,
    input_tokens bigint not null default 0,
    cached_tokens bigint not null default 0,
    output_tokens bigint not null default 0,
    output_file_id text,
    error_file_id text,
    -- who validates or finalizes it
    worker text,
    leased_until timestamptz,
    not_before timestamptz,
    -- whether answers of its lines may still be in the file store
    is_unswept boolean not null default false
);
create index on batches.batches (tenant_id, seq);
create index on batches.batches (created_at);
create index on batches.batches (input_file_id)
    where status in ('validating', 'in_progress', 'finalizing', 'cancelling');
create index on batches.batches (status, seq)
    where status in ('validating', 'in_progress', 'finalizing', 'cancelling');
create index on batches.batches (seq) where is_unswept;
"""
# Rows change several times each: room beside them keeps that out of the indexes.
LINES = """
create table batches.lines (
    batch_id text not null references batches.batches (id) on delete cascade,
    number integer not null,
    byte_offset bigint not null,
    num_bytes integer not null,
    state text not null default 'waiting',
    attempt integer not null default 0,
    num_failures integer not null default 0,
    lost_attempts integer[] not null default '{}',
    worker text,
    leased_until timestamptz,
    not_before timestamptz,
    result_attempt integer,
    status_code integer,
    primary key (batch_id, number)
) with (fillfactor = 70);
create index on batches.lines (batch_id, state, number);
create index on batches.lines (leased_until) where state = 'running';
"""


def upgrade() -> None:
    """Make the tables."""
    for statement in (FILES + BATCHES + LINES).split(";"):
        if statement.strip():
            op.execute(statement)


def downgrade() -> None:
    """Drop them with their rows; files' bytes stay where they are."""
    for table in ("lines", "batches", "files"):
        op.execute(f"drop table batches.{table}")
