"""Events in PostgreSQL; see `EventStore`.

A commit is one transaction: events first, in the order of their ids, then what is new among them is rated and
posted. The database's unique ids decide what is new, so any number of writers may hold the same events.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TypeVar

import psycopg

from footplate.billing.adapters.postgres.books import UNAVAILABLE, Books, committing, is_collision
from footplate.billing.adapters.postgres.bulk import BulkInsert, Driver
from footplate.billing.adapters.postgres.dimensions import DimensionIds, dimension_of
from footplate.billing.adapters.postgres.event_facts import own_fact, recount_facts, withdrawal
from footplate.billing.adapters.postgres.event_rows import (
    END_COLUMNS,
    FIND_BY_ID,
    FIND_BY_SEQ,
    StoredRow,
    end_values,
    find_stored,
)
from footplate.billing.adapters.postgres.posting import Fact, write_facts
from footplate.billing.adapters.postgres.price_rows import read_book
from footplate.billing.adapters.postgres.tables import SCHEMA
from footplate.billing.errors import EventsRefused, PriceMissing, StoreUnavailable
from footplate.billing.ledger import EVENT_SEQ
from footplate.billing.prices import PriceBook
from footplate.billing.store import CommitOutcome, StoredEvent
from footplate.billing.usage import EventId, UsageEvent, best_of, is_better

MAX_TRIES = 10
_Result = TypeVar("_Result")

_STATE = f"""
select (select max(id) from {SCHEMA}.price_versions), (select max(ends_at) from {SCHEMA}.closed_periods),
       (select currency from {SCHEMA}.books), (select timezone from {SCHEMA}.books)
"""
_INSERT_EVENTS = BulkInsert(
    "events",
    {
        "event_id": "text",
        "dimension_id": "bigint",
        "endpoint": "text",
        "batch_id": "text",
        "started_at": "timestamptz",
        "effective_at": "timestamptz",
        **END_COLUMNS,
    },
    tail="on conflict (event_id) do nothing returning event_id, seq",
)
_INSERT_RECOUNTS = BulkInsert(
    "recounts",
    {"event_seq": "bigint", "dimension_id": "bigint", "effective_at": "timestamptz", **END_COLUMNS},
    tail="on conflict (event_seq) do nothing returning event_seq",
)
_INSERT_QUARANTINE = BulkInsert(
    "quarantine",
    {"event_seq": "bigint", "model": "text", "effective_at": "timestamptz"},
    tail="on conflict do nothing",
)
_INSERT_CONFLICTING = BulkInsert(
    "conflicting_events",
    {"event_id": "text", "tenant_id": "text", "event": "bytea"},
    tail="on conflict do nothing",
)
_LOCK_QUARANTINED = (
    f"select event_seq from {SCHEMA}.quarantine where event_seq = any(%s) order by event_seq for update"
)
_TAKE_QUARANTINED = f"""
select event_seq from {SCHEMA}.quarantine where model = any(%s) and event_seq > %s
order by event_seq limit %s for update skip locked
"""
_QUARANTINED_MODELS = f"select distinct model from {SCHEMA}.quarantine"
_LEAVE_QUARANTINE = f"delete from {SCHEMA}.quarantine where event_seq = any(%s)"
_NET = f"""
select sum(gross_input + gross_cached_input + gross_output
           - discount_input - discount_cached_input - discount_output), min(currency)
from {SCHEMA}.postings where event_seq = %s
"""
_REPORT_JOURNAL = f"""
insert into {SCHEMA}.journals (name) values (%s)
on conflict (name) do update set reported_at = clock_timestamp()
"""
_FORGET_JOURNAL = f"delete from {SCHEMA}.journals where name = %s"


@dataclass(frozen=True, slots=True)
class _Transaction:
    """An open transaction, and what holds until it ends."""

    driver: Driver
    book: PriceBook
    # Nothing may count before this.
    closed_until: datetime | None
    now: datetime

    def effective_at(self, at: datetime) -> datetime:
        """The moment itself, or one in the open month if its own is closed."""
        if self.closed_until is None or at >= self.closed_until:
            return at
        return max(self.now, self.closed_until)


class PostgresEventStore:
    """Short transactions on a pool; safe from any thread. `Books.open` must have been called once."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._dimensions = DimensionIds(books.engine)
        self._book: tuple[int | None, PriceBook] = (None, PriceBook())

    def commit(self, events: Sequence[UsageEvent]) -> list[CommitOutcome]:
        """As `EventStore.commit`."""
        unique: dict[str, UsageEvent] = {}
        for event in events:
            first = unique.setdefault(event.event_id, event)
            if first is not event and first.tenant_id == event.tenant_id:
                unique[event.event_id] = best_of(first, event)
        if not unique:
            return []
        # What stands under an id of another tenant's beside it goes in alone, and is found to be conflicting.
        strangers = [event for event in events if unique[event.event_id].tenant_id != event.tenant_id]
        outcomes = self._again(lambda: self._commit([unique[name] for name in sorted(unique)]))
        for stranger in strangers:
            outcomes[_name(stranger)] = self._again(
                lambda stranger=stranger: self._commit([stranger])  # type: ignore[misc]
            )[_name(stranger)]
        told = []
        for event in events:
            told.append(outcomes[_name(event)])
            if told[-1] in (CommitOutcome.RECORDED, CommitOutcome.QUARANTINED, CommitOutcome.RECOUNTED):
                outcomes[_name(event)] = CommitOutcome.REPEATED
        return told

    def rate_quarantined(self, *, page_size: int = 1000) -> int:
        """As `EventStore.rate_quarantined`; each page is a transaction of its own."""
        num_rated, after = 0, -1
        while True:
            last, num_done = self._again(lambda after=after: self._rate_page(after, page_size))  # type: ignore[misc]
            num_rated += num_done
            if last is None:
                return num_rated
            after = last

    def find(self, event_id: EventId) -> StoredEvent | None:
        """As `EventStore.find`."""

        def read(driver: Driver) -> StoredEvent | None:
            found = find_stored(driver, FIND_BY_ID, [event_id])
            if not found:
                return None
            stored = found[0]
            net, currency = driver.execute(_NET, (stored.event_seq,)).fetchone() or (None, None)
            return StoredEvent(
                stored.recount or stored.event,
                stored.effective_at,
                stored.recount is not None,
                EVENT_SEQ not in stored.versions,
                None if net is None else int(net),
                currency,
            )

        return self._again(lambda: self._read(read))

    def report_journal(self, name: str, *, holds_events: bool) -> None:
        """As `EventStore.report_journal`."""
        query = _REPORT_JOURNAL if holds_events else _FORGET_JOURNAL
        self._again(lambda: self._read(lambda driver: driver.execute(query, (name,))))

    def _read(self, do: Callable[[Driver], _Result]) -> _Result:
        with committing(self._books.engine) as driver:
            return do(driver)

    def _again(self, do: Callable[[], _Result]) -> _Result:
        """Do it anew while it loses against other transactions, and once over new connections."""
        has_lost_connection = False
        for tries_left in reversed(range(MAX_TRIES)):
            try:
                return do()
            except UNAVAILABLE as error:
                if tries_left and is_collision(error):
                    continue
                if has_lost_connection or not tries_left:
                    raise StoreUnavailable("PostgreSQL gave no answer") from error
                # Connections of before a restart of the server are found out by using them.
                has_lost_connection = True
                self._books.engine.dispose()
            except (psycopg.DataError, psycopg.IntegrityError, UnicodeEncodeError) as error:
                raise EventsRefused(f"an event can't be stored as it is ({type(error).__name__})") from error
        raise AssertionError("unreachable")

    def _begun(self, driver: Driver) -> _Transaction:
        row = driver.execute(_STATE).fetchone()
        assert row is not None
        revision, closed_until, currency, timezone = row
        self._books.check(currency, timezone)
        known, book = self._book
        if revision != known:
            book = read_book(driver)
            self._book = (revision, book)
        return _Transaction(
            driver,
            book,
            None if closed_until is None else closed_until.astimezone(UTC),
            self._books.clock(),
        )

    def _commit(self, events: Sequence[UsageEvent]) -> dict[tuple[str, str], CommitOutcome]:
        """Events of different ids, in the order of these."""
        own = {event.event_id: dimension_of(event) for event in events}
        numbers = self._dimensions.find(own.values())
        with committing(self._books.engine) as driver:
            transaction = self._begun(driver)
            rows = [
                (
                    event.event_id,
                    numbers[own[event.event_id]],
                    event.skeleton.endpoint,
                    event.skeleton.batch_id,
                    event.skeleton.started_at,
                    transaction.effective_at(event.skeleton.started_at),
                    *end_values(event),
                )
                for event in events
            ]
            inserted: dict[str, int] = dict(_INSERT_EVENTS.run(driver, rows))
            facts = []
            outcomes = {}
            repeated = []
            for event, row in zip(events, rows, strict=True):
                seq = inserted.get(event.event_id)
                if seq is None:
                    repeated.append(event)
                    continue
                fact = own_fact(seq, row[1], event, row[5], transaction.book)
                facts.append(fact)
                outcomes[_name(event)] = (
                    CommitOutcome.QUARANTINED if fact.posting is None else CommitOutcome.RECORDED
                )
            models = {seq: event for event in events if (seq := inserted.get(event.event_id)) is not None}
            _quarantine(driver, [fact for fact in facts if fact.posting is None], models)
            if repeated:
                known: dict[str, int] = {event.event_id: numbers[own[event.event_id]] for event in repeated}
                recounted, more = self._compare(transaction, repeated, known)
                outcomes.update(recounted)
                facts.extend(more)
            write_facts(driver, facts, self._books.calendar)
        return outcomes

    def _compare(
        self, transaction: _Transaction, events: Sequence[UsageEvent], numbers: Mapping[str, int]
    ) -> tuple[dict[tuple[str, str], CommitOutcome], list[Fact]]:
        """What becomes of events whose ids are there already, and the facts of the better counts."""
        driver = transaction.driver
        there = {row.event.event_id: row for row in find_stored(driver, FIND_BY_ID, sorted(numbers))}
        outcomes = dict.fromkeys(map(_name, events), CommitOutcome.REPEATED)
        better: dict[int, UsageEvent] = {}
        conflicting = []
        for event in events:
            stored = there[event.event_id]
            if stored.event.tenant_id != event.tenant_id:
                outcomes[_name(event)] = CommitOutcome.CONFLICTING
                conflicting.append((event.event_id, event.tenant_id, event.to_bytes()))
            elif stored.recount is None and is_better(event, stored.event):
                better[stored.event_seq] = event
            _INSERT_CONFLICTING.run(driver, conflicting)
        facts: list[Fact] = []
        by_seq = {row.event_seq: row for row in there.values()}
        for seq in self._insert_recounts(transaction, better, by_seq, numbers):
            event, stored = better[seq], by_seq[seq]
            outcomes[_name(event)] = CommitOutcome.RECOUNTED
            facts.extend(self._recount(transaction, stored, event, numbers[event.event_id]))
        return outcomes, facts

    def _insert_recounts(
        self,
        transaction: _Transaction,
        better: Mapping[int, UsageEvent],
        stored: dict[int, StoredRow],
        numbers: Mapping[str, int],
    ) -> list[int]:
        """The events whose better count is new; `stored` is brought up to date for those."""
        if not better:
            return []
        driver = transaction.driver
        # Whoever rates quarantined events waits until this count is there, or was here before.
        driver.execute(_LOCK_QUARANTINED, (sorted(better),))
        rows = [
            (
                seq,
                numbers[better[seq].event_id],
                transaction.effective_at(stored[seq].effective_at),
                *end_values(better[seq]),
            )
            for seq in sorted(better)
        ]
        new = [seq for (seq,) in _INSERT_RECOUNTS.run(driver, rows)]
        stored.update({row.event_seq: row for row in find_stored(driver, FIND_BY_SEQ, new)})
        return sorted(new)

    def _recount(
        self, transaction: _Transaction, stored: StoredRow, event: UsageEvent, dimension_id: int
    ) -> list[Fact]:
        if EVENT_SEQ not in stored.versions:
            return []  # still in quarantine; both counts are posted when it has a price
        at = stored.recount_effective_at
        assert at is not None
        try:
            return recount_facts(stored, event, dimension_id, at, transaction.book)
        except PriceMissing:
            row = [(stored.event_seq, event.served_model, at)]
            _INSERT_QUARANTINE.run(transaction.driver, row)
            return []

    def _rate_page(self, after: int, page_size: int) -> tuple[int | None, int]:
        """The last event that was looked at, None if there was none, and how many were posted."""
        with committing(self._books.engine) as driver:
            transaction = self._begun(driver)
            book = transaction.book
            named = {model for version in book.versions for model in version.prices.models}
            models = [model for (model,) in driver.execute(_QUARANTINED_MODELS) if model in named]
            taken = [seq for (seq,) in driver.execute(_TAKE_QUARANTINED, (models, after, page_size))]
            facts: list[Fact] = []
            done = []
            for stored in find_stored(driver, FIND_BY_SEQ, taken):
                try:
                    facts.extend(_missing_facts(stored, book))
                    done.append(stored.event_seq)
                except PriceMissing:
                    continue
            driver.execute(_LEAVE_QUARANTINE, (done,))
            write_facts(driver, facts, self._books.calendar)
        return max(taken, default=None), len(done)


def _missing_facts(stored: StoredRow, book: PriceBook) -> list[Fact]:
    """Everything of an event that is not posted yet. Raises PriceMissing."""
    facts = []
    if EVENT_SEQ not in stored.versions:
        own = own_fact(stored.event_seq, stored.dimension_id, stored.event, stored.effective_at, book)
        if own.posting is None:
            raise PriceMissing(f"model {stored.event.served_model!r} has no price")
        stored = replace(stored, versions={EVENT_SEQ: own.posting.rated.version_id})
        facts += [withdrawal(stored), own]
    if stored.recount is not None:
        assert stored.recount_dimension_id is not None and stored.recount_effective_at is not None
        facts += recount_facts(
            stored, stored.recount, stored.recount_dimension_id, stored.recount_effective_at, book
        )
    return facts


def _quarantine(driver: Driver, facts: Sequence[Fact], events: Mapping[int, UsageEvent]) -> None:
    rows = [(fact.event_seq, events[fact.event_seq].served_model, fact.effective_at) for fact in facts]
    _INSERT_QUARANTINE.run(driver, rows)


def _name(event: UsageEvent) -> tuple[str, str]:
    return event.event_id, event.tenant_id
