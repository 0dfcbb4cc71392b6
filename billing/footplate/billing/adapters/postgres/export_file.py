"""Writes the file of an export from one snapshot, and proves it: its rows sum to what reports say."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sqlalchemy import select

from footplate.billing.adapters.postgres.books import Books
from footplate.billing.adapters.postgres.export_rows import ExportSnapshot, open_snapshot
from footplate.billing.adapters.postgres.period_store import as_closed
from footplate.billing.adapters.postgres.report_reader import PostgresReportReader
from footplate.billing.adapters.postgres.tables import closed_periods
from footplate.billing.errors import ExportDiffers
from footplate.billing.exports.columns import columns_of
from footplate.billing.exports.request import ExportRequest, refuse_long_sheet
from footplate.billing.exports.sidecar import ExportTotals, sidecar_fields
from footplate.billing.exports.writers import WorkbookWriter, open_writer
from footplate.billing.periods import ClosedPeriod, PeriodId
from footplate.billing.reports import ReportQuery

Progress = Callable[[int, int], None]
_READ_BYTES = 1 << 20


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
        with path.open("wb") as file:
            num_rows = _write(request, snapshot, closed, totals, path, file, progress)
        if num_rows != totals.num_rows:
            raise ExportDiffers(f"{num_rows} rows were written, and the events have {totals.num_rows}")
        periods = {each.period.id: each.period for each in snapshot.slices()}
        sha256, num_bytes = _digest(path)
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
    request: ExportRequest,
    snapshot: ExportSnapshot,
    closed: dict[PeriodId, ClosedPeriod],
    totals: ExportTotals,
    path: Path,
    file: Any,
    progress: Progress,
) -> int:
    writer = open_writer(request.format, path, file, columns_of(request), request.span.end)
    if isinstance(writer, WorkbookWriter):
        # Only the library itself may have it open.
        file.close()
    for piece in snapshot.slices():
        add = writer.add
        for line in snapshot.lines(piece, is_closed=piece.period.id in closed):
            add(line)
        progress(writer.num_rows, totals.num_rows)
    if isinstance(writer, WorkbookWriter):
        writer.flush()
        writer.add_totals({"rows": totals.num_rows, **totals.sums.fields()})
    writer.close()
    progress(writer.num_rows, totals.num_rows)
    return writer.num_rows


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
