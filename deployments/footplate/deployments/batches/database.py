"""What the stores of files and batches share: transactions, and the database's clock."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy import Connection, Engine

from footplate.billing.adapters.postgres.books import UNAVAILABLE
from footplate.platform.errors import BatchStoreAway, BatchStoreFull

# Leases of all gateways are by one clock, whatever the machines' own say.
NOW = "now()"
_DISK_FULL = "53100"


@dataclass(frozen=True, slots=True)
class Database:
    """A pool, and its transactions."""

    engine: Engine

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """Commits when the block ends.

        Raises:
            BatchStoreAway: the server gives no answer; BatchStoreFull: its disk has no room.
        """
        try:
            with self.engine.begin() as connection:
                yield connection
        except UNAVAILABLE as error:
            if getattr(getattr(error, "orig", None), "sqlstate", None) == _DISK_FULL:
                raise BatchStoreFull("PostgreSQL has no room") from error
            raise BatchStoreAway("PostgreSQL gave no answer") from error


def utc(at: datetime | None) -> datetime | None:
    """As values have it."""
    return None if at is None else at.astimezone(UTC)
