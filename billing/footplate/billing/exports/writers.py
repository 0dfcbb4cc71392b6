"""Files from lines of CSV: as they are, or as JSON lines, Parquet or a workbook. Memory does not grow.

The database makes the lines, so every format shows the same values. No value holds a line break.
"""

from __future__ import annotations

import csv
import io
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import IO, Any

import msgspec

from footplate.billing.exports.columns import Column, ColumnKind
from footplate.billing.exports.request import ExportFormat

# Rows of one group of a Parquet file, and of one turn of every other writer.
BLOCK_ROWS = 65_536


class FileWriter(ABC):
    """Takes lines and writes a file; `close` makes it whole."""

    def __init__(self, columns: Sequence[Column]) -> None:
        self._columns = columns
        self._lines: list[bytes] = []
        self.num_rows = 0

    def add(self, line: bytes) -> None:
        """One row."""
        self._lines.append(line)
        if len(self._lines) == BLOCK_ROWS:
            self.flush()

    def flush(self) -> None:
        """Write what was added."""
        if self._lines:
            self.num_rows += len(self._lines)
            self._write(b"".join(self._lines))
            self._lines.clear()

    def close(self) -> None:
        """Make the file whole."""
        self.flush()
        self._finish()

    def _values(self, block: bytes) -> Iterator[list[str]]:
        return csv.reader(io.StringIO(block.decode(), newline=""))

    @abstractmethod
    def _write(self, block: bytes) -> None: ...

    @abstractmethod
    def _finish(self) -> None: ...


class CsvWriter(FileWriter):
    """UTF-8, commas, one head line, `\\n` at the end of each."""

    def __init__(self, file: IO[bytes], columns: Sequence[Column]) -> None:
        super().__init__(columns)
        self._file = file
        file.write(",".join(column.name for column in columns).encode() + b"\n")

    def _write(self, block: bytes) -> None:
        self._file.write(block)

    def _finish(self) -> None:
        self._file.flush()


class JsonLinesWriter(FileWriter):
    """One object a line. Decimals are texts: a JSON number would be read as a float."""

    def __init__(self, file: IO[bytes], columns: Sequence[Column]) -> None:
        super().__init__(columns)
        self._file = file
        self._names = [column.name for column in columns]
        self._nulls = {index for index, column in enumerate(columns) if column.is_nullable}
        self._integers = [index for index, column in enumerate(columns) if column.kind is ColumnKind.INTEGER]
        self._flags = [index for index, column in enumerate(columns) if column.kind is ColumnKind.FLAG]
        self._encoder = msgspec.json.Encoder()

    def _write(self, block: bytes) -> None:
        encode, names = self._encoder.encode, self._names
        out = []
        for values in self._values(block):
            row: list[Any] = values
            for index in self._nulls:
                if row[index] == "":
                    row[index] = None
            for index in self._integers:
                if row[index] is not None:
                    row[index] = int(row[index])
            for index in self._flags:
                row[index] = row[index] == "true"
            out.append(encode(dict(zip(names, row, strict=True))))
        out.append(b"")
        self._file.write(b"\n".join(out))

    def _finish(self) -> None:
        self._file.flush()


class ParquetWriter(FileWriter):
    """Decimals as decimal128(38, 12), moments as microseconds in UTC; zstd."""

    def __init__(self, file: IO[bytes], columns: Sequence[Column]) -> None:
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

    def _write(self, block: bytes) -> None:
        table = self._read(io.BytesIO(block), **self._options).cast(self._schema)
        self._file.write_table(table, row_group_size=BLOCK_ROWS)

    def _finish(self) -> None:
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

    def _write(self, block: bytes) -> None:
        sheet, formats = self._sheet, self._formats
        kinds = [column.kind for column in self._columns]
        for values in self._values(block):
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
    export_format: ExportFormat, path: Path, file: IO[bytes], columns: Sequence[Column], made_for: datetime
) -> FileWriter:
    """The writer of a format. `file` is `path`, open; the workbook opens it by itself."""
    if export_format is ExportFormat.XLSX:
        return WorkbookWriter(path, columns, made_for)
    kinds = {ExportFormat.JSONL: JsonLinesWriter, ExportFormat.PARQUET: ParquetWriter}
    kind = kinds.get(export_format, CsvWriter)
    return kind(file, columns)
