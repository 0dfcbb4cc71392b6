"""The books on the gateway's event loop: what reads and changes them runs in threads of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TypeVar

from footplate.billing.errors import StoreUnavailable
from footplate.billing.exports.request import ExportId
from footplate.billing.periods import BillingCalendar
from footplate.billing.reconcile import BatchCount, EngineCountReader, Reservations, WaitingEvents
from footplate.billing.route_savings import RouteReader
from footplate.billing.store import (
    ExportStore,
    LedgerCountReader,
    MonthReader,
    PeriodStore,
    PriceStore,
    ReportReader,
)
from footplate.billing.time_ranges import TimeRange

MAX_THREADS = 4
# Reports answer within their statement's time; closing a month and reconciling read all of its events.
READ_S = 65.0
LONG_S = 900.0
_Answer = TypeVar("_Answer")


def _utc_now() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True)
class BillingDesk:
    """What the endpoints of billing work with.

    `prices` rates nothing by itself: `rate_quarantined` does, once an import stands. `launch` lets an export
    be written and returns at once. `engine_counts`, `reservations` and `waiting_events` are what engines, the
    limiter and this machine's journals say, `batch_counts` what batches say, `routes` what routes did; None
    where nobody can be asked, or nobody answers.
    """

    currency: str
    calendar: BillingCalendar
    reports: ReportReader
    prices: PriceStore
    periods: PeriodStore
    months: MonthReader
    exports: ExportStore
    ledger_counts: LedgerCountReader
    rate_quarantined: Callable[[], int]
    launch: Callable[[ExportId], None]
    engine_counts: EngineCountReader | None = None
    reservations: Callable[[], Reservations | None] | None = None
    waiting_events: Callable[[], WaitingEvents] | None = None
    batch_counts: Callable[[TimeRange], Iterable[BatchCount]] | None = None
    routes: RouteReader | None = None
    now: Callable[[], datetime] = _utc_now
    _threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="books"), repr=False
    )

    async def ask(self, work: Callable[[], _Answer], *, wait_s: float = READ_S) -> _Answer:
        """What `work` gives. Raises StoreUnavailable and what it raises; it runs on when nobody waits."""
        try:
            async with asyncio.timeout(wait_s):
                return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except TimeoutError:
            raise StoreUnavailable("the books gave no answer in time") from None

    def close(self) -> None:
        """Let no more work begin."""
        self._threads.shutdown(wait=False, cancel_futures=True)
