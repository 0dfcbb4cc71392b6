"""What an event costs is exact, each token once, and never 0 for want of a price."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from footplate.billing.errors import LedgerUnbalanced, PriceMissing
from footplate.billing.ledger import (
    Account,
    Entry,
    Posting,
    PostingKey,
    PostingKind,
    balances,
    check_balanced,
    difference,
    reversal,
)
from footplate.billing.money import PICO, parse_amount
from footplate.billing.prices import ModelPrices, PriceBook
from footplate.billing.rating import (
    ClassAmounts,
    LineKind,
    UsageTotal,
    rate,
    rate_tokens,
    rated_lines,
    simulate,
)
from footplate.billing.usage import EventId, ModelName, TenantId, TokenClass, TokenCounts
from tests.billing.builders import NOON, NOVEMBER, event, price_list, version

M = ModelName("m")
BOOK = PriceBook([version(price_list())])
COUNTS = st.builds(TokenCounts, *[st.integers(0, 10**7)] * 3)
MULTIPLIERS = st.sampled_from([Fraction(1), Fraction(1, 2), Fraction(1, 4), Fraction(4, 5)])
PRICES = st.builds(ModelPrices, *[st.integers(0, 5 * 10**7).map(lambda price: price * 20)] * 3)


def test_cached_tokens_cost_what_cached_tokens_cost() -> None:
    """200 at 1.00 and 800 at 0.10 for a million."""
    assert rate(event(tokens=(200, 800, 0)), BOOK).net == parse_amount("0.00028")


def test_reasoning_inside_output_and_discarded_tokens_cost_nothing_more() -> None:
    plain = rate(event(tokens=(200, 800, 50)), BOOK)
    assert rate(event(tokens=(200, 800, 50, 40, 1000)), BOOK) == plain


def test_a_million_calls_of_one_token_cost_one_unit() -> None:
    assert sum(rate(event(tokens=(1, 0, 0)), BOOK).net for _ in range(1000)) * 1000 == PICO


@given(COUNTS, PRICES, MULTIPLIERS, st.booleans())
def test_costs_are_those_of_exact_fractions(
    tokens: TokenCounts, prices: ModelPrices, multiplier: Fraction, is_batch: bool
) -> None:
    listed = price_list(multiplier=multiplier, m=prices)
    rated = rate_tokens(tokens, M, version(listed), is_batch=is_batch)
    per_million = {name: Fraction(text) for name, text in prices.texts().items()}
    gross = (
        tokens.input_uncached * per_million["input"]
        + tokens.input_cached * per_million["cached_input"]
        + tokens.output * per_million["output"]
    ) / 10**6
    assert Fraction(rated.gross.total, PICO) == gross
    assert Fraction(rated.net, PICO) == gross * (multiplier if is_batch else 1)
    lines = rated_lines(tokens, M, listed, is_batch=is_batch)
    assert sum(line.amount for line in lines) == rated.net
    assert sum(line.amount for line in lines if line.kind is LineKind.BATCH_DISCOUNT) == -rated.discount.total
    for line in lines:
        assert line.amount == line.quantity * line.unit_price


def test_a_batch_shows_its_discount_as_a_line_of_its_own() -> None:
    """The sum of the items, times a half."""
    lines = rated_lines(TokenCounts(1000, 0, 100), M, price_list(), is_batch=True)
    shown = [(line.kind, line.token_class, line.amount) for line in lines]
    assert shown == [
        (LineKind.USAGE, TokenClass.INPUT, 10**9),
        (LineKind.BATCH_DISCOUNT, TokenClass.INPUT, -5 * 10**8),
        (LineKind.USAGE, TokenClass.OUTPUT, 2 * 10**8),
        (LineKind.BATCH_DISCOUNT, TokenClass.OUTPUT, -(10**8)),
    ]


def test_an_event_without_a_price_is_an_error_and_not_free() -> None:
    with pytest.raises(PriceMissing, match="'new' has no price"):
        rate(event(served="new"), BOOK)


def test_only_an_event_that_came_late_takes_a_price_of_the_month_that_it_counts_in() -> None:
    book = PriceBook([version(price_list(NOON))])
    late = event(started_at=NOVEMBER)
    with pytest.raises(PriceMissing):
        rate(late, book, NOVEMBER)
    assert rate(late, book, NOON).version_id == 1


@given(st.lists(st.tuples(COUNTS, st.booleans()), max_size=20), PRICES, MULTIPLIERS)
def test_a_simulation_is_the_sum_of_all_events_rated_one_by_one(
    usage: list[tuple[TokenCounts, bool]], prices: ModelPrices, multiplier: Fraction
) -> None:
    listed = price_list(multiplier=multiplier, m=prices)
    one_by_one = sum(rate_tokens(each, M, version(listed), is_batch=flag).net for each, flag in usage)
    totals = [
        UsageTotal(
            M,
            flag,
            ClassAmounts(
                sum(each.input_uncached for each, is_batch in usage if is_batch is flag),
                sum(each.input_cached for each, is_batch in usage if is_batch is flag),
                sum(each.output for each, is_batch in usage if is_batch is flag),
            ),
        )
        for flag in (False, True)
    ]
    simulated = simulate([*totals, UsageTotal(ModelName("new"), False, ClassAmounts(1))], listed)
    assert simulated.total == one_by_one
    assert simulated.unpriced == ("new",)


@given(COUNTS, COUNTS, PRICES, MULTIPLIERS, st.booleans(), st.sampled_from(PostingKind))
def test_every_posting_sums_to_zero_and_a_recount_leaves_what_the_better_count_costs(
    first: TokenCounts,
    second: TokenCounts,
    prices: ModelPrices,
    multiplier: Fraction,
    is_batch: bool,
    kind: PostingKind,
) -> None:
    listed = version(price_list(multiplier=multiplier, m=prices))
    before, after = (rate_tokens(each, M, listed, is_batch=is_batch) for each in (first, second))
    tenant = TenantId("t")

    def entries(rated: object, seq: int, why: PostingKind) -> list[Entry]:
        posting = Posting(PostingKey(EventId("e"), seq), why, tenant, NOON, rated)  # type: ignore[arg-type]
        check_balanced(posting.entries())
        return posting.entries()

    one = entries(before, 0, kind)
    two = entries(difference(before, after), 1, PostingKind.RECOUNT)
    assert balances([*one, *two]).get((Account.TENANT, tenant, "USD"), 0) == after.net
    three = entries(reversal(before), 1, PostingKind.RECOUNT)
    assert balances([*one, *three]).get((Account.TENANT, tenant, "USD"), 0) == 0


def test_counts_of_different_versions_are_not_subtracted() -> None:
    tokens = TokenCounts(1, 0, 0)
    rated = [rate_tokens(tokens, M, version(price_list(), number), is_batch=False) for number in (1, 2)]
    with pytest.raises(LedgerUnbalanced, match="one version"):
        difference(*rated)


def test_entries_that_sum_to_zero_over_all_currencies_only_are_refused() -> None:
    tenant = TenantId("t")
    with pytest.raises(LedgerUnbalanced):
        check_balanced([Entry(Account.TENANT, tenant, "USD", 1), Entry(Account.REVENUE, tenant, "EUR", -1)])
