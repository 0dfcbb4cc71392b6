"""What the books bring to a reconciliation; see `LedgerCountReader`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from datetime import UTC

from sqlalchemy import func, select

from footplate.billing.adapters.postgres import checks
from footplate.billing.adapters.postgres.books import Books, reading
from footplate.billing.adapters.postgres.tables import (
    SCHEMA,
    conflicting_events,
    events,
    journals,
    quarantine,
)
from footplate.billing.reconcile import BooksState, LedgerCount
from footplate.billing.time_ranges import TimeRange
from footplate.billing.usage import EventId

_PAGE = 10_000
# Attempts at other models are reported with the event and not billed; engines have made their tokens too.
_COUNTS = f"""
select e.event_id, e.started_at, coalesce(r.output, e.output), coalesce(r.is_estimated, e.is_estimated),
       coalesce((select sum((a -> 'tokens' ->> 'output')::bigint)
           from jsonb_array_elements(coalesce(r.attempts, e.attempts)) a
           where a ->> 'model' <> d.served_model), 0), e.written_at
from {SCHEMA}.events e
left join {SCHEMA}.recounts r on r.event_seq = e.seq
join {SCHEMA}.dimensions d on d.id = coalesce(r.dimension_id, e.dimension_id)
where e.started_at >= %s and e.started_at < %s and e.effective_at >= %s
"""
_BATCHES = f"""
select batch_id, count(*) from {SCHEMA}.events
where batch_id is not null and started_at >= %s and started_at < %s and effective_at >= %s group by 1
"""


class PostgresLedgerCountReader:
    """Safe from any thread."""

    def __init__(self, books: Books) -> None:
        self._books = books

    @contextmanager
    def counts(self, span: TimeRange) -> Iterator[Iterator[LedgerCount]]:
        """Every request of a range, some thousand at a time."""
        with reading(self._books.engine, is_long=True) as connection:
            driver = connection.connection.driver_connection
            assert driver is not None
            with driver.cursor(name="ledger_counts") as cursor:
                cursor.itersize = _PAGE
                # Late events count later than they began, and never earlier: the index is on that.
                cursor.execute(_COUNTS, (span.begin, span.end, span.begin))
                yield (
                    LedgerCount(
                        EventId(name),
                        at.astimezone(UTC),
                        int(output),
                        is_estimated,
                        int(other),
                        written_at.astimezone(UTC),
                    )
                    for name, at, output, is_estimated, other, written_at in cursor
                )

    def recorded(self, event_ids: Sequence[EventId]) -> Set[EventId]:
        """As `LedgerCountReader.recorded`."""
        query = select(events.c.event_id).where(events.c.event_id == func.any(list(event_ids)))
        with reading(self._books.engine, is_long=True) as connection:
            return {EventId(name) for name in connection.execute(query).scalars()}

    def books_state(self, span: TimeRange) -> BooksState:
        """Whether all months that a range touches are sound, and what waits."""
        calendar = self._books.calendar
        rollups = postings = 0
        off: dict[str, int] = {}
        with reading(self._books.engine, is_long=True) as connection:
            driver = connection.connection.driver_connection
            assert driver is not None
            period = calendar.period_of(span.begin)
            while period.begins_at < span.end:
                rollups += checks.num_rollup_differences(driver, period, calendar)
                postings += checks.num_posting_differences(driver, period, calendar)
                for currency, amount in checks.unbalanced(driver, period, calendar).items():
                    off[currency] = off.get(currency, 0) + amount
                period = calendar.next_period(period)
            waiting, conflicting = (
                connection.execute(select(func.count()).select_from(table)).scalar_one()
                for table in (quarantine, conflicting_events)
            )
            names = tuple(connection.execute(select(journals.c.name).order_by(journals.c.name)).scalars())
        return BooksState(rollups, postings, off, waiting, conflicting, names)

    def batches(self, span: TimeRange) -> dict[str, int]:
        """Events of each batch."""
        with reading(self._books.engine, is_long=True) as connection:
            driver = connection.connection.driver_connection
            assert driver is not None
            rows = driver.execute(_BATCHES, (span.begin, span.end, span.begin)).fetchall()
            return {name: int(count) for name, count in rows}
