"""How commands show what they got: a table for people, JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
# Without a terminal there is no width to keep to, and nothing may be cut off.
_WIDE = 10_000


def show_json(value: Any) -> None:
    """Print a value as JSON."""
    print(json.dumps(value, indent=2))


def show_rows(rows: Sequence[Mapping[str, Any]], columns: Iterable[str], *, as_json: bool) -> None:
    """Print rows, as JSON whole and as a table by columns; a column may be `actor.role`."""
    if as_json:
        show_json(list(rows))
        return
    names = list(columns)
    table = Table(*[name.rpartition(".")[2] for name in names], box=None, header_style="bold", pad_edge=False)
    for row in rows:
        table.add_row(*[_cell(_inner(row, name)) for name in names])
    _console().print(table)


def show_one(row: Mapping[str, Any], *, as_json: bool, leave_out: Sequence[str] = ("object",)) -> None:
    """Print one thing, a field a line."""
    if as_json:
        show_json(row)
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in row.items():
        if name not in leave_out:
            table.add_row(name, _cell(value))
    _console().print(table)


def _console() -> Console:
    return Console(
        width=None if sys.stdout.isatty() else _WIDE, highlight=False, markup=False, soft_wrap=True
    )


def _inner(row: Mapping[str, Any], name: str) -> Any:
    value: Any = row
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _cell(value: Any) -> str:
    if value is None or value == {}:
        return "-"
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={_cell(inner)}" for name, inner in value.items())
    if isinstance(value, list):
        return ", ".join(map(_cell, value)) or "none"
    return str(value)
