"""Inserts of many rows in one statement.

Rows travel as one text for each column, an array that the server unpacks. The driver's own dumping of lists
looks at every value by itself in Python, and takes longer than all the rest of a commit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from typing import Any

import psycopg

from footplate.billing.adapters.postgres.tables import SCHEMA

Driver = psycopg.Connection[Any]


class BulkInsert:
    """`insert … select from unnest`, in the order of the rows given; `tail` is what follows it."""

    def __init__(self, table: str, columns: Mapping[str, str], *, tail: str = "") -> None:
        self._kinds = tuple(columns.values())
        self._returns = "returning" in tail
        casts = ", ".join(f"%s::{kind}[]" for kind in self._kinds)
        self._query = (
            f"insert into {SCHEMA}.{table} ({', '.join(columns)}) select * from unnest({casts}) {tail}"
        )

    def run(self, driver: Driver, rows: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
        """What the tail returns, if it returns anything."""
        if not rows:
            return []
        columns = zip(self._kinds, zip(*rows, strict=True), strict=True)
        cursor = driver.execute(self._query, [array_text(kind, column) for kind, column in columns])
        return cursor.fetchall() if self._returns else []


def array_text(kind: str, values: Iterable[Any]) -> str:
    """An array of PostgreSQL as text."""
    if kind in ("text", "jsonb"):
        return "{" + ",".join(map(_quoted, values)) + "}"
    if kind == "bytea":
        return "{" + ",".join(f'"\\\\x{value.hex()}"' for value in values) + "}"
    if kind in ("timestamptz", "date"):
        return "{" + ",".join(map(_moment_text, values)) + "}"
    return "{" + ",".join(map(str, values)) + "}"  # numbers and booleans


def _quoted(value: str | None) -> str:
    if value is None:
        return "NULL"
    if "\\" in value or '"' in value:
        value = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{value}"'


def _moment_text(value: date | None) -> str:
    return "NULL" if value is None else value.isoformat()
