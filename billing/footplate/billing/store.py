"""What billing needs from a database, as protocols. Methods may block; any thread may call them.

All raise StoreUnavailable when the database gives no answer in a bounded time. Times are aware, in UTC.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Protocol, TypeVar

from footplate.billing.exports.request import Export, ExportRequest
from footplate.billing.ledger import Account
from footplate.billing.periods import ClosedPeriod, ClosingState, Period
from footplate.billing.prices import PriceBook, PriceList, PriceVersion
from footplate.billing.rating import UsageTotal
from footplate.billing.reconcile import BooksState, LedgerCount
from footplate.billing.reports import Report, ReportQuery
from footplate.billing.statements import MonthUsage
from footplate.billing.time_ranges import TimeRange
from footplate.billing.usage import EventId, TenantId, UsageEvent

_Done = TypeVar("_Done", contravariant=True)


class Beside(Protocol[_Done]):
    """Writes what must stand or fall with a change, such as its audit record.

    It runs before the change is committed, and what it raises undoes the change.
    """

    def __call__(self, transaction: object, done: _Done, /) -> None:
        """`transaction`: the connection that the change is made on, for other stores of the database."""
        ...


class CommitOutcome(StrEnum):
    """What became of one event that was committed. All but CONFLICTING leave the event counted, once."""

    RECORDED = "recorded"
    # Recorded without a price: in quarantine until a price book has one.
    QUARANTINED = "quarantined"
    # It was there already; nothing was changed.
    REPEATED = "repeated"
    # It was there as an estimate; this exact count was posted as an adjustment.
    RECOUNTED = "recounted"
    # Another tenant's event has this id: kept apart, counted nowhere. A mistake of ours.
    CONFLICTING = "conflicting"


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """What was recorded of a request; the better count where one came."""

    event: UsageEvent
    effective_at: datetime
    is_recounted: bool
    is_quarantined: bool
    # Pico, all postings of the event; None while it has no price.
    net_amount: int | None
    currency: str | None


class EventStore(Protocol):
    """Records events, rates and posts them."""

    def commit(self, events: Sequence[UsageEvent]) -> list[CommitOutcome]:
        """Record events with their postings, entries and rollups, all or none; durable when it returns.

        Committing the same events again is safe, also after StoreUnavailable, and so are several writers at
        once. Outcomes are in the order of the events; of two with one id in one call the better counts.

        Raises:
            EventsRefused: one of them can't be stored as it is.
            BooksDiffer: the books are kept in another currency or timezone.
        """
        ...

    def rate_quarantined(self) -> int:
        """Post quarantined events that have a price by now; how many it were."""
        ...

    def find(self, event_id: EventId) -> StoredEvent | None:
        """What was recorded of a request."""
        ...

    def report_journal(self, name: str, *, holds_events: bool) -> None:
        """Say whether a local journal holds events that the database may lack."""
        ...


class PriceStore(Protocol):
    """Price versions. What is in them is never changed."""

    def book(self) -> PriceBook:
        """All versions."""
        ...

    def add(
        self, prices: PriceList, *, imported_by: str, beside: Beside[PriceVersion] | None = None
    ) -> PriceVersion:
        """Import a list as a new version.

        It may begin in the past as long as it gives models a price that had none: events in quarantine are
        then rated by it. What is rated stays as it is, so a version that begins before an event that was
        rated, and has another price for its model, is refused.

        Raises:
            PeriodClosed: it would begin in a closed month.
            PriceInForce: events that it would price otherwise are rated already.
            InvalidPrice: it is in another currency than the books.
        """
        ...


class LedgerReader(Protocol):
    """Sums of the ledger. Amounts in pico."""

    def month_spend(self, tenant_id: TenantId, at: datetime) -> int:
        """What a tenant owes for the month of `at`, so far, in the currency of the books.

        One row: kept in the transactions that post. What open requests hold is not in it.
        """
        ...

    def balances(self, tenant_id: TenantId | None = None) -> dict[tuple[Account, str], int]:
        """Sums of all entries by account and currency, of one tenant or all. Reads every entry of them."""
        ...


class MonthReader(Protocol):
    """Sums of a month, from the rollups by day."""

    def month_usage(self, period: Period, tenant_id: TenantId) -> list[MonthUsage]:
        """What a statement is made from: everything of a tenant that has a price."""
        ...

    def num_unpriced(self, period: Period, tenant_id: TenantId | None = None) -> int:
        """Requests that wait for a price."""
        ...

    def usage_totals(self, period: Period, tenant_id: TenantId | None = None) -> list[UsageTotal]:
        """What a simulation is made from: all tokens, with a price or without."""
        ...


class ReportReader(Protocol):
    """Sums of usage by any grouping: the one source of the API, commands, pages and exports' totals."""

    def report(self, query: ReportQuery) -> Report:
        """A page of a report and its totals, of one moment.

        Raises:
            InvalidReport: the range is too long for its grouping.
        """
        ...


class ExportStore(Protocol):
    """Files that somebody has asked for."""

    def add(self, request: ExportRequest, *, created_by: str) -> Export:
        """Note an export; somebody has to `run` it."""
        ...

    def find(self, export_id: str) -> Export:
        """How far an export has come. Raises NotFound."""
        ...

    def file_of(self, export: Export) -> Path:
        """The whole file. Raises NotFound when it is not there, or no more."""
        ...


class LedgerCountReader(Protocol):
    """What the books bring to a reconciliation."""

    def counts(self, span: TimeRange) -> AbstractContextManager[Iterator[LedgerCount]]:
        """Every request that began in a range, as of when the block begins, in bounded memory."""
        ...

    def recorded(self, event_ids: Sequence[EventId]) -> Set[EventId]:
        """Which of them have an event, of whatever time."""
        ...

    def books_state(self, span: TimeRange) -> BooksState:
        """Whether the months that a range touches are sound. Reads all their events."""
        ...


class PeriodStore(Protocol):
    """Months and their closing."""

    def closed(self) -> list[ClosedPeriod]:
        """All closed months, oldest first."""
        ...

    def first_open(self) -> Period | None:
        """The oldest month that is not closed: the one to close next. None while there are no events."""
        ...

    def inspect(self, period: Period) -> ClosingState:
        """What stands for and against closing a month now. Reads all its events."""
        ...

    def close(
        self, period: Period, *, closed_by: str, beside: Beside[ClosedPeriod] | None = None
    ) -> ClosedPeriod:
        """Close a month: nothing counts in it afterwards.

        Raises:
            PeriodNotClosable: something stands against it.
            PeriodClosed: it is closed.
        """
        ...
