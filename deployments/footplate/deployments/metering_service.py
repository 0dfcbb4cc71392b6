"""Usage events of one gateway: the books, the writer and its journal, and what the platform is told."""

from __future__ import annotations

import asyncio
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
from footplate.deployments.open_requests import LeftRequests, OpenRequests
from footplate.platform.budgets import Budgets
from footplate.platform.http.health import Readiness
from footplate.platform.idempotency import RequestClaims
from footplate.platform.metering import LostRequestMeter, Metering
from footplate.platform.settings import BillingSettings
from footplate.platform.usage_metrics import UsageMetrics

OPEN_FOLDER = "open-requests"


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
        # Beside the journals' folder, which belongs to them.
        open_dir = journal_dir.with_name(OPEN_FOLDER)
        self._open = OpenRequests(open_dir, name)
        self._left = LeftRequests(open_dir, LostRequestMeter(self.metering))
        self._looking: asyncio.Task[None] | None = None
        self.metrics.gauges += [
            ("usage_events_waiting", "Events that are not durable yet", lambda: self.writer.num_waiting),
            ("usage_store_away", "1 while events go to the journal", lambda: self.writer.is_store_away),
            ("usage_stalled", "1 while nothing takes events", lambda: self.writer.is_stalled),
        ]

    @property
    def keeper(self) -> OpenRequests:
        """Where requests are written down while Valkey is away."""
        return self._open

    def start(self) -> None:
        """Begin to commit; what earlier processes left on this machine is replayed."""
        self.writer.start()
        self.budgets.start()
        self._looking = asyncio.create_task(self._left.run())

    async def close(self) -> None:
        """Make all events durable, then let go of the database."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        await self.budgets.close()
        await self.writer.close()
        self._open.close()
        self._engine.dispose()

    def readiness_check(self) -> Callable[[], Awaitable[Readiness]]:
        """For `/readyz`: where events go, and whether new work may begin."""

        async def check() -> Readiness:
            if not self.writer.may_begin:
                return Readiness(False, "stalled" if self.writer.is_stalled else "full")
            return Readiness(True, "journal" if self.writer.is_store_away else "database")

        return check
