"""Books that a start brings up to date: prices once, from the right list, or a sentence and no start."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from footplate.billing.adapters.postgres.books import Books, connect
from footplate.billing.adapters.postgres.event_store import PostgresEventStore
from footplate.billing.adapters.postgres.price_store import PostgresPriceStore
from footplate.billing.prices import PriceVersion
from footplate.deployments.billing_setup import BillingSetup, packaged_prices, prepare_books
from footplate.deployments.errors import StartupError
from tests.billing.conftest import NewBooks

OURS = BillingSetup(("smollm2-135m",))
PRICES = """
effective_from: 2026-11-01T00:00:00Z
currency: USD
models:
  smollm2-135m: {input: "1", cached_input: "0.1", output: "2"}
"""


@pytest.fixture
def url(new_books: NewBooks) -> str:
    return new_books()


@pytest.fixture
def with_file(tmp_path: Path) -> BillingSetup:
    path = tmp_path / "prices.yaml"
    path.write_text(PRICES)
    return replace(OURS, prices_file=path)


def versions(url: str) -> list[PriceVersion]:
    engine = connect(url, pool_size=1)
    try:
        books = Books(engine)
        book = PostgresPriceStore(books, PostgresEventStore(books).rate_quarantined).book()
        return sorted(book.versions, key=lambda version: version.id)
    finally:
        engine.dispose()


def refusal(url: str, setup: BillingSetup) -> str:
    with pytest.raises(StartupError) as refused:
        prepare_books(url, setup)
    return str(refused.value)


def test_packaged_models_get_the_packaged_prices_once(url: str) -> None:
    prepare_books(url, OURS)
    prepare_books(url, OURS)
    [version] = versions(url)
    assert version.prices == packaged_prices() and version.imported_by == "configuration"


@pytest.mark.parametrize(
    "setup",
    [BillingSetup(("smollm2-135m", "other")), replace(OURS, currency="EUR")],
    ids=["model", "currency"],
)
def test_the_packaged_prices_are_for_nothing_else(
    url: str, setup: BillingSetup, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        prepare_books(url, setup)
    assert versions(url) == [] and "waits for a price book" in caplog.text


def test_a_file_is_imported_once_and_again_only_when_it_says_something_new(
    url: str, with_file: BillingSetup
) -> None:
    assert with_file.prices_file is not None
    for text, count in (
        (PRICES, 1),
        ("# the same\n" + PRICES, 1),
        (PRICES.replace("11-01", "11-02").replace('"2"', '"3"'), 2),
        (PRICES, 2),  # an older file again: its version is there
    ):
        with_file.prices_file.write_text(text)
        prepare_books(url, with_file)
        assert len(versions(url)) == count
    # Without the file, its prices stay: the packaged ones are a first guess only.
    prepare_books(url, OURS)
    assert len(versions(url)) == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "can't be read"),
        ("models: [", "in line 1"),
        (PRICES.replace('"0.1"', "cheap"), "price"),
        (PRICES.replace("USD", "EUR"), "billing.currency is USD"),
        (PRICES.replace("smollm2-135m", "other"), "has no price for smollm2-135m"),
        (PRICES.replace("2026-", "2999-"), "has no price for smollm2-135m"),
    ],
    ids=["no file", "no yaml", "no number", "another currency", "a model without a price", "begins too late"],
)
def test_prices_that_can_not_be_used_are_a_sentence_and_no_start(
    url: str, with_file: BillingSetup, text: str | None, words: str
) -> None:
    assert with_file.prices_file is not None
    with_file.prices_file.unlink() if text is None else with_file.prices_file.write_text(text)
    assert words in refusal(url, with_file)


def test_a_start_that_was_refused_for_its_prices_starts_once_they_are_right(
    url: str, with_file: BillingSetup
) -> None:
    both = replace(with_file, models=("smollm2-135m", "late"))
    assert "has no price for late" in refusal(url, both)
    assert both.prices_file is not None
    both.prices_file.write_text(
        PRICES.replace("11-01", "11-02") + '  late: {input: "1", cached_input: "1", output: "1"}\n'
    )
    prepare_books(url, both)


@pytest.mark.parametrize(
    "other",
    [replace(OURS, currency="EUR"), replace(OURS, timezone="Europe/Berlin")],
    ids=["currency", "zone"],
)
def test_books_of_another_currency_or_zone_are_left_alone(url: str, other: BillingSetup) -> None:
    prepare_books(url, OURS)
    before = versions(url)
    assert "billing can't start" in refusal(url, other)
    assert versions(url) == before


def test_a_database_that_is_away_is_named_without_its_password() -> None:
    message = refusal("postgresql+psycopg://someone:hush-hush@127.0.0.1:1/books", OURS)
    assert "the books can't be used" in message and "hush-hush" not in message
