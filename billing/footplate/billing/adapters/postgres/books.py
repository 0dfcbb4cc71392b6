"""What all stores of billing share: connections, the gate in front of the books, what they are kept in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import psycopg
from sqlalchemy import Connection, Engine, create_engine, select, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError, TimeoutError

from footplate.billing.adapters.postgres.tables import books
from footplate.billing.errors import BooksDiffer, StoreUnavailable
from footplate.billing.money import check_currency
from footplate.billing.periods import BillingCalendar

CONNECT_S = 3
_CONNECT_ARGUMENTS = {
    "connect_timeout": CONNECT_S,
    # A peer that is gone without a word is noticed too.
    "tcp_user_timeout": 5000,
    "options": "-c statement_timeout=5000 -c timezone=UTC",
}
UNAVAILABLE = (
    OperationalError,
    InterfaceError,
    TimeoutError,
    psycopg.OperationalError,
    psycopg.InterfaceError,
)
# Those who commit hold it together; who imports prices or closes a month holds it alone. So a commit knows
# all prices and closed months that are there when it ends.
_GATE_ID = 0x66706267
MAX_RETRIES = 8


def connect(database_url: str, *, pool_size: int = 4) -> Engine:
    """A pool for one process: `postgresql+psycopg://…`. Waits for a server are bounded."""
    return create_engine(
        database_url,
        pool_size=pool_size,
        max_overflow=2,
        pool_pre_ping=True,
        pool_timeout=CONNECT_S,
        connect_args=_CONNECT_ARGUMENTS,
    )


def utc_now() -> datetime:
    """The clock of production."""
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True)
class Books:
    """A database, and the currency and timezone that its books are kept in for good."""

    engine: Engine
    currency: str = "USD"
    timezone: str = "UTC"
    clock: Callable[[], datetime] = utc_now
    calendar: BillingCalendar = field(init=False)

    def __post_init__(self) -> None:
        check_currency(self.currency)
        object.__setattr__(self, "calendar", BillingCalendar(self.timezone))

    def open(self) -> None:
        """Note currency and timezone in a new database, or find them there.

        Raises:
            BooksDiffer: the database has others. They can't be changed: days and sums are kept in them.
        """
        values = {"currency": self.currency, "timezone": self.timezone}
        with writing(self.engine) as connection:
            connection.execute(insert(books).values(values).on_conflict_do_nothing())
            row = connection.execute(select(books.c.currency, books.c.timezone)).one()
        self.check(row.currency, row.timezone)

    def check(self, currency: str | None, timezone: str | None) -> None:
        """Raises BooksDiffer unless these are the books' own; None: they were never opened."""
        if (currency, timezone) != (self.currency, self.timezone):
            raise BooksDiffer(
                f"the database's books are kept in {currency} and {timezone}, the configuration says "
                f"{self.currency} and {self.timezone}; set billing.currency and billing.timezone to those"
            )


@contextmanager
def reading(engine: Engine, *, is_long: bool = False) -> Iterator[Connection]:
    """One snapshot to read on. Raises StoreUnavailable when the server gives no answer."""
    try:
        with engine.connect() as connection:
            connection.execute(text("set transaction isolation level repeatable read, read only"))
            if is_long:
                connection.execute(text("set local statement_timeout = 0"))
            yield connection
    except UNAVAILABLE as error:
        raise StoreUnavailable("PostgreSQL gave no answer") from error


@contextmanager
def writing(engine: Engine) -> Iterator[Connection]:
    """A transaction that commits when the block ends. Raises StoreUnavailable."""
    try:
        with engine.begin() as connection:
            yield connection
    except UNAVAILABLE as error:
        raise StoreUnavailable("PostgreSQL gave no answer") from error


@contextmanager
def alone(engine: Engine) -> Iterator[Connection]:
    """A transaction that waits for all commits of events and lets none begin. Raises StoreUnavailable."""
    with writing(engine) as connection:
        connection.execute(text("set local statement_timeout = 0"))
        connection.execute(text("select pg_advisory_xact_lock(:id)"), {"id": _GATE_ID})
        yield connection


@contextmanager
def committing(engine: Engine) -> Iterator[psycopg.Connection[Any]]:
    """A transaction of the driver's, beside others of its kind; commits when the block ends.

    It goes past SQLAlchemy, and statements are sent ahead of the answers to those before: the next one is
    made up while the server works. So a fault may be raised by a later statement, or at the end.
    """
    raw = engine.raw_connection()
    driver = raw.driver_connection
    assert driver is not None
    try:
        with driver.pipeline():
            driver.execute("select pg_advisory_xact_lock_shared(%s)", (_GATE_ID,))
            yield driver
            driver.commit()
    except BaseException as error:
        try:
            driver.rollback()
        except psycopg.Error:
            raw.invalidate(error)
        raise
    finally:
        raw.close()


def is_collision(error: BaseException) -> bool:
    """Whether the transaction lost against another, and may be tried anew."""
    cause = error.orig if isinstance(error, DBAPIError) else error
    return isinstance(cause, psycopg.errors.DeadlockDetected | psycopg.errors.SerializationFailure)
