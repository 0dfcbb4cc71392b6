"""Events, prices, postings, rollups, periods; triggers that refuse changes of what was written down."""

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

SCHEMA = "billing"
IMMUTABLE = (
    "price_versions",
    "model_prices",
    "dimensions",
    "events",
    "recounts",
    "postings",
    "entries",
    "conflicting_events",
    "closed_periods",
)
WORK = ("quarantine", "journals", "month_spend", "rollups_day", "rollups_quarter_hour", "books")
TOKENS = ("input_uncached", "input_cached", "output", "reasoning", "discarded")
AMOUNTS = tuple(
    f"{kind}_{token_class}"
    for kind in ("gross", "discount")
    for token_class in ("input", "cached_input", "output")
)
REFUSE = f"""
create function {SCHEMA}.refuse_change() returns trigger language plpgsql as $$
begin
    raise exception '%.% is never changed: write an adjustment', tg_table_schema, tg_table_name
        using errcode = 'restrict_violation';
end $$
"""
# One row for each posting, and for each count that has no price yet.
FACTS = f"""
create view {SCHEMA}.usage_facts as
select p.event_seq, p.seq, p.kind, p.kind <> 'usage' as is_adjustment, p.dimension_id, p.price_version,
       p.currency, p.effective_at, p.requests, {", ".join(f"p.{name}" for name in TOKENS + AMOUNTS)}
from {SCHEMA}.postings p
union all
select e.event_seq, 0, case when e.is_late then 'late' else 'usage' end, e.is_late, e.dimension_id, 0,
       null, e.effective_at, 1, {", ".join(f"e.{name}" for name in TOKENS)}, {", ".join(["0"] * len(AMOUNTS))}
from (select seq as event_seq, effective_at <> started_at as is_late, * from {SCHEMA}.events) e
join {SCHEMA}.quarantine q using (event_seq)
"""


def upgrade() -> None:
    """Make everything."""
    _create_prices()
    _create_events()
    _create_ledger()
    _create_rollups()
    _create_work_lists()
    op.execute(REFUSE)
    for table in IMMUTABLE:
        op.execute(
            f"create trigger refuse_change before update or delete or truncate on {SCHEMA}.{table} "
            f"for each statement execute function {SCHEMA}.refuse_change()"
        )


def _moment(name: str, **options: Any) -> sa.Column[Any]:
    return sa.Column(name, sa.DateTime(timezone=True), **options)


def _written_at() -> sa.Column[Any]:
    return _moment("written_at", nullable=False, server_default=sa.func.clock_timestamp())


def _text(name: str, **options: Any) -> sa.Column[Any]:
    return sa.Column(name, sa.Text, **{"nullable": False, **options})


def _long(name: str, **options: Any) -> sa.Column[Any]:
    return sa.Column(name, sa.BigInteger, **{"nullable": False, **options})


def _tokens() -> list[sa.Column[Any]]:
    return [_long(name) for name in TOKENS]


def _amounts(*names: str) -> list[sa.Column[Any]]:
    return [sa.Column(name, sa.Numeric(38, 0), nullable=False) for name in names]


def _end() -> list[sa.Column[Any]]:
    return [
        _text("state"),
        sa.Column("is_estimated", sa.Boolean, nullable=False),
        _moment("first_token_at"),
        _moment("ended_at", nullable=False),
        *_tokens(),
        sa.Column("attempts", JSONB),
    ]


def _create_prices() -> None:
    op.create_table(
        "price_versions",
        sa.Column("id", sa.Integer, sa.Identity(always=True), primary_key=True),
        _moment("effective_from", nullable=False),
        _text("currency"),
        _long("multiplier_numerator"),
        _long("multiplier_denominator"),
        _moment("imported_at", nullable=False),
        _text("imported_by"),
        schema=SCHEMA,
    )
    op.create_table(
        "model_prices",
        sa.Column("version_id", sa.Integer, nullable=False),
        _text("model"),
        *[_long(name) for name in ("input", "cached_input", "output")],
        sa.PrimaryKeyConstraint("version_id", "model"),
        schema=SCHEMA,
    )


def _create_events() -> None:
    op.create_table(
        "dimensions",
        sa.Column("id", sa.BigInteger, sa.Identity(always=True), primary_key=True),
        sa.Column("digest", sa.LargeBinary, nullable=False, unique=True),
        *[_text(name) for name in ("tenant_id", "key_id", "requested_model", "served_model", "cost_center")],
        sa.Column("labels", JSONB, nullable=False),
        sa.Column("is_batch", sa.Boolean, nullable=False),
        schema=SCHEMA,
    )
    op.create_index("dimensions_of_tenant", "dimensions", ["tenant_id"], schema=SCHEMA)
    op.create_table(
        "events",
        sa.Column("seq", sa.BigInteger, sa.Identity(always=True), primary_key=True),
        _text("event_id", unique=True),
        _long("dimension_id"),
        _text("endpoint"),
        _text("batch_id", nullable=True),
        _moment("started_at", nullable=False),
        _moment("effective_at", nullable=False),
        *_end(),
        _written_at(),
        schema=SCHEMA,
    )
    op.create_index("events_by_time", "events", ["effective_at"], schema=SCHEMA, postgresql_using="brin")
    given = sa.text("batch_id is not null")
    op.create_index("events_of_batch", "events", ["batch_id"], schema=SCHEMA, postgresql_where=given)
    op.create_table(
        "recounts",
        _long("event_seq", primary_key=True, autoincrement=False),
        _long("dimension_id"),
        _moment("effective_at", nullable=False),
        *_end(),
        _written_at(),
        schema=SCHEMA,
    )


def _create_ledger() -> None:
    op.create_table(
        "postings",
        _long("event_seq"),
        sa.Column("seq", sa.SmallInteger, nullable=False),
        _text("kind"),
        _long("dimension_id"),
        sa.Column("price_version", sa.Integer, nullable=False),
        _text("currency"),
        _moment("effective_at", nullable=False),
        sa.Column("requests", sa.SmallInteger, nullable=False),
        *_tokens(),
        *_amounts(*AMOUNTS),
        _written_at(),
        sa.PrimaryKeyConstraint("event_seq", "seq"),
        schema=SCHEMA,
    )
    op.create_index("postings_by_time", "postings", ["effective_at", "event_seq", "seq"], schema=SCHEMA)
    op.create_table(
        "entries",
        _long("event_seq"),
        sa.Column("seq", sa.SmallInteger, nullable=False),
        *[_text(name) for name in ("account", "tenant_id", "currency")],
        *_amounts("amount"),
        sa.PrimaryKeyConstraint("event_seq", "seq", "account"),
        schema=SCHEMA,
    )


def _create_rollups() -> None:
    buckets = {"quarter_hour": _moment("bucket", nullable=False), "day": sa.Column("bucket", sa.Date)}
    for name, bucket in buckets.items():
        op.create_table(
            f"rollups_{name}",
            bucket,
            _long("dimension_id"),
            sa.Column("price_version", sa.Integer, nullable=False),
            sa.Column("is_adjustment", sa.Boolean, nullable=False),
            _long("requests"),
            *_tokens(),
            *_amounts(*AMOUNTS),
            sa.PrimaryKeyConstraint("bucket", "dimension_id", "price_version", "is_adjustment"),
            schema=SCHEMA,
            postgresql_with={"fillfactor": "50"},
        )
    op.create_table(
        "month_spend",
        _text("tenant_id"),
        sa.Column("month", sa.Date, nullable=False),
        _text("currency"),
        *_amounts("amount"),
        sa.PrimaryKeyConstraint("tenant_id", "month", "currency"),
        schema=SCHEMA,
        postgresql_with={"fillfactor": "50"},
    )


def _create_work_lists() -> None:
    op.create_table(
        "books",
        sa.Column("is_only", sa.Boolean, primary_key=True, server_default="true"),
        _text("currency"),
        _text("timezone"),
        sa.CheckConstraint("is_only", name="one_set_of_books"),
        schema=SCHEMA,
    )
    op.create_table(
        "quarantine",
        _long("event_seq", primary_key=True, autoincrement=False),
        _text("model"),
        _moment("effective_at", nullable=False),
        _moment("since", nullable=False, server_default=sa.func.clock_timestamp()),
        schema=SCHEMA,
    )
    op.create_table(
        "conflicting_events",
        _text("event_id"),
        _text("tenant_id"),
        sa.Column("event", sa.LargeBinary, nullable=False),
        _written_at(),
        sa.PrimaryKeyConstraint("event_id", "tenant_id"),
        schema=SCHEMA,
    )
    op.create_table(
        "closed_periods",
        _text("id", primary_key=True),
        *[_moment(name, nullable=False) for name in ("begins_at", "ends_at", "closed_at")],
        _text("closed_by"),
        sa.Column("totals", JSONB, nullable=False),
        schema=SCHEMA,
    )
    op.create_table(
        "journals",
        _text("name", primary_key=True),
        _moment("reported_at", nullable=False, server_default=sa.func.clock_timestamp()),
        schema=SCHEMA,
    )
    op.execute(FACTS)


def downgrade() -> None:
    """Drop everything with its rows."""
    op.execute(f"drop view {SCHEMA}.usage_facts")
    for table in (*IMMUTABLE, *WORK):
        op.drop_table(table, schema=SCHEMA)
    op.execute(f"drop function {SCHEMA}.refuse_change()")
