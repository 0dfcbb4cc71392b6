"""What an export is asked for as, and what becomes of it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, NewType

from footplate.billing.errors import InvalidReport
from footplate.billing.reports import UsageFilter
from footplate.billing.time_ranges import TimeRange
from footplate.billing.usage import KeyId, ModelName, TenantId

ExportId = NewType("ExportId", str)
# An export that has said nothing for so long has lost its process.
SILENCE = timedelta(seconds=60)
KEPT = timedelta(days=7)
# What one sheet of a workbook can hold beside its head.
MAX_SHEET_ROWS = 1_048_575


class ExportFormat(StrEnum):
    """Kinds of file. `focus` is CSV with the columns of the FinOps Open Cost and Usage Specification."""

    CSV = "csv"
    PARQUET = "parquet"
    JSONL = "jsonl"
    XLSX = "xlsx"
    FOCUS = "focus"

    @property
    def suffix(self) -> str:
        """Of the file's name."""
        return ".csv" if self is ExportFormat.FOCUS else f".{self.value}"

    @property
    def is_for_spreadsheets(self) -> bool:
        """Whether a cell that looks like a formula might be run as one."""
        return self in (ExportFormat.CSV, ExportFormat.FOCUS, ExportFormat.XLSX)


class FocusVersion(StrEnum):
    """Versions of the specification that can be written."""

    V1_2 = "1.2"
    V1_4 = "1.4"


class ExportState(StrEnum):
    """How far an export has come."""

    QUEUED = "queued"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    # Its file was kept for `KEPT` and is gone.
    EXPIRED = "expired"


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """One file: whose use, of what time, in which form."""

    span: TimeRange
    format: ExportFormat = ExportFormat.CSV
    focus_version: FocusVersion = FocusVersion.V1_2
    filter: UsageFilter = field(default_factory=UsageFilter)

    @property
    def schema(self) -> str:
        """The name of the file's columns, which never change under it."""
        if self.format is ExportFormat.FOCUS:
            return f"FOCUS {self.focus_version}"
        return "footplate usage 1"

    def to_fields(self) -> dict[str, Any]:
        """To be stored."""
        return {
            "begin": self.span.begin.isoformat(),
            "end": self.span.end.isoformat(),
            "timezone": self.span.timezone,
            "format": self.format.value,
            "focus_version": self.focus_version.value,
            "filter": self.filter.fields(),
        }

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> ExportRequest:
        """What `to_fields` gave."""
        only = fields["filter"]
        tenant, key, model = (only.get(name) for name in ("tenant_id", "key_id", "model"))
        return cls(
            TimeRange(
                datetime.fromisoformat(fields["begin"]),
                datetime.fromisoformat(fields["end"]),
                fields["timezone"],
            ),
            ExportFormat(fields["format"]),
            FocusVersion(fields["focus_version"]),
            UsageFilter(
                None if tenant is None else TenantId(tenant),
                None if key is None else KeyId(key),
                None if model is None else ModelName(model),
            ),
        )


@dataclass(frozen=True, slots=True)
class Export:
    """A file that was asked for."""

    id: ExportId
    request: ExportRequest
    created_at: datetime
    created_by: str
    state: ExportState
    rows_done: int = 0
    rows_total: int | None = None
    # What stands beside the file; there once it is whole.
    sidecar: Mapping[str, Any] | None = None
    error: str | None = None
    updated_at: datetime | None = None

    @property
    def file_name(self) -> str:
        """As it is downloaded."""
        span = self.request.span.fields()
        days = f"{span['from'][:10]}-{span['to'][:10]}"
        kind = f"focus-{self.request.focus_version}" if self.request.format is ExportFormat.FOCUS else "usage"
        return f"{kind}-{days}{self.request.format.suffix}"

    def fields(self) -> dict[str, Any]:
        """As the API answers."""
        request = self.request
        is_focus = request.format is ExportFormat.FOCUS
        return {
            "id": self.id,
            "object": "export",
            "state": self.state.value,
            **request.span.fields(),
            "format": request.format.value,
            "focus_version": request.focus_version.value if is_focus else None,
            "filter": request.filter.fields(),
            "created_at": self.created_at.isoformat().replace("+00:00", "Z"),
            "created_by": self.created_by,
            "rows_done": self.rows_done,
            "rows_total": self.rows_total,
            "file_name": self.file_name,
            "sidecar": None if self.sidecar is None else dict(self.sidecar),
            "error": self.error,
        }


def refuse_long_sheet(export_format: ExportFormat, num_rows: int) -> None:
    """Raises InvalidReport when a workbook can't hold so many rows."""
    if export_format is ExportFormat.XLSX and num_rows > MAX_SHEET_ROWS:
        raise InvalidReport(
            f"the file would have {num_rows} rows, and a sheet of a workbook holds {MAX_SHEET_ROWS}; "
            "ask for csv or parquet, or for a shorter range",
            "format",
        )
