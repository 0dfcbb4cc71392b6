"""The tables of billing, in a schema of their own.

What was written down is never changed: triggers refuse it for prices, dimensions, events, recounts,
postings, entries and closed periods. Rollups and the spend of a month are sums of postings, kept in the
transaction that posts, and compared with them before a month is closed. `quarantine` and `journals` are
lists of work, `exports` of files that were asked for.

Rows of one event stand under the number that its row in `events` got. They are written in one transaction
and never deleted, so they have no foreign keys, which would cost as much again as the rows.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Date,
    DateTime,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Numeric,
    PrimaryKeyConstraint,
    SmallInteger,
    Table,
    Text,
    func,
)
from sqlalchemy.dialects.postgresql import JSONB

SCHEMA = "billing"
metadata = MetaData(schema=SCHEMA)
# The version that rollups of events without a price stand under.
UNPRICED = 0
TOKEN_COLUMNS = ("input_uncached", "input_cached", "output", "reasoning", "discarded")
AMOUNT_COLUMNS = (
    "gross_input",
    "gross_cached_input",
    "gross_output",
    "discount_input",
    "discount_cached_input",
    "discount_output",
)
MEASURES = ("requests", *TOKEN_COLUMNS, *AMOUNT_COLUMNS)
ROLLUP_KEY = ("bucket", "dimension_id", "price_version", "is_adjustment")


def _moment(name: str, **options: Any) -> Column[Any]:
    return Column(name, DateTime(timezone=True), **options)


def _written_at() -> Column[Any]:
    return _moment("written_at", nullable=False, server_default=func.clock_timestamp())


def _tokens() -> list[Column[Any]]:
    return [Column(name, BigInteger, nullable=False) for name in TOKEN_COLUMNS]


def _pico(name: str) -> Column[Any]:
    return Column(name, Numeric(38, 0), nullable=False)


def _end() -> list[Column[Any]]:
    """How a request ended, as far as it was known when the row was written."""
    return [
        Column("state", Text, nullable=False),
        Column("is_estimated", Boolean, nullable=False),
        _moment("first_token_at"),
        _moment("ended_at", nullable=False),
        *_tokens(),
        Column("attempts", JSONB(none_as_null=True)),
    ]


# One row: what the books are kept in.
books = Table(
    "books",
    metadata,
    Column("is_only", Boolean, primary_key=True, server_default="true"),
    Column("currency", Text, nullable=False),
    Column("timezone", Text, nullable=False),
    CheckConstraint("is_only", name="one_set_of_books"),
)

price_versions = Table(
    "price_versions",
    metadata,
    Column("id", Integer, Identity(always=True), primary_key=True),
    _moment("effective_from", nullable=False),
    Column("currency", Text, nullable=False),
    Column("multiplier_numerator", BigInteger, nullable=False),
    Column("multiplier_denominator", BigInteger, nullable=False),
    _moment("imported_at", nullable=False),
    Column("imported_by", Text, nullable=False),
)

# Pico for one token.
model_prices = Table(
    "model_prices",
    metadata,
    Column("version_id", Integer, nullable=False),
    Column("model", Text, nullable=False),
    Column("input", BigInteger, nullable=False),
    Column("cached_input", BigInteger, nullable=False),
    Column("output", BigInteger, nullable=False),
    PrimaryKeyConstraint("version_id", "model"),
)

# Whom and what usage belongs to, each combination once.
dimensions = Table(
    "dimensions",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("digest", LargeBinary, nullable=False, unique=True),
    Column("tenant_id", Text, nullable=False),
    Column("key_id", Text, nullable=False),
    Column("requested_model", Text, nullable=False),
    Column("served_model", Text, nullable=False),
    Column("cost_center", Text, nullable=False),
    Column("labels", JSONB, nullable=False),
    Column("is_batch", Boolean, nullable=False),
    Index("dimensions_of_tenant", "tenant_id"),
)

events = Table(
    "events",
    metadata,
    Column("seq", BigInteger, Identity(always=True), primary_key=True),
    Column("event_id", Text, nullable=False, unique=True),
    Column("dimension_id", BigInteger, nullable=False),
    Column("endpoint", Text, nullable=False),
    Column("batch_id", Text),
    _moment("started_at", nullable=False),
    # When it counts: its start, or a later moment if its month was closed before it came.
    _moment("effective_at", nullable=False),
    *_end(),
    _written_at(),
    Index("events_by_time", "effective_at", postgresql_using="brin"),
    Index("events_of_batch", "batch_id", postgresql_where="batch_id is not null"),
)

# The one better count of an event that was estimated.
recounts = Table(
    "recounts",
    metadata,
    Column("event_seq", BigInteger, primary_key=True, autoincrement=False),
    Column("dimension_id", BigInteger, nullable=False),
    _moment("effective_at", nullable=False),
    *_end(),
    _written_at(),
)

postings = Table(
    "postings",
    metadata,
    Column("event_seq", BigInteger, nullable=False),
    Column("seq", SmallInteger, nullable=False),
    Column("kind", Text, nullable=False),
    Column("dimension_id", BigInteger, nullable=False),
    Column("price_version", Integer, nullable=False),
    Column("currency", Text, nullable=False),
    _moment("effective_at", nullable=False),
    Column("requests", SmallInteger, nullable=False),
    *_tokens(),
    *[_pico(name) for name in AMOUNT_COLUMNS],
    _written_at(),
    PrimaryKeyConstraint("event_seq", "seq"),
    Index("postings_by_time", "effective_at", "event_seq", "seq"),
)

entries = Table(
    "entries",
    metadata,
    Column("event_seq", BigInteger, nullable=False),
    Column("seq", SmallInteger, nullable=False),
    Column("account", Text, nullable=False),
    Column("tenant_id", Text, nullable=False),
    Column("currency", Text, nullable=False),
    _pico("amount"),
    PrimaryKeyConstraint("event_seq", "seq", "account"),
)


def _rollups(name: str, bucket: Column[Any]) -> Table:
    return Table(
        name,
        metadata,
        bucket,
        Column("dimension_id", BigInteger, nullable=False),
        Column("price_version", Integer, nullable=False),
        Column("is_adjustment", Boolean, nullable=False),
        Column("requests", BigInteger, nullable=False),
        *_tokens(),
        *[_pico(column) for column in AMOUNT_COLUMNS],
        PrimaryKeyConstraint(*ROLLUP_KEY),
        # Rows of the present bucket are updated in place.
        postgresql_with={"fillfactor": "50"},
    )


# By quarters of an hour in UTC: every timezone in use is a whole number of them away from it.
rollups_quarter_hour = _rollups("rollups_quarter_hour", _moment("bucket", nullable=False))
# By days of the billing timezone, for months and other long ranges in it.
rollups_day = _rollups("rollups_day", Column("bucket", Date, nullable=False))

# What a tenant owes for a calendar month of the billing timezone, in pico.
month_spend = Table(
    "month_spend",
    metadata,
    Column("tenant_id", Text, nullable=False),
    Column("month", Date, nullable=False),
    Column("currency", Text, nullable=False),
    _pico("amount"),
    PrimaryKeyConstraint("tenant_id", "month", "currency"),
    postgresql_with={"fillfactor": "50"},
)

# Events that no price was found for.
quarantine = Table(
    "quarantine",
    metadata,
    Column("event_seq", BigInteger, primary_key=True, autoincrement=False),
    Column("model", Text, nullable=False),
    _moment("effective_at", nullable=False),
    _moment("since", nullable=False, server_default=func.clock_timestamp()),
)

# Events that came under the id of another tenant's: kept whole, counted nowhere.
conflicting_events = Table(
    "conflicting_events",
    metadata,
    Column("event_id", Text, nullable=False),
    Column("tenant_id", Text, nullable=False),
    Column("event", LargeBinary, nullable=False),
    _written_at(),
    PrimaryKeyConstraint("event_id", "tenant_id"),
)

# Which request came first under an idempotency key, for a day.
request_keys = Table(
    "request_keys",
    metadata,
    Column("tenant_id", Text, nullable=False),
    Column("key_digest", LargeBinary, nullable=False),
    Column("event_id", Text, nullable=False),
    _moment("claimed_at", nullable=False),
    PrimaryKeyConstraint("tenant_id", "key_digest"),
    Index("request_keys_by_age", "claimed_at"),
)

closed_periods = Table(
    "closed_periods",
    metadata,
    Column("id", Text, primary_key=True),  # 2026-11
    _moment("begins_at", nullable=False),
    _moment("ends_at", nullable=False),
    _moment("closed_at", nullable=False),
    Column("closed_by", Text, nullable=False),
    Column("totals", JSONB, nullable=False),
)

# Local journals that were said to hold events.
journals = Table(
    "journals",
    metadata,
    Column("name", Text, primary_key=True),
    _moment("reported_at", nullable=False, server_default=func.clock_timestamp()),
)

# Files that somebody has asked for, and how far they have come.
exports = Table(
    "exports",
    metadata,
    Column("seq", BigInteger, Identity(always=True), primary_key=True),
    Column("id", Text, nullable=False, unique=True),
    Column("request", JSONB, nullable=False),
    _moment("created_at", nullable=False),
    Column("created_by", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("rows_done", BigInteger, nullable=False, server_default="0"),
    Column("rows_total", BigInteger),
    # JSON null is no value here.
    Column("sidecar", JSONB(none_as_null=True)),
    Column("error", Text),
    _moment("updated_at", nullable=False),
)

IMMUTABLE = (
    price_versions,
    model_prices,
    dimensions,
    events,
    recounts,
    postings,
    entries,
    conflicting_events,
    closed_periods,
)
