"""What routes have saved: sums of the ledger, net of the attempts that were thrown away."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from footplate.billing.adapters.postgres.reconcile_reader import PostgresLedgerCountReader
from footplate.billing.adapters.postgres.route_reader import PostgresRouteReader
from footplate.billing.prices import ModelPrices, PriceBook
from footplate.billing.rating import ClassAmounts
from footplate.billing.reconcile import EngineCount, EngineCounts, ReconciliationInput, reconcile
from footplate.billing.route_savings import RouteUsage, RouteUse, saving_of
from footplate.billing.time_ranges import TimeRange
from footplate.billing.usage import Attempt, AttemptOutcome, BatchId, ModelName, TokenCounts, UsageEvent
from tests.billing.builders import NOVEMBER, OpenBooks, event, price_list, version

MONTH = TimeRange(NOVEMBER, datetime(2026, 12, 1, tzinfo=UTC))
SMALL, LARGE = ModelPrices(1_000_000, 100_000, 2_000_000), ModelPrices(5_000_000, 500_000, 10_000_000)
PRICES = price_list(small=SMALL, large=LARGE)


def kept(tokens: tuple[int, int, int] = (100, 0, 10), **known: Any) -> UsageEvent:
    return event(tokens=tokens, served="small", model="auto", **known)


def escalated(tried: TokenCounts, tokens: tuple[int, int, int] = (90, 0, 20), **known: Any) -> UsageEvent:
    attempts = (
        Attempt(ModelName("small"), "0", AttemptOutcome.ESCALATED, tried, "unsure"),
        Attempt(ModelName("large"), "1", AttemptOutcome.COMPLETED, TokenCounts(*tokens), "unsure"),
    )
    return event(tokens=tokens, served="large", model="auto", attempts=attempts, **known)


def test_the_ledger_balances_over_routes_and_says_what_they_saved(books: OpenBooks) -> None:
    """Kept: 100 in and 10 out at 1 and 2, where 5 and 10 were saved; left: 100 in, 4 out at 1 and 2."""
    books.prices.add(PRICES, imported_by="test")
    first, second = kept(), escalated(TokenCounts(100, 0, 4))
    late = escalated(TokenCounts(60, 0, 4), batch_id=BatchId("batch_1"))
    books.events.commit([first, second, late, event(served="small", model="small")])
    usage = PostgresRouteReader(books.books).usage(MONTH, ["auto"])
    found = saving_of("auto", ModelName("large"), usage, books.prices.book())
    assert (found.requests, found.by_model) == (3, {"small": 1, "large": 2})
    assert (found.attempts_left, found.unpriced) == (2, 0)
    micro = 1_000_000
    in_batch = (90 * 5 + 20 * 10) * micro // 2
    assert found.billed == 120 * micro + 650 * micro + in_batch
    assert found.at_large == 600 * micro + 650 * micro + in_batch
    # In a batch an attempt costs half as well.
    assert found.attempts_cost == 108 * micro + 34 * micro
    assert found.saved == (600 - 120 - 108 - 34) * micro
    # What engines have made of the attempt is in nobody's bill and no difference.
    reader = PostgresLedgerCountReader(books.books)
    made = EngineCounts({second.event_id: EngineCount(24, 24), late.event_id: EngineCount(24, 24)}, NOVEMBER)
    with reader.counts(MONTH) as counts:
        ledger = [count for count in counts if count.event_id in made.by_request]
    result = reconcile(ReconciliationInput(ledger, reader.books_state(MONTH), made))
    assert (result.state, result.ledger_output) == ("balanced", 40)


def test_what_has_no_price_is_said_and_in_no_sum() -> None:
    book = PriceBook([version(price_list(small=SMALL))])
    [only] = book.versions
    tokens = ClassAmounts(100, 0, 10)
    usage = RouteUsage(
        [
            RouteUse("auto", ModelName("small"), only.id, False, 2, tokens, 120),
            RouteUse("auto", ModelName("small"), None, False, 3, tokens),
            RouteUse("other", ModelName("small"), only.id, False, 9, tokens, 120),
        ]
    )
    found = saving_of("auto", ModelName("large"), usage, book)
    assert (found.requests, found.unpriced, found.billed, found.saved) == (5, 5, 0, 0)


def test_attempts_may_cost_more_than_keeping_saves() -> None:
    book = PriceBook([version(PRICES)])
    [only] = book.versions
    large = [RouteUse("auto", ModelName("large"), only.id, False, 1, ClassAmounts(10, 0, 0), 50_000_000)]
    left = [RouteUse("auto", ModelName("small"), only.id, False, 1, ClassAmounts(10, 0, 1))]
    found = saving_of("auto", ModelName("large"), RouteUsage(large, left), book)
    assert (found.billed, found.at_large, found.saved) == (50_000_000, 50_000_000, -12_000_000)
