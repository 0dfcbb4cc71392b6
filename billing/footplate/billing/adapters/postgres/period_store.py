"""Months and their closing in PostgreSQL; see `PeriodStore`."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection, func, insert, select

from footplate.billing.adapters.postgres import checks
from footplate.billing.adapters.postgres.books import Books, alone, reading
from footplate.billing.adapters.postgres.bulk import Driver
from footplate.billing.adapters.postgres.tables import (
    AMOUNT_COLUMNS,
    SCHEMA,
    closed_periods,
    events,
    journals,
    quarantine,
)
from footplate.billing.errors import PeriodClosed, PeriodNotClosable
from footplate.billing.periods import (
    ClosedPeriod,
    ClosingState,
    Period,
    PeriodId,
    PeriodTotals,
    reasons_not_to_close,
)
from footplate.billing.store import Beside

_NET = " + ".join(AMOUNT_COLUMNS[:3]) + "".join(f" - {name}" for name in AMOUNT_COLUMNS[3:])
_TOTALS = f"""
select coalesce(v.currency, ''), sum(requests), sum(input_uncached), sum(input_cached), sum(output),
       sum({_NET})
from {SCHEMA}.rollups_day r left join {SCHEMA}.price_versions v on v.id = r.price_version
where r.bucket >= %s and r.bucket < %s group by 1
"""


class PostgresPeriodStore:
    """Safe from any thread."""

    def __init__(self, books: Books) -> None:
        self._books = books

    def closed(self) -> list[ClosedPeriod]:
        """As `PeriodStore.closed`."""
        with reading(self._books.engine) as connection:
            rows = connection.execute(select(closed_periods).order_by(closed_periods.c.begins_at)).mappings()
            return [as_closed(dict(row)) for row in rows]

    def first_open(self) -> Period | None:
        """As `PeriodStore.first_open`."""
        with reading(self._books.engine) as connection:
            return self._first_open(connection)

    def inspect(self, period: Period) -> ClosingState:
        """As `PeriodStore.inspect`."""
        with reading(self._books.engine, is_long=True) as connection:
            return self._inspect(connection, period)

    def close(
        self, period: Period, *, closed_by: str, beside: Beside[ClosedPeriod] | None = None
    ) -> ClosedPeriod:
        """As `PeriodStore.close`. A month's events are read before commits have to wait."""
        with reading(self._books.engine, is_long=True) as connection:
            self._refuse(connection, period, self._inspect(connection, period))
            proven = self._totals(connection, period)
        with alone(self._books.engine) as connection:
            totals = self._totals(connection, period)
            # Whatever came meanwhile has moved the totals: then all is read once more.
            state = self._inspect(connection, period, is_proven=totals == proven)
            self._refuse(connection, period, state)
            closed = ClosedPeriod(period, self._books.clock(), closed_by, totals)
            connection.execute(insert(closed_periods).values(_values(closed)))
            if beside is not None:
                beside(connection, closed)
            return closed

    def _refuse(self, connection: Connection, period: Period, state: ClosingState) -> None:
        """Raises PeriodClosed or PeriodNotClosable."""
        query = select(closed_periods.c.id).where(closed_periods.c.ends_at >= period.ends_at)
        if connection.execute(query).first() is not None:
            raise PeriodClosed(f"period {period.id} is closed, or one after it is; it can't be closed again")
        reasons = reasons_not_to_close(period, state)
        if reasons:
            raise PeriodNotClosable(period.id, reasons)

    def _first_open(self, connection: Connection) -> Period | None:
        """The month after the last closed one; else that of the first event; None while there is none."""
        calendar = self._books.calendar
        last_end = connection.execute(select(func.max(closed_periods.c.ends_at))).scalar()
        if last_end is not None:
            return calendar.period_of(last_end)
        first = connection.execute(select(func.min(events.c.effective_at))).scalar()
        return None if first is None else calendar.period_of(first)

    def _inspect(self, connection: Connection, period: Period, *, is_proven: bool = False) -> ClosingState:
        """`is_proven`: its sums were found to be right a moment ago, and are not read again."""
        first_open = self._first_open(connection)
        waiting = select(func.count()).select_from(quarantine)
        waiting = waiting.where(quarantine.c.effective_at < period.ends_at)
        names = select(journals.c.name).order_by(journals.c.name)
        is_earlier_open = first_open is not None and first_open.begins_at < period.begins_at
        read = (_driver(connection), period, self._books.calendar)
        return ClosingState(
            self._books.clock(),
            first_open.id if first_open is not None and is_earlier_open else None,
            connection.execute(waiting).scalar_one(),
            tuple(connection.execute(names).scalars()),
            0 if is_proven else checks.num_rollup_differences(*read),
            {} if is_proven else checks.unbalanced(*read),
            0 if is_proven else checks.num_posting_differences(*read),
        )

    def _totals(self, connection: Connection, period: Period) -> PeriodTotals:
        days = (period.first_day, self._books.calendar.day(period.ends_at))
        rows = _driver(connection).execute(_TOTALS, days).fetchall()
        requests, uncached, cached, output = (sum(int(row[index]) for row in rows) for index in range(1, 5))
        amounts = {row[0]: int(row[5]) for row in sorted(rows) if row[0]}
        return PeriodTotals(requests, uncached, cached, output, amounts)


def _driver(connection: Connection) -> Driver:
    driver: Driver | None = connection.connection.driver_connection
    assert driver is not None
    return driver


def _values(closed: ClosedPeriod) -> dict[str, Any]:
    totals = closed.totals
    return {
        "id": closed.period.id,
        "begins_at": closed.period.begins_at,
        "ends_at": closed.period.ends_at,
        "closed_at": closed.closed_at,
        "closed_by": closed.closed_by,
        "totals": {
            "requests": totals.requests,
            "input_uncached": totals.input_uncached,
            "input_cached": totals.input_cached,
            "output": totals.output,
            # As text: JSON readers take large numbers for floats.
            "amounts": {currency: str(amount) for currency, amount in totals.amounts.items()},
        },
    }


def as_closed(row: dict[str, Any]) -> ClosedPeriod:
    """A row of `closed_periods`."""
    totals = dict(row["totals"])
    amounts = {currency: int(amount) for currency, amount in totals.pop("amounts").items()}
    year, month = map(int, row["id"].split("-"))
    period = Period(
        PeriodId(row["id"]),
        datetime(year, month, 1).date(),
        row["begins_at"].astimezone(UTC),
        row["ends_at"].astimezone(UTC),
    )
    return ClosedPeriod(
        period, row["closed_at"].astimezone(UTC), row["closed_by"], PeriodTotals(**totals, amounts=amounts)
    )
