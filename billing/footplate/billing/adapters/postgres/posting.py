"""Writes postings with their entries, rollups and spend: all sums of a transaction move together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from operator import add
from typing import Any

from footplate.billing.adapters.postgres.bulk import BulkInsert, Driver
from footplate.billing.adapters.postgres.tables import (
    AMOUNT_COLUMNS,
    MEASURES,
    ROLLUP_KEY,
    TOKEN_COLUMNS,
    UNPRICED,
)
from footplate.billing.ledger import Posting, PostingKind, check_balanced
from footplate.billing.periods import BillingCalendar, bucket_of
from footplate.billing.rating import RatedUsage


@dataclass(frozen=True, slots=True)
class Fact:
    """One count that goes into the sums; with a posting when it has a price, and a row of its own then."""

    event_seq: int
    dimension_id: int
    tenant_id: str
    kind: PostingKind
    effective_at: datetime
    # 1 for an event, 0 for a difference, -1 for what is taken back.
    num_requests: int
    # In the order of TOKEN_COLUMNS; differences may be negative.
    tokens: tuple[int, ...]
    posting: Posting | None = None
    # Whether it takes out of the sums what stood there without a price.
    is_withdrawal: bool = False

    def measures(self) -> tuple[int, ...]:
        """In the order of MEASURES."""
        sign = -1 if self.is_withdrawal else 1
        counts = [sign * self.num_requests, *[sign * count for count in self.tokens]]
        return (*counts, *(amounts(self.posting.rated) if self.posting else _NO_AMOUNTS))


def amounts(rated: RatedUsage) -> tuple[int, ...]:
    """In the order of AMOUNT_COLUMNS."""
    gross, off = rated.gross, rated.discount
    return (gross.input, gross.cached_input, gross.output, off.input, off.cached_input, off.output)


_TOKENS = dict.fromkeys(TOKEN_COLUMNS, "bigint")
_AMOUNTS = dict.fromkeys(AMOUNT_COLUMNS, "numeric")
_NO_AMOUNTS = (0,) * len(AMOUNT_COLUMNS)
_INSERT_POSTINGS = BulkInsert(
    "postings",
    {
        "event_seq": "bigint",
        "seq": "smallint",
        "kind": "text",
        "dimension_id": "bigint",
        "price_version": "int",
        "currency": "text",
        "effective_at": "timestamptz",
        "requests": "smallint",
        **_TOKENS,
        **_AMOUNTS,
    },
)
_INSERT_ENTRIES = BulkInsert(
    "entries",
    {
        "event_seq": "bigint",
        "seq": "smallint",
        "account": "text",
        "tenant_id": "text",
        "currency": "text",
        "amount": "numeric",
    },
)


def _upsert(table: str, key: dict[str, str], sums: dict[str, str]) -> BulkInsert:
    added = ", ".join(f"{name} = kept.{name} + excluded.{name}" for name in sums)
    tail = f"on conflict ({', '.join(key)}) do update set {added}"
    return BulkInsert(f"{table} as kept", {**key, **sums}, tail=tail)


_MEASURES = {"requests": "bigint", **_TOKENS, **_AMOUNTS}
assert tuple(_MEASURES) == MEASURES
_KEY = dict(zip(ROLLUP_KEY, ("timestamptz", "bigint", "int", "bool"), strict=True))
_ADD_QUARTER_HOURS = _upsert("rollups_quarter_hour", _KEY, _MEASURES)
_ADD_DAYS = _upsert("rollups_day", {**_KEY, "bucket": "date"}, _MEASURES)
_SPEND_KEY = {"tenant_id": "text", "month": "date", "currency": "text"}
_ADD_SPEND = _upsert("month_spend", _SPEND_KEY, {"amount": "numeric"})

_GROSS = slice(MEASURES.index("gross_input"), MEASURES.index("discount_input"))
_DISCOUNT = slice(MEASURES.index("discount_input"), len(MEASURES))
_Row = tuple[Any, ...]
_Sums = dict[_Row, list[int]]


def write_facts(driver: Driver, facts: Sequence[Fact], calendar: BillingCalendar) -> None:
    """Post facts and add them to every sum. Rows are locked in one order in all processes."""
    posted = [fact for fact in facts if fact.posting is not None]
    _INSERT_POSTINGS.run(driver, [_posting_row(fact) for fact in posted])
    _INSERT_ENTRIES.run(driver, list(_entry_rows(posted)))
    quarters, days, spend = _sums(facts, calendar)
    for insert, sums in ((_ADD_QUARTER_HOURS, quarters), (_ADD_DAYS, days), (_ADD_SPEND, spend)):
        insert.run(driver, [(*key, *sums[key]) for key in sorted(sums)])


def _posting_row(fact: Fact) -> _Row:
    posting = fact.posting
    assert posting is not None
    return (
        fact.event_seq,
        posting.key.seq,
        posting.kind.value,
        fact.dimension_id,
        posting.rated.version_id,
        posting.rated.currency,
        posting.effective_at,
        fact.num_requests,
        *fact.tokens,
        *amounts(posting.rated),
    )


def _entry_rows(facts: Iterable[Fact]) -> Iterable[_Row]:
    for fact in facts:
        assert fact.posting is not None
        entries = fact.posting.entries()
        check_balanced(entries)
        for entry in entries:
            yield (
                fact.event_seq,
                fact.posting.key.seq,
                entry.account.value,
                entry.tenant_id,
                entry.currency,
                entry.amount,
            )


def _sums(facts: Iterable[Fact], calendar: BillingCalendar) -> tuple[_Sums, _Sums, _Sums]:
    """By quarters of an hour, by days, and the spend of tenants by months."""
    quarters: _Sums = {}
    payers: dict[tuple[int, int], tuple[str, str]] = {}
    for fact in facts:
        version = UNPRICED
        if fact.posting is not None:
            version = fact.posting.rated.version_id
            payers[fact.dimension_id, version] = (fact.tenant_id, fact.posting.rated.currency)
        key = (bucket_of(fact.effective_at), fact.dimension_id, version, fact.kind.is_adjustment)
        _add(quarters, key, fact.measures())
    days: _Sums = {}
    spend: _Sums = {}
    for (bucket, dimension_id, version, is_adjustment), sums in quarters.items():
        # No day begins inside a bucket.
        day = calendar.day(bucket)
        _add(days, (day, dimension_id, version, is_adjustment), sums)
        if version != UNPRICED:
            tenant_id, currency = payers[dimension_id, version]
            gross, discount = sum(sums[_GROSS]), sum(sums[_DISCOUNT])
            _add(spend, (tenant_id, day.replace(day=1), currency), (gross - discount,))
    return quarters, days, spend


def _add(sums: _Sums, key: _Row, measures: Sequence[int]) -> None:
    kept = sums.get(key)
    sums[key] = list(measures) if kept is None else list(map(add, kept, measures))
