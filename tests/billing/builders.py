"""Events, prices and books with defaults, and a clock that tests set."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from typing import Any

from sqlalchemy import Engine, text

from footplate.billing.adapters.postgres import checks
from footplate.billing.adapters.postgres.books import Books, connect
from footplate.billing.adapters.postgres.event_store import PostgresEventStore
from footplate.billing.adapters.postgres.ledger_reader import PostgresLedgerReader
from footplate.billing.adapters.postgres.period_store import PostgresPeriodStore
from footplate.billing.adapters.postgres.price_store import PostgresPriceStore
from footplate.billing.prices import ModelPrices, PriceList, PriceVersion, PriceVersionId
from footplate.billing.usage import (
    Attempt,
    EventId,
    EventSkeleton,
    EventState,
    KeyId,
    ModelName,
    TenantId,
    TokenCounts,
    UsageEvent,
)

NOON = datetime(2026, 11, 15, 12, tzinfo=UTC)
NOVEMBER = datetime(2026, 11, 1, tzinfo=UTC)
# The prices of most examples: 1.00, 0.10 and 2.00 for a million tokens; batches at half.
USUAL = ModelPrices(1_000_000, 100_000, 2_000_000)
_NUMBERS = itertools.count()


_USUAL_SKELETON = EventSkeleton(
    EventId("req"),
    TenantId("tnt_a"),
    KeyId("key_a"),
    ModelName("m"),
    ModelName("m"),
    "/v1/chat/completions",
    NOON,
    100,
    "42",
)


def skeleton(event_id: str | None = None, *, model: str = "m", **changes: Any) -> EventSkeleton:
    """What is known at admission; `changes` are fields of it."""
    name = EventId(event_id or f"req_{next(_NUMBERS):032d}")
    models = {"requested_model": model, "target_model": model}
    return replace(_USUAL_SKELETON, event_id=name, **{**models, **changes})


def event(
    event_id: str | None = None,
    *,
    tokens: TokenCounts | tuple[int, ...] = (100, 0, 10),
    state: EventState = EventState.COMPLETED,
    is_estimated: bool = False,
    lasts: timedelta = timedelta(seconds=1),
    served: str | None = None,
    attempts: tuple[Attempt, ...] = (),
    **known: Any,
) -> UsageEvent:
    """A request that ended; `known` as for `skeleton`."""
    begun = skeleton(event_id, **known)
    counts = tokens if isinstance(tokens, TokenCounts) else TokenCounts(*tokens)
    return begun.end(
        state,
        counts,
        begun.started_at + lasts,
        served_model=None if served is None else ModelName(served),
        is_estimated=is_estimated,
        attempts=attempts,
    )


def price_list(
    at: datetime = NOVEMBER,
    *,
    multiplier: Fraction = Fraction(1, 2),
    currency: str = "USD",
    **models: ModelPrices,
) -> PriceList:
    """A list of one model `m` at usual prices, or of the models that are given."""
    named = {ModelName(name): prices for name, prices in (models or {"m": USUAL}).items()}
    return PriceList(at, currency, named, multiplier)


def version(prices: PriceList, number: int = 1) -> PriceVersion:
    """An imported list."""
    return PriceVersion(PriceVersionId(number), prices, NOVEMBER)


@dataclass
class Clock:
    """Says what it was told."""

    now: datetime = NOON

    def __call__(self) -> datetime:
        return self.now


@dataclass
class OpenBooks:
    """All stores on one database."""

    books: Books
    clock: Clock
    events: PostgresEventStore
    prices: PostgresPriceStore
    ledger: PostgresLedgerReader
    periods: PostgresPeriodStore
    engine: Engine = field(repr=False)

    def rows(self, query: str, **values: object) -> list[tuple[object, ...]]:
        """What a query finds."""
        with self.engine.connect() as connection:
            return [tuple(row) for row in connection.execute(text(query), values)]

    def months(self) -> list[str]:
        """All that anything counts in."""
        found = self.rows("select distinct bucket from billing.rollups_day order by 1")
        return sorted({f"{day:%Y-%m}" for (day,) in found})

    def differences(self, month: str = "2026-11") -> tuple[int, int, dict[str, int]]:
        """What the checks find in a month."""
        period = self.books.calendar.period(month)
        with self.engine.connect() as connection:
            driver = connection.connection.driver_connection
            assert driver is not None
            return (
                checks.num_rollup_differences(driver, period, self.books.calendar),
                checks.num_posting_differences(driver, period, self.books.calendar),
                checks.unbalanced(driver, period, self.books.calendar),
            )


@contextmanager
def open_books(url: str, *, timezone: str = "UTC", currency: str = "USD") -> Iterator[OpenBooks]:
    """Books on a migrated database; at the end its sums must be those of its events."""
    engine = connect(url)
    clock = Clock()
    books = Books(engine, currency, timezone, clock)
    books.open()
    events = PostgresEventStore(books)
    opened = OpenBooks(
        books,
        clock,
        events,
        PostgresPriceStore(books, events.rate_quarantined),
        PostgresLedgerReader(books),
        PostgresPeriodStore(books),
        engine,
    )
    try:
        yield opened
        for month in opened.months():
            assert opened.differences(month) == (0, 0, {}), month
    finally:
        engine.dispose()
