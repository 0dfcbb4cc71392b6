"""Databases with the schema of billing in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.billing.builders import OpenBooks, open_books, price_list

NewBooks = Callable[[], str]


@pytest.fixture
def books_url(new_books: NewBooks) -> Iterator[str]:
    """The URL of a database with empty books."""
    yield new_books()


@pytest.fixture
def books(books_url: str) -> Iterator[OpenBooks]:
    """Empty books in UTC and USD; the prices of `price_list()` hold from the first of November."""
    with open_books(books_url) as opened:
        opened.prices.add(price_list(), imported_by="test")
        yield opened
