"""Usage events of one gateway: the books, the writer and its journal, and what the platform is told."""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from footplate.billing.adapters.postgres.books import Books, connect
from footplate.billing.adapters.postgres.event_store import PostgresEventStore
from footplate.billing.adapters.postgres.ledger_reader import PostgresLedgerReader
from footplate.billing.adapters.postgres.price_store import PostgresPriceStore
from footplate.billing.adapters.postgres.request_keys import PostgresRequestKeys
from footplate.billing.event_writer import EventWriter
from footplate.platform.budgets import Budgets
from footplate.platform.http.health import Readiness
from footplate.platform.idempotency import RequestClaims
from footplate.platform.metering import Metering
from footplate.platform.settings import BillingSettings
from footplate.platform.usage_metrics import UsageMetrics


class MeteringService:
    """Owns the pool and the writer; belongs to one event loop. `close` comes after the limits' own."""

    def __init__(self, database_url: str, journal_dir: Path, settings: BillingSettings) -> None:
        self._engine = connect(database_url)
        self.books = Books(self._engine, settings.currency, settings.timezone)
        self.events = PostgresEventStore(self.books)
        prices = PostgresPriceStore(self.books, self.events.rate_quarantined)
        self.budgets = Budgets(
            PostgresLedgerReader(self.books), prices, self.books.calendar.month, settings.currency
        )
        self.claims = RequestClaims(PostgresRequestKeys(self.books, self.events))
        self.metrics = UsageMetrics()
        # Of this process alone: a journal that is held can't be taken by another one.
        name = f"gateway-{os.getpid()}-{time.time_ns():x}"
        self.writer = EventWriter(self.events, journal_dir, name, observer=self.metrics)
        self.metering = Metering(self.writer, metrics=self.metrics)
        self.metrics.gauges += [
            ("usage_events_waiting", "Events that are not durable yet", lambda: self.writer.num_waiting),
            ("usage_store_away", "1 while events go to the journal", lambda: self.writer.is_store_away),
            ("usage_stalled", "1 while nothing takes events", lambda: self.writer.is_stalled),
        ]

    def start(self) -> None:
        """Begin to commit; what earlier processes left on this machine is replayed."""
        self.writer.start()
        self.budgets.start()

    async def close(self) -> None:
        """Make all events durable, then let go of the database."""
        await self.budgets.close()
        await self.writer.close()
        self._engine.dispose()

    def readiness_check(self) -> Callable[[], Awaitable[Readiness]]:
        """For `/readyz`: where events go, and whether new work may begin."""

        async def check() -> Readiness:
            if not self.writer.may_begin:
                return Readiness(False, "stalled" if self.writer.is_stalled else "full")
            return Readiness(True, "journal" if self.writer.is_store_away else "database")

        return check
