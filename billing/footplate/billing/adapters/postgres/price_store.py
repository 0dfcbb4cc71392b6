"""Price versions in PostgreSQL; see `PriceStore`."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

from footplate.billing.adapters.postgres.books import Books, alone, reading
from footplate.billing.adapters.postgres.bulk import BulkInsert, Driver
from footplate.billing.adapters.postgres.price_rows import read_book
from footplate.billing.adapters.postgres.tables import SCHEMA
from footplate.billing.errors import InvalidPrice, PeriodClosed, PriceInForce
from footplate.billing.prices import (
    PriceBook,
    PriceList,
    PriceVersion,
    PriceVersionId,
    repriced_models,
)
from footplate.billing.store import Beside
from footplate.billing.usage import TokenClass

_CLOSED_UNTIL = f"select max(ends_at) from {SCHEMA}.closed_periods"
# The last event in a time whose price would have been another.
_LAST_RATED = f"""
select max(e.started_at), min(d.served_model)
from {SCHEMA}.postings p
join {SCHEMA}.dimensions d on d.id = p.dimension_id
join {SCHEMA}.events e on e.seq = p.event_seq
where p.effective_at >= %(begin)s and e.started_at >= %(begin)s and e.started_at < %(end)s
  and d.served_model = any(%(models)s)
"""
_INSERT_VERSION = f"""
insert into {SCHEMA}.price_versions
    (effective_from, currency, multiplier_numerator, multiplier_denominator, imported_at, imported_by)
values (%s, %s, %s, %s, %s, %s) returning id
"""
_INSERT_PRICES = BulkInsert(
    "model_prices",
    {"version_id": "int", "model": "text", **dict.fromkeys([each.value for each in TokenClass], "bigint")},
)
_FOR_EVER = datetime(9999, 1, 1, tzinfo=UTC)


class PostgresPriceStore:
    """Safe from any thread. Events that wait for a price are rated when one is added."""

    def __init__(self, books: Books, rate_quarantined: Callable[[], int]) -> None:
        self._books = books
        self._rate_quarantined = rate_quarantined

    def book(self) -> PriceBook:
        """As `PriceStore.book`."""
        with reading(self._books.engine) as connection:
            driver = connection.connection.driver_connection
            assert driver is not None
            return read_book(driver)

    def add(
        self, prices: PriceList, *, imported_by: str, beside: Beside[PriceVersion] | None = None
    ) -> PriceVersion:
        """As `PriceStore.add`."""
        if prices.currency != self._books.currency:
            raise InvalidPrice(
                f"prices are in {prices.currency}, the books in {self._books.currency}", "currency"
            )
        now = self._books.clock()
        with alone(self._books.engine) as connection:
            driver = connection.connection.driver_connection
            assert driver is not None
            _check_time(driver, prices)
            found = driver.execute(
                _INSERT_VERSION,
                (
                    prices.effective_from,
                    prices.currency,
                    prices.batch_multiplier.numerator,
                    prices.batch_multiplier.denominator,
                    now,
                    imported_by,
                ),
            ).fetchone()
            number = PriceVersionId(found[0])
            rows = [
                (number, name, *map(prices.models[name].of, TokenClass)) for name in sorted(prices.models)
            ]
            _INSERT_PRICES.run(driver, rows)
            version = PriceVersion(number, prices, now, imported_by)
            if beside is not None:
                beside(connection, version)
        self._rate_quarantined()
        return version


def _check_time(driver: Driver, prices: PriceList) -> None:
    """Raises PeriodClosed or PriceInForce."""
    begin = prices.effective_from
    row = driver.execute(_CLOSED_UNTIL).fetchone()
    assert row is not None
    if row[0] is not None and begin < row[0]:
        raise PeriodClosed(
            f"effective_from is {begin.isoformat()}, and months are closed until {row[0].isoformat()}; "
            "prices of closed months stay: let the version begin then or later"
        )
    book = read_book(driver)
    before = book.in_force(begin)
    if before is None:
        return
    end = min(
        (each.effective_from for each in book.versions if each.effective_from > begin), default=_FOR_EVER
    )
    models = sorted(repriced_models(before.prices, prices))
    last, model = driver.execute(_LAST_RATED, {"begin": begin, "end": end, "models": models}).fetchone() or (
        None,
        None,
    )
    if last is not None:
        raise PriceInForce(
            f"model {model!r} has events that are rated by version {before.id} after {begin.isoformat()}, "
            f"the last of {last.isoformat()}; a price is never edited: let the version begin later"
        )
