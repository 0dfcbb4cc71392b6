"""Writes the file of an export from one snapshot, and proves it: its rows sum to what reports say."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from sqlalchemy import select

from footplate.billing.adapters.postgres.books import Books
from footplate.billing.adapters.postgres.export_rows import ExportSnapshot, Slice, open_snapshot
from footplate.billing.adapters.postgres.period_store import as_closed
from footplate.billing.adapters.postgres.report_reader import PostgresReportReader
from footplate.billing.adapters.postgres.tables import closed_periods
from footplate.billing.errors import ExportDiffers
from footplate.billing.exports.columns import columns_of
from footplate.billing.exports.request import ExportFormat, ExportRequest, refuse_long_sheet
from footplate.billing.exports.row_layout import FOCUS, USAGE, Frame
from footplate.billing.exports.row_lines import RowLines
from footplate.billing.exports.sidecar import ExportTotals, sidecar_fields
from footplate.billing.exports.writers import FileWriter, WorkbookWriter, open_writer
from footplate.billing.periods import ClosedPeriod, PeriodId
from footplate.billing.reports import ReportQuery
from footplate.billing.time_ranges import days_of

Progress = Callable[[int, int], None]
_READ_BYTES = 1 << 20
# Requests whose lines are in memory at a time.
_BATCH = 4_000


class DigestedFile(io.RawIOBase):
    """A new file, written from its beginning to its end, and its checksum without reading it again."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = path.open("wb")
        self._digest = hashlib.sha256()
        self._num_bytes = 0

    def writable(self) -> bool:
        """It is."""
        return True

    def write(self, data: Any, /) -> int:
        """All of it."""
        self._digest.update(data)
        num_bytes = self._file.write(data)
        self._num_bytes += num_bytes
        return num_bytes

    def tell(self) -> int:
        """Where the next bytes go."""
        return self._num_bytes

    def close(self) -> None:
        """Let the system have all of it."""
        self._file.close()
        super().close()

    def sum(self) -> tuple[str, int]:
        """SHA-256, and how many bytes."""
        return self._digest.hexdigest(), self._num_bytes


def write_export(books: Books, request: ExportRequest, path: Path, progress: Progress) -> dict[str, Any]:
    """Write a file and give what stands beside it. `progress` hears of rows written, and of how many.

    Raises:
        InvalidReport: the format can't hold so many rows.
        ExportDiffers: rows, events and rollups don't sum to the same; the file is not to be used.
        StoreUnavailable: the database gave no answer.
    """
    with open_snapshot(books, request) as snapshot:
        totals = snapshot.totals()
        _prove(books, request, snapshot, totals)
        refuse_long_sheet(request.format, totals.num_rows)
        closed = _closed(snapshot)
        slices = snapshot.slices()
        with DigestedFile(path) as file:
            writer = open_writer(request.format, path, file, columns_of(request), request.span.end)
            if isinstance(writer, WorkbookWriter):
                # Only the library itself may have it open.
                file.close()
            _write(books, request, snapshot, slices, closed, totals, writer, progress)
        if writer.num_rows != totals.num_rows:
            raise ExportDiffers(f"{writer.num_rows} rows were written, and the events have {totals.num_rows}")
        periods = {each.period.id: each.period for each in slices}
        sha256, num_bytes = _digest(path) if isinstance(writer, WorkbookWriter) else file.sum()
        return sidecar_fields(
            request,
            totals,
            sha256=sha256,
            num_bytes=num_bytes,
            currency=books.currency,
            versions=snapshot.versions(),
            periods=[(period, closed.get(period.id)) for period in periods.values()],
        )


def _write(
    books: Books,
    request: ExportRequest,
    snapshot: ExportSnapshot,
    slices: Sequence[Slice],
    closed: dict[PeriodId, ClosedPeriod],
    totals: ExportTotals,
    writer: FileWriter,
    progress: Progress,
) -> None:
    sources = FOCUS if request.format is ExportFormat.FOCUS else USAGE
    days = days_of(request.span)
    maker = RowLines(columns_of(request), sources, writer.form, snapshot.prices, days)
    with closing(snapshot.rows(slices)) as found:
        for part in found:
            maker.begin(_frame(books, part.piece, closed), part.dimensions)
            for first in range(0, len(part.rows), _BATCH):
                writer.add(maker.lines(part.rows[first : first + _BATCH]))
            progress(writer.num_rows, totals.num_rows)
    if isinstance(writer, WorkbookWriter):
        writer.add_totals({"rows": totals.num_rows, **totals.sums.fields()})
    writer.close()
    progress(writer.num_rows, totals.num_rows)


def _frame(books: Books, piece: Slice, closed: dict[PeriodId, ClosedPeriod]) -> Frame:
    period = piece.period
    begin, end = (
        at.isoformat(timespec="seconds").replace("+00:00", "Z") for at in (period.begins_at, period.ends_at)
    )
    return Frame(books.currency, begin, end, f"{period.id}-" if period.id in closed else None)


def _prove(books: Books, request: ExportRequest, snapshot: ExportSnapshot, totals: ExportTotals) -> None:
    """The events of the snapshot against its rollups, which every report is made from."""
    query = ReportQuery(request.span, filter=request.filter)
    shown = PostgresReportReader(books).report_on(snapshot.connection, query).totals
    if shown != totals.sums + totals.left_out:
        raise ExportDiffers(
            "the sums of the events differ from those that reports show; run a reconciliation"
        )


def _closed(snapshot: ExportSnapshot) -> dict[PeriodId, ClosedPeriod]:
    rows = snapshot.connection.execute(select(closed_periods)).mappings()
    return {each.period.id: each for each in (as_closed(dict(row)) for row in rows)}


def _digest(path: Path) -> tuple[str, int]:
    digest, num_bytes = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
            num_bytes += len(block)
    return digest.hexdigest(), num_bytes
