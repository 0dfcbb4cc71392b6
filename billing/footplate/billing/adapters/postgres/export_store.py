"""Exports in PostgreSQL, and the work of writing them; see `ExportStore`."""

from __future__ import annotations

import os
import secrets
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import RowMapping, insert, select, update

from footplate.billing.adapters.postgres.books import Books, reading, writing
from footplate.billing.adapters.postgres.export_file import write_export
from footplate.billing.adapters.postgres.tables import exports
from footplate.billing.errors import BillingError, NotFound
from footplate.billing.exports.request import (
    KEPT,
    SILENCE,
    Export,
    ExportId,
    ExportRequest,
    ExportState,
)

PROGRESS_S = 1.0
_PARTIAL = ".partial"
_UNFINISHED = (ExportState.QUEUED, ExportState.RUNNING)
_INTERRUPTED = "the process that wrote it ended; ask for it again"


class PostgresExportStore:
    """Safe from any thread. Files lie in `folder`, which all processes that serve them must share."""

    def __init__(self, books: Books, folder: Path) -> None:
        self._books = books
        self._folder = folder

    def add(self, request: ExportRequest, *, created_by: str) -> Export:
        """As `ExportStore.add`."""
        now = self._books.clock()
        values = {
            "id": f"exp_{secrets.token_hex(12)}",
            "request": request.to_fields(),
            "created_at": now,
            "created_by": created_by,
            "state": ExportState.QUEUED.value,
            "updated_at": now,
        }
        with writing(self._books.engine) as connection:
            row = connection.execute(insert(exports).values(values).returning(exports)).mappings().one()
        return self._shown(row)

    def find(self, export_id: str) -> Export:
        """As `ExportStore.find`."""
        with reading(self._books.engine) as connection:
            row = connection.execute(select(exports).where(exports.c.id == export_id)).mappings().first()
        if row is None:
            raise NotFound("there is no such export")
        return self._shown(row)

    def file_of(self, export: Export) -> Path:
        """As `ExportStore.file_of`."""
        path = self._path(export)
        if export.state is not ExportState.COMPLETED or not path.exists():
            why = export.error or f"it is {export.state.value}"
            raise NotFound(f"the export has no file: {why}")
        return path

    def run(self, export_id: ExportId) -> None:
        """Write the file of an export; what goes wrong stands in its row afterwards."""
        self._forget_old()
        export = self.find(export_id)
        if export.state is not ExportState.QUEUED:
            return
        path = self._path(export)
        partial = path.with_name(path.name + _PARTIAL)
        self._note(export_id, state=ExportState.RUNNING.value)
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            sidecar = write_export(self._books, export.request, partial, self._progress(export_id))
            os.replace(partial, path)
            self._note(export_id, state=ExportState.COMPLETED.value, sidecar=sidecar)
        except (BillingError, OSError) as error:
            # Of a system's fault only its kind: its text may name files.
            told = str(error) if isinstance(error, BillingError) else error.strerror or "a fault of the disk"
            self._note(export_id, state=ExportState.FAILED.value, error=told)
        except BaseException:
            self._note(export_id, state=ExportState.FAILED.value, error="the server failed to write it")
            raise
        finally:
            partial.unlink(missing_ok=True)

    def _progress(self, export_id: ExportId) -> Any:
        last = 0.0

        def note(done: int, total: int) -> None:
            nonlocal last
            if time.monotonic() - last >= PROGRESS_S or done == total:
                last = time.monotonic()
                self._note(export_id, rows_done=done, rows_total=total)

        return note

    def _note(self, export_id: ExportId, **values: Any) -> None:
        with writing(self._books.engine) as connection:
            change = update(exports).where(exports.c.id == export_id)
            connection.execute(change.values(updated_at=self._books.clock(), **values))

    def _forget_old(self) -> None:
        """Remove files that were kept long enough."""
        old = (exports.c.state == ExportState.COMPLETED.value) & (
            exports.c.updated_at < self._books.clock() - KEPT
        )
        with reading(self._books.engine) as connection:
            rows = connection.execute(select(exports).where(old)).mappings().all()
        for row in rows:
            export = self._shown(row)
            self._path(export).unlink(missing_ok=True)
            self._note(export.id, state=ExportState.EXPIRED.value)

    def _path(self, export: Export) -> Path:
        return self._folder / f"{export.id}{export.request.format.suffix}"

    def _shown(self, row: RowMapping) -> Export:
        state, error = ExportState(row["state"]), row["error"]
        updated_at: datetime = row["updated_at"].astimezone(UTC)
        if state is ExportState.RUNNING and self._books.clock() - updated_at > SILENCE:
            state, error = ExportState.FAILED, _INTERRUPTED
        return Export(
            ExportId(row["id"]),
            ExportRequest.from_fields(row["request"]),
            row["created_at"].astimezone(UTC),
            row["created_by"],
            state,
            row["rows_done"],
            row["rows_total"],
            row["sidecar"],
            error,
            updated_at,
        )
