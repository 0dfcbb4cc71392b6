"""Brings the books of a run to this version: schema, currency and timezone, first prices."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path

from footplate.billing.price_import import from_yaml
from footplate.billing.prices import PriceBook, PriceList
from footplate.deployments.errors import StartupError

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BillingSetup:
    """What a configuration says of billing. `prices_file` None: those of the packaged models, if they do."""

    models: tuple[str, ...] = ()
    currency: str = "USD"
    timezone: str = "UTC"
    prices_file: Path | None = None


def prepare_books(database_url: str, setup: BillingSetup) -> None:
    """Run migrations, open the books, import prices that are new. Idempotent.

    Raises:
        StartupError: the books can't be used as they are, or a model has no price though there are prices.
    """
    # Loaded here: these imports take a while, and run beside Ray's start.
    from sqlalchemy.exc import SQLAlchemyError

    from footplate.billing.adapters.postgres import schema
    from footplate.billing.adapters.postgres.books import Books, connect
    from footplate.billing.adapters.postgres.event_store import PostgresEventStore
    from footplate.billing.adapters.postgres.price_store import PostgresPriceStore
    from footplate.billing.errors import BillingError
    from footplate.deployments import migrations

    engine = connect(database_url, pool_size=1)
    try:
        migrations.upgrade(engine, schema)
        books = Books(engine, setup.currency, setup.timezone)
        books.open()
        store = PostgresPriceStore(books, PostgresEventStore(books).rate_quarantined)
        wanted = _wanted(setup, store.book())
        if wanted is not None:
            version = store.add(wanted, imported_by="configuration")
            _LOGGER.info("prices were imported as version %d", version.id)
        _check_models(store.book(), setup)
    except SQLAlchemyError as error:
        cause = str(getattr(error, "orig", None) or type(error).__name__).strip().splitlines()[0]
        raise StartupError(f"the books can't be used: {cause}", "check storage.database_url") from error
    except BillingError as error:
        raise StartupError(f"billing can't start: {error}", "check the section billing") from error
    finally:
        engine.dispose()


def packaged_prices() -> PriceList:
    """Prices of the packaged models."""
    return from_yaml(resources.files(__package__).joinpath("configs/prices.yaml").read_text("utf-8"))


def _wanted(setup: BillingSetup, book: PriceBook) -> PriceList | None:
    """The list to import, if it is not there already."""
    from footplate.platform.price_settings import read_prices

    if setup.prices_file is not None:
        prices = read_prices(setup.prices_file, setup.currency)
        return None if any(version.prices == prices for version in book.versions) else prices
    prices = packaged_prices()
    # They are a first guess for our own models: never for a platform that has others, or prices of its own.
    covers = set(setup.models) <= set(prices.models)
    return prices if covers and not book.versions and prices.currency == setup.currency else None


def _check_models(book: PriceBook, setup: BillingSetup) -> None:
    from footplate.platform.price_settings import without_price

    missing = without_price(book, list(setup.models), datetime.now(UTC))
    if missing is not None:
        raise StartupError(f"the price book {missing}", "add them to billing.prices or import a version")
    if not book.versions:
        _LOGGER.warning("there are no prices: usage is recorded and waits for a price book")
