"""Amounts are exact integers, and are rounded once."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from footplate.billing import money

AMOUNTS = st.integers(-(10**24), 10**24)
CURRENCIES = st.sampled_from(["USD", "JPY", "KWD", "CLF"])


def half_away(value: Fraction) -> int:
    """The rule, written down another way."""
    sign = -1 if value < 0 else 1
    return sign * int(abs(value) + Fraction(1, 2))


@given(AMOUNTS, CURRENCIES)
def test_amounts_are_rounded_half_away_from_zero(pico: int, currency: str) -> None:
    coins = Fraction(pico, money.PICO) * 10 ** money.minor_digits(currency)
    rounded = money.round_to_coin(pico, currency)
    assert Fraction(rounded, money.PICO) * 10 ** money.minor_digits(currency) == half_away(coins)


@pytest.mark.parametrize(
    ("text", "printed"),
    [("0.005", "0.01"), ("-0.005", "-0.01"), ("0.0049999999", "0.00"), ("19.99", "19.99"), ("2.675", "2.68")],
)
def test_halves_of_cents_go_away_from_zero(text: str, printed: str) -> None:
    assert money.coin_text(money.round_to_coin(money.parse_amount(text), "USD"), "USD") == printed


@given(st.lists(AMOUNTS, max_size=30), CURRENCIES)
def test_printed_lines_and_the_rounding_row_sum_to_the_exact_sum_rounded_once(
    amounts: list[int], currency: str
) -> None:
    lines, rounding, total = money.rounding_row(amounts, currency)
    assert sum(lines) + rounding == total == money.round_to_coin(sum(amounts), currency)
    for shown in (*lines, rounding, total):
        assert money.parse_amount(money.coin_text(shown, currency)) == shown


@given(AMOUNTS)
def test_texts_and_decimals_say_the_very_amount(pico: int) -> None:
    assert money.parse_amount(money.decimal_text(pico)) == pico
    assert Fraction(money.as_decimal(pico)) == Fraction(pico, money.PICO)
    assert Decimal(money.decimal_text(pico)) == money.as_decimal(pico)


@pytest.mark.parametrize(
    "text", ["", ".5", "5.", "1e3", "NaN", "Infinity", "+1", "1,5", "٣", " 1", "1_000", "1" * 21, "--1"]
)
def test_what_is_no_plain_decimal_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no decimal"):
        money.parse_amount(text)


def test_what_is_finer_than_exact_is_refused_and_zeros_at_the_end_are_none_the_worse() -> None:
    assert money.parse_amount("0.0000000000010000") == 1
    with pytest.raises(ValueError, match="13 digits"):
        money.parse_amount("0.0000000000001")


def test_an_amount_that_was_not_rounded_is_not_printed_as_coins() -> None:
    with pytest.raises(ValueError, match="rounded"):
        money.coin_text(1, "USD")
    assert money.coin_text(1200 * money.PICO, "JPY") == "1200"


@pytest.mark.parametrize("code", ["usd", "US", "USDT", "U$D", ""])
def test_what_is_no_currency_is_refused(code: str) -> None:
    with pytest.raises(ValueError, match="no currency"):
        money.check_currency(code)
