"""What administrators and finance see of the books in one gateway: reports, prices, months, exports."""

from __future__ import annotations

from pathlib import Path

from footplate.billing.adapters.postgres.books import Books, connect
from footplate.billing.adapters.postgres.event_store import PostgresEventStore
from footplate.billing.adapters.postgres.export_store import PostgresExportStore
from footplate.billing.adapters.postgres.month_reader import PostgresMonthReader
from footplate.billing.adapters.postgres.period_store import PostgresPeriodStore
from footplate.billing.adapters.postgres.price_store import PostgresPriceStore
from footplate.billing.adapters.postgres.reconcile_reader import PostgresLedgerCountReader
from footplate.billing.adapters.postgres.report_reader import PostgresReportReader
from footplate.billing.export_process import ExportProcesses
from footplate.billing.reconcile import EngineCount, EngineCounts
from footplate.billing.usage import EventId
from footplate.deployments.engine_journal import read_journals
from footplate.platform.billing_desk import BillingDesk
from footplate.platform.settings import BillingSettings


class BooksService:
    """Owns a pool of its own: a long report holds up no event, and no event holds up a report."""

    def __init__(
        self, database_url: str, settings: BillingSettings, exports_dir: Path, engine_journal_dir: Path
    ) -> None:
        self._engine = connect(database_url)
        books = Books(self._engine, settings.currency, settings.timezone)
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
            PostgresLedgerCountReader(books),
            PostgresEventStore(books).rate_quarantined,
            self._exports,
            engine_counts=lambda: engine_counts(engine_journal_dir),
        )

    async def close(self) -> None:
        """End exports that are being written, and let go of the database."""
        self.desk.close()
        self._exports.close()
        self._engine.dispose()


def engine_counts(folder: Path) -> EngineCounts:
    """What the engines of this machine have written down, by the event that each of it belongs to."""
    found: dict[EventId, EngineCount] = {}
    for tokens in read_journals(folder).values():
        # An engine's request is one prompt of an event's: the event's id and a number.
        event_id = EventId(tokens.request_id.rpartition("-")[0] or tokens.request_id)
        count = EngineCount(tokens.num_produced, tokens.num_delivered, tokens.is_cut_off)
        found[event_id] = found[event_id] + count if event_id in found else count
    return EngineCounts(found)
