"""Databases with the schema of billing in them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
from sqlalchemy import text

from footplate.billing.adapters.postgres import schema
from tests.billing.builders import OpenBooks, open_books, price_list
from tests.postgres_server import PostgresServer, connected

NewBooks = Callable[[], str]


@pytest.fixture(scope="session")
def new_books(postgres: PostgresServer) -> NewBooks:
    """Makes a database with empty books; answers with its URL. Copying one is faster than migrating."""
    template = postgres.new_database()
    with connected(template) as engine:
        schema.upgrade(engine)
    numbers = itertools.count()

    def make() -> str:
        name = f"books_{next(numbers)}"
        source = template.rsplit("@/", 1)[1].split("?")[0]
        with (
            connected(postgres.url) as engine,
            engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection,
        ):
            connection.execute(text(f"create database {name} template {source}"))
        return postgres.url.replace("@/postgres?", f"@/{name}?")

    return make


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
