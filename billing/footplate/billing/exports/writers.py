"""Files from lines of text: as they are, or as Parquet or a workbook. Memory does not grow.

Parquet and workbooks are made from the lines of CSV, so every format shows the same values. No value holds a
line break.
"""

from __future__ import annotations

import csv
import io
from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Protocol

from footplate.billing.exports.cells import CsvForm, JsonForm, LineForm
from footplate.billing.exports.columns import Column, ColumnKind
from footplate.billing.exports.request import ExportFormat

# Rows of one group of a Parquet file.
GROUP_ROWS = 65_536


class Sink(Protocol):
    """Where bytes go."""

    def write(self, data: bytes, /) -> int:
        """All of them."""
        ...

    def flush(self) -> None:
        """Let nothing wait in memory."""
        ...


class FileWriter(ABC):
    """Takes lines and writes a file; `close` makes it whole."""

    def __init__(self, columns: Sequence[Column]) -> None:
        self._columns = columns
        self.num_rows = 0

    @property
    def form(self) -> LineForm:
        """How it wants its lines."""
        return CsvForm()

    def add(self, lines: Sequence[str]) -> None:
        """Some rows, each a line with its end."""
        self.num_rows += len(lines)
        self._write(lines)

    def close(self) -> None:
        """Make the file whole."""
        self._finish()

    @abstractmethod
    def _write(self, lines: Sequence[str]) -> None: ...

    @abstractmethod
    def _finish(self) -> None: ...


class CsvWriter(FileWriter):
    """UTF-8, commas, one head line, `\\n` at the end of each."""

    def __init__(self, file: Sink, columns: Sequence[Column]) -> None:
        super().__init__(columns)
        self._file = file
        file.write(",".join(column.name for column in columns).encode() + b"\n")

    def _write(self, lines: Sequence[str]) -> None:
        self._file.write("".join(lines).encode())

    def _finish(self) -> None:
        self._file.flush()


class JsonLinesWriter(FileWriter):
    """One object a line."""

    def __init__(self, file: Sink, columns: Sequence[Column]) -> None:
        super().__init__(columns)
        self._file = file

    @property
    def form(self) -> LineForm:
        """As `FileWriter.form`."""
        return JsonForm()

    def _write(self, lines: Sequence[str]) -> None:
        self._file.write("".join(lines).encode())

    def _finish(self) -> None:
        self._file.flush()


class ParquetWriter(FileWriter):
    """Decimals as decimal128(38, 12), moments as microseconds in UTC; zstd."""

    def __init__(self, file: Sink, columns: Sequence[Column]) -> None:
        super().__init__(columns)
        # A tenth of a second to load, for this format alone.
        import pyarrow as arrow
        import pyarrow.csv as arrow_csv
        import pyarrow.parquet as parquet

        kinds = {
            ColumnKind.TEXT: arrow.string(),
            ColumnKind.INTEGER: arrow.int64(),
            ColumnKind.DECIMAL: arrow.decimal128(38, 12),
            ColumnKind.MOMENT: arrow.timestamp("us", "UTC"),
            ColumnKind.FLAG: arrow.bool_(),
        }
        fields = [arrow.field(each.name, kinds[each.kind], each.is_nullable) for each in columns]
        self._schema = arrow.schema(fields)
        self._read = arrow_csv.read_csv
        self._options = {
            "read_options": arrow_csv.ReadOptions(
                column_names=[each.name for each in columns], block_size=1 << 26, use_threads=False
            ),
            "convert_options": arrow_csv.ConvertOptions(
                column_types={field.name: field.type for field in fields},
                strings_can_be_null=True,
                quoted_strings_can_be_null=False,
                null_values=[""],
                true_values=["true"],
                false_values=["false"],
            ),
        }
        self._file = parquet.ParquetWriter(file, self._schema, compression="zstd")
        self._lines: list[str] = []

    def _write(self, lines: Sequence[str]) -> None:
        # Groups end at the same rows however many lines come at a time: the same file for the same rows.
        self._lines += lines
        while len(self._lines) >= GROUP_ROWS:
            self._write_group(self._lines[:GROUP_ROWS])
            del self._lines[:GROUP_ROWS]

    def _write_group(self, lines: Sequence[str]) -> None:
        block = io.BytesIO("".join(lines).encode())
        table = self._read(block, **self._options).cast(self._schema)
        self._file.write_table(table, row_group_size=GROUP_ROWS)

    def _finish(self) -> None:
        if self._lines:
            self._write_group(self._lines)
        self._file.close()


class WorkbookWriter(FileWriter):
    """One sheet of rows. Costs are numbers, which a workbook keeps to 15 digits; totals stand as text."""

    def __init__(self, path: Path, columns: Sequence[Column], made_for: datetime) -> None:
        super().__init__(columns)
        import xlsxwriter

        self._book = xlsxwriter.Workbook(
            str(path),
            {
                "constant_memory": True,
                "strings_to_numbers": False,
                "strings_to_formulas": False,
                "strings_to_urls": False,
                "tmpdir": str(path.parent),
            },
        )
        # The same file for the same rows: nothing in it says when it was made.
        self._book.set_properties({"created": made_for.replace(tzinfo=None)})
        self._sheet = self._book.add_worksheet("usage")
        self._sheet.freeze_panes(1, 0)
        bold = self._book.add_format({"bold": True})
        for index, column in enumerate(columns):
            self._sheet.write_string(0, index, column.name, bold)
        self._row = 1
        self._formats = {
            ColumnKind.DECIMAL: self._book.add_format({"num_format": "0.00##########"}),
            ColumnKind.INTEGER: self._book.add_format({"num_format": "0"}),
        }

    def add_totals(self, totals: dict[str, int | str]) -> None:
        """A second sheet with the control totals, exactly."""
        sheet = self._book.add_worksheet("control totals")
        for index, (name, value) in enumerate(totals.items()):
            sheet.write_string(index, 0, name)
            sheet.write_string(index, 1, str(value))

    def _write(self, lines: Sequence[str]) -> None:
        sheet, formats = self._sheet, self._formats
        kinds = [column.kind for column in self._columns]
        for values in csv.reader(lines):
            for index, value in enumerate(values):
                if not value:
                    continue
                number_format = formats.get(kinds[index])
                if number_format is None:
                    sheet.write_string(self._row, index, value)
                else:
                    sheet.write_number(self._row, index, float(value), number_format)
            self._row += 1

    def _finish(self) -> None:
        self._book.close()


def open_writer(
    export_format: ExportFormat, path: Path, file: Sink, columns: Sequence[Column], made_for: datetime
) -> FileWriter:
    """The writer of a format. `file` is `path`, open; the workbook opens it by itself."""
    if export_format is ExportFormat.XLSX:
        return WorkbookWriter(path, columns, made_for)
    kinds = {ExportFormat.JSONL: JsonLinesWriter, ExportFormat.PARQUET: ParquetWriter}
    kind = kinds.get(export_format, CsvWriter)
    return kind(file, columns)
