"""What administrators and finance see of the books in one gateway: reports, prices, months, exports."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from footplate.billing.adapters.postgres.books import Books, connect
from footplate.billing.adapters.postgres.event_store import PostgresEventStore
from footplate.billing.adapters.postgres.export_store import PostgresExportStore
from footplate.billing.adapters.postgres.month_reader import PostgresMonthReader
from footplate.billing.adapters.postgres.period_store import PostgresPeriodStore
from footplate.billing.adapters.postgres.price_store import PostgresPriceStore
from footplate.billing.adapters.postgres.reconcile_reader import PostgresLedgerCountReader
from footplate.billing.adapters.postgres.report_reader import PostgresReportReader
from footplate.billing.adapters.postgres.route_reader import PostgresRouteReader
from footplate.billing.export_process import ExportProcesses
from footplate.billing.journal import waiting_events
from footplate.billing.reconcile import EngineCount, EngineCounts, Reservations
from footplate.deployments.batches.counts import batch_counts, by_event, event_ids
from footplate.deployments.engine_journal import read_journals
from footplate.deployments.metering_service import OPEN_FOLDER
from footplate.deployments.open_requests import read_all_open
from footplate.deployments.run_paths import RunPaths
from footplate.platform.billing_desk import BillingDesk
from footplate.platform.settings import BillingSettings
from footplate.tenancy.adapters.valkey.held_reservations import ValkeyHeldReservations
from footplate.tenancy.errors import LimiterUnavailable


class BooksService:
    """Owns a pool of its own: a long report holds up no event, and no event holds up a report."""

    def __init__(self, database_url: str, redis_url: str, settings: BillingSettings, paths: RunPaths) -> None:
        self._engine = connect(database_url)
        books = Books(self._engine, settings.currency, settings.timezone)
        ledger = PostgresLedgerCountReader(books)
        exports_dir, held = paths.exports_dir, ValkeyHeldReservations(redis_url)
        self._exports = ExportProcesses(database_url, settings.currency, settings.timezone, exports_dir)
        self.desk = BillingDesk(
            settings.currency,
            books.calendar,
            PostgresReportReader(books),
            # Rated once the import stands: see `BillingDesk.prices`.
            PostgresPriceStore(books, lambda: 0),
            PostgresPeriodStore(books),
            PostgresMonthReader(books),
            PostgresExportStore(books, exports_dir),
            ledger,
            PostgresEventStore(books).rate_quarantined,
            self._exports,
            engine_counts=lambda: engine_counts(paths.engine_journal_dir),
            reservations=lambda: reservations(held, paths.usage_journal_dir.with_name(OPEN_FOLDER)),
            waiting_events=lambda: waiting_events(paths.usage_journal_dir),
            batch_counts=lambda span: batch_counts(self._engine, ledger.batches(span), span),
            routes=PostgresRouteReader(books),
        )

    async def close(self) -> None:
        """End exports that are being written, and let go of the database."""
        self.desk.close()
        self._exports.close()
        self._engine.dispose()


def reservations(held: ValkeyHeldReservations, open_dir: Path) -> Reservations | None:
    """What is held in Valkey, and what gateways of this machine have written down while it was away."""
    try:
        found = held.read()
    except LimiterUnavailable:
        return None
    written = event_ids(each.request_id for each in read_all_open(open_dir))
    return Reservations(
        event_ids(found.held) | written,
        event_ids(found.lost) - written,
        datetime.now(UTC),
    )


def engine_counts(folder: Path) -> EngineCounts:
    """What the engines of this machine have written down, by the event that each of it belongs to."""
    return EngineCounts(
        by_event(
            # An engine's request is one prompt of a request's: that one's id and a number.
            (
                tokens.request_id.rpartition("-")[0] or tokens.request_id,
                EngineCount(tokens.num_produced, tokens.num_delivered, tokens.is_cut_off),
            )
            for tokens in read_journals(folder).values()
        )
    )
