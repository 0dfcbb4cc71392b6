"""Prices are exact or refused; versions follow one another and are never edited."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from footplate.billing.errors import InvalidPrice, PriceMissing
from footplate.billing.money import PICO
from footplate.billing.price_import import from_csv, from_fields, from_yaml
from footplate.billing.prices import (
    MAX_PICO_PER_TOKEN,
    ChangeKind,
    ModelPrices,
    PriceBook,
    PriceChange,
    diff,
    parse_price,
    price_text,
    repriced_models,
)
from footplate.billing.usage import ModelName, TokenClass
from tests.billing.builders import NOON, NOVEMBER, USUAL, price_list, version

M = ModelName("m")
FIELDS = {
    "effective_from": "2026-11-01T01:00:00+01:00",
    "currency": "USD",
    "models": {"m": {"input": "1.00", "cached_input": "0.1", "output": "2"}},
    "batch_multiplier": "0.5",
}


@given(st.integers(0, MAX_PICO_PER_TOKEN), st.integers(0, 10**9))
def test_unit_price_times_quantity_is_the_cost_exactly(price: int, quantity: int) -> None:
    text = price_text(price)
    assert parse_price(text, "f") == price
    per_million = Fraction(text)
    assert Fraction(price * quantity, PICO) == per_million * quantity / 10**6


@pytest.mark.parametrize("text", ["0.0000001", "1.1234567", "-1", "1e-3", "nan", "", "1.", "0x10"])
def test_a_price_that_is_finer_than_exact_or_no_decimal_is_refused(text: str) -> None:
    with pytest.raises(InvalidPrice) as refusal:
        parse_price(text, "models.m.input")
    assert refusal.value.field == "models.m.input"


def test_a_multiplier_that_makes_a_batch_price_finer_than_exact_is_refused() -> None:
    with pytest.raises(InvalidPrice, match="round the price or choose another multiplier") as refusal:
        price_list(m=ModelPrices(1, 0, 0))
    assert refusal.value.field == "models.m.input"
    assert price_list(m=ModelPrices(2, 0, 0)).batch_price(M, TokenClass.INPUT) == 1
    for multiplier in (Fraction(0), Fraction(-1), Fraction(3, 2)):
        with pytest.raises(InvalidPrice, match="batch_multiplier"):
            price_list(multiplier=multiplier)


def test_a_version_holds_from_its_time_until_the_next_ones() -> None:
    noon = version(price_list(NOON, m=USUAL), 2)
    book = PriceBook([noon, version(price_list(NOVEMBER, m=ModelPrices(2, 2, 2)), 1)])
    assert book.version_for(M, NOON - timedelta(microseconds=1)).id == 1
    assert book.version_for(M, NOON).id == 2
    with pytest.raises(PriceMissing, match="no price book is in force"):
        book.version_for(M, NOVEMBER - timedelta(microseconds=1))


def test_of_two_that_begin_together_the_later_import_holds() -> None:
    book = PriceBook([version(price_list(), 1), version(price_list(m=ModelPrices(2, 2, 2)), 2)])
    assert book.version_for(M, NOON).id == 2


def test_a_model_without_a_price_has_none_and_not_that_of_an_older_version() -> None:
    book = PriceBook([version(price_list(), 1), version(price_list(NOON, other=USUAL), 2)])
    with pytest.raises(PriceMissing, match="'m' has no price in version 2"):
        book.version_for(M, NOON)
    assert book.missing([M, ModelName("other")], NOON) == [M]
    assert PriceBook().missing([M], NOON) == [M]


def test_a_price_of_zero_is_a_price() -> None:
    book = PriceBook([version(price_list(m=ModelPrices(0, 0, 0)))])
    assert book.version_for(M, NOON).id == 1


def test_a_difference_names_every_price_that_changes() -> None:
    old = price_list(m=USUAL, gone=USUAL)
    new = price_list(NOON, multiplier=Fraction(1, 4), m=ModelPrices(1_500_000, 100_000, 2_000_000), new=USUAL)
    assert diff(old, old) == []
    changes = diff(old, new)
    assert PriceChange(ChangeKind.CHANGED, M, TokenClass.INPUT, "1", "1.5") in changes
    assert PriceChange(ChangeKind.CHANGED, None, None, "0.5", "0.25") in changes
    assert [change.kind for change in changes].count(ChangeKind.ADDED) == 3
    assert [change.kind for change in changes].count(ChangeKind.REMOVED) == 3
    assert len(changes) == 8
    assert len(diff(None, old)) == 6


def test_models_are_repriced_when_anything_of_their_cost_changes() -> None:
    old = price_list(m=USUAL, same=USUAL, gone=USUAL)
    new = price_list(NOON, m=ModelPrices(2, 2, 2), same=USUAL, new=USUAL)
    assert repriced_models(old, new) == {"m", "gone"}
    assert repriced_models(old, price_list(NOON, multiplier=Fraction(1, 4), m=USUAL)) == {"m", "same", "gone"}


def test_the_three_forms_say_the_same() -> None:
    wanted = from_fields(FIELDS)
    assert wanted == price_list(NOVEMBER)
    assert from_yaml(json.dumps(FIELDS)) == wanted
    plain = """
effective_from: 2026-11-01T00:00:00Z
currency: USD
batch_multiplier: 0.50
models:
  m: {input: 1.00, cached_input: 0.1, output: 2}
"""
    assert from_yaml(plain) == wanted
    rows = "\ufeffoutput, model,input,cached_input\r\n2,m,1.0,0.100\r\n"
    assert from_csv(rows, effective_from=NOVEMBER, currency="USD", batch_multiplier="0.5") == wanted
    assert from_fields(wanted.fields()) == wanted


def test_yaml_numbers_are_read_as_they_are_written() -> None:
    """0.1 never becomes a float on its way."""
    text = json.dumps({**FIELDS, "models": {"m": {"input": 0, "cached_input": 0, "output": 0}}})
    text = text.replace('"output": 0', '"output": 123456789012345.100001')
    with pytest.raises(InvalidPrice, match=r"the price is 123456789012345\.100001"):
        from_yaml(text)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"effective_from": "2026-11-01"}, "effective_from"),
        ({"effective_from": "2026-11-01T00:00:00"}, "effective_from"),
        ({"effective_from": "0001-01-01T00:00:00+14:00"}, "effective_from"),
        ({"effective_from": 5}, "effective_from"),
        ({"effective_from": None}, "effective_from"),
        ({"currency": "usd"}, "currency"),
        ({"currency": ["USD"]}, "currency"),
        ({"models": {}}, "models"),
        ({"models": []}, "models"),
        ({"models": {"m": {"input": "1", "output": "1"}}}, "models.m"),
        ({"models": {"m": {"input": "1", "cached_input": "1", "output": "1", "x": "1"}}}, "models.m"),
        ({"models": {"m": {"input": 0.1, "cached_input": "1", "output": "1"}}}, "models.m.input"),
        ({"models": {"m": {"input": True, "cached_input": "1", "output": "1"}}}, "models.m.input"),
        ({"models": {"m": {"input": "1000001", "cached_input": "1", "output": "1"}}}, "models.m.input"),
        ({"models": {"m\n": {"input": "1", "cached_input": "1", "output": "1"}}}, "models"),
        ({"models": {"": {"input": "1", "cached_input": "1", "output": "1"}}}, "models"),
        ({"batch_multiplier": "0"}, "batch_multiplier"),
        ({"batch_multiplier": 0.5}, "batch_multiplier"),
        ({"batch_multiplier": "0.1234567"}, "batch_multiplier"),
        ({"extra": "1"}, "extra"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidPrice) as refusal:
        from_fields({**FIELDS, **change})
    assert refusal.value.field == field


@pytest.mark.parametrize(
    "text",
    [
        "a: [",
        "- 1",
        "",
        "models: {m: {}}\nmodels: {n: {}}",
        "x: &a [*a]",
        "\x00",
        "'",
        "[" * 900 + "]" * 900,
        "models: " + "{a: " * 900 + "1" + "}" * 900,
    ],
)
def test_files_that_are_no_price_list_are_refused(text: str) -> None:
    with pytest.raises(InvalidPrice):
        from_yaml(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "model,input\nm,1",
        "model,input,cached_input,output\nm,1,1",
        "model,input,cached_input,output\nm,1,1,1,1",
        "model,input,cached_input,output\nm,1,1,1\nm,1,1,1",
        'model,input,cached_input,output\n"m,1,1,1',
        "model,input,cached_input,output\nm,1,,1",
        "model,input,cached_input,output",
    ],
)
def test_tables_that_are_no_price_list_are_refused(text: str) -> None:
    with pytest.raises(InvalidPrice):
        from_csv(text, effective_from=datetime(2026, 11, 1, tzinfo=UTC), currency="USD")
