"""How the values of a row stand in a line of text: as CSV, or as a JSON object. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import msgspec

from footplate.billing.exports.columns import Column, ColumnKind

# Spreadsheets of East Asia take the wide signs for the plain ones.
_FORMULAS = ("=", "+", "-", "@", "\t", "\r", "\uff1d", "\uff0b", "\uff0d", "\uff20")


class LineForm(ABC):
    """Writes cells so that they can be put together to a line."""

    @abstractmethod
    def constant(self, column: Column, text: str | None) -> str:
        """A value that is known beforehand."""

    @abstractmethod
    def place(self, column: Column, value: str) -> str:
        """A value that is known later: a text as `text` gives it, anything else as it is."""

    @abstractmethod
    def text(self, text: str | None) -> str:
        """A text, to be put in."""

    @abstractmethod
    def line(self, columns: Sequence[Column], cells: Sequence[str]) -> str:
        """Cells put together, with the line's end."""


class CsvForm(LineForm):
    """Commas; quotes where they are needed. An empty text has quotes, no value at all has none."""

    def constant(self, column: Column, text: str | None) -> str:
        """As `LineForm.constant`."""
        return self.text(text)

    def place(self, column: Column, value: str) -> str:
        """As `LineForm.place`."""
        return value

    def text(self, text: str | None) -> str:
        """As `LineForm.text`."""
        if text is None:
            return ""
        if text and not any(sign in text for sign in ',"\n\r'):
            return text
        doubled = text.replace('"', '""')
        return f'"{doubled}"'

    def line(self, columns: Sequence[Column], cells: Sequence[str]) -> str:
        """As `LineForm.line`."""
        return ",".join(cells) + "\n"


class JsonForm(LineForm):
    """One object a line. Decimals are texts: a JSON number would be read as a float."""

    def constant(self, column: Column, text: str | None) -> str:
        """As `LineForm.constant`."""
        if text is None or (column.is_nullable and not text):
            return "null"
        if column.kind in (ColumnKind.INTEGER, ColumnKind.FLAG):
            return text
        return self.text(text)

    def place(self, column: Column, value: str) -> str:
        """As `LineForm.place`."""
        return f'"{value}"' if column.kind in (ColumnKind.DECIMAL, ColumnKind.MOMENT) else value

    def text(self, text: str | None) -> str:
        """As `LineForm.text`."""
        return msgspec.json.encode(text).decode()

    def line(self, columns: Sequence[Column], cells: Sequence[str]) -> str:
        """As `LineForm.line`."""
        named = (f"{self.text(each.name)}:{cell}" for each, cell in zip(columns, cells, strict=True))
        return f"{{{','.join(named)}}}\n"


def safe_text(text: str) -> str:
    """A text that no spreadsheet runs as a formula."""
    return f"'{text}" if text.startswith(_FORMULAS) else text


def decimal_12(pico: str) -> str:
    """A whole number of 10⁻¹² as a decimal with twelve digits behind the point, always."""
    if pico[0] == "-":
        return f"-{decimal_12(pico[1:])}"
    if len(pico) <= 12:
        return "0." + pico.zfill(12)
    return f"{pico[:-12]}.{pico[-12:]}"
