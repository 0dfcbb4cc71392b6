"""`footplate usage`: who used what, as a table or as a file that adds up."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from footplate.billing.exports.request import ExportFormat, FocusVersion
from footplate.platform.cli.client import AdminClient
from footplate.platform.cli.errors import CommandError
from footplate.platform.cli.show import AsJson, show_json, show_rows

usage_commands = typer.Typer(help="Report use, and export it.", no_args_is_help=True)

_From = Annotated[
    str | None, typer.Option("--from", help="A date, or an RFC 3339 time; this month when left out.")
]
_To = Annotated[str | None, typer.Option("--to", help="Up to and without; the end of today when left out.")]
_Zone = Annotated[
    str | None,
    typer.Option("--timezone", help="What days are; when left out the tenant's zone, or that of the books."),
]
_Tenant = Annotated[str | None, typer.Option(help="Only this tenant's (id or name).")]
SUMS = ("requests", "input_tokens", "cached_input_tokens", "output_tokens", "total_tokens", "cost")
POLL_S = 0.3
_BLOCK = 1 << 20


@usage_commands.command()
def report(
    begin: _From = None,
    end: _To = None,
    group_by: Annotated[
        str,
        typer.Option(
            help="With commas: tenant, key, model, requested_model, class, day, hour, cost_center, label:X."
        ),
    ] = "tenant,model",
    timezone: _Zone = None,
    tenant: _Tenant = None,
    model: Annotated[str | None, typer.Option(help="Only this served model's.")] = None,
    as_json: AsJson = False,
) -> None:
    """Sum use by any grouping; the last line is the total of all rows."""
    with AdminClient() as admin:
        query = {
            "from": begin,
            "to": end,
            "timezone": timezone,
            "group_by": group_by,
            "tenant_id": None if tenant is None else admin.tenant_id(tenant),
            "model": model,
        }
        found = _all_pages(admin, query)
    if as_json:
        show_json(found)
        return
    first = found["group_by"][0] if found["group_by"] else "total"
    columns = (*(found["group_by"] or ("total",)), *SUMS)
    show_rows([*found["data"], {first: "TOTAL", **found["totals"]}], columns, as_json=False)
    note = f"{found['from']} up to {found['to']} ({found['timezone']}), cost in {found['currency']}"
    if found["unpriced_requests"]:
        note += f"; {found['unpriced_requests']} requests have no price yet and are in no cost"
    print(note, file=sys.stderr)


@usage_commands.command()
def export(
    out: Annotated[Path, typer.Option(help="The file to write; FILE.json beside it holds the totals.")],
    begin: _From = None,
    end: _To = None,
    kind: Annotated[ExportFormat, typer.Option("--format", help="What kind of file.")] = ExportFormat.CSV,
    focus_version: Annotated[FocusVersion, typer.Option(help="Of the format focus.")] = FocusVersion.V1_2,
    timezone: _Zone = None,
    tenant: _Tenant = None,
    as_json: AsJson = False,
) -> None:
    """Write a file of every request, its tokens by class, prices and costs, and its totals beside it.

    The file is checked against the totals before it gets its name.
    """
    if not out.parent.is_dir():
        raise CommandError(f"{out.parent} is no folder; make it first")
    with AdminClient() as admin:
        body = {
            "from": begin,
            "to": end,
            "timezone": timezone,
            "format": kind.value,
            "focus_version": focus_version.value,
            "tenant_id": None if tenant is None else admin.tenant_id(tenant),
        }
        made = admin.ask(
            "POST", "/exports", {name: value for name, value in body.items() if value is not None}
        )
        sidecar = _await(admin, made["id"])
        _fetch(admin, made["id"], out, sidecar)
    beside = out.with_name(out.name + ".json")
    beside.write_text(json.dumps(sidecar, indent=2) + "\n", "utf-8")
    if as_json:
        show_json(sidecar)
        return
    totals = sidecar["control_totals"]
    print(
        f"{out}: {sidecar['rows']} rows, {totals['requests']} requests, "
        f"{totals['cost']} {sidecar['currency']}"
    )
    left_out = sidecar["left_out_for_want_of_a_price"]["requests"]
    if left_out:
        print(f"{left_out} requests have no price yet and are not in the file", file=sys.stderr)


def _all_pages(admin: AdminClient, query: dict[str, Any]) -> dict[str, Any]:
    """A report with the rows of all its pages, and the totals of the last."""
    found: dict[str, Any] = admin.ask("GET", "/usage", limit=10_000, **query)
    rows = found["data"]
    while found["next"] is not None:
        found = admin.ask("GET", "/usage", limit=10_000, after=found["next"], **query)
        rows += found["data"]
    return {**found, "data": rows}


def _await(admin: AdminClient, export_id: str) -> dict[str, Any]:
    """What stands beside the file once it is whole. Raises CommandError when it fails."""
    with _bar() as progress:
        task = progress.add_task("rows", total=None)
        while True:
            found = admin.ask("GET", f"/exports/{export_id}")
            progress.update(task, total=found["rows_total"], completed=found["rows_done"])
            if found["state"] == "completed":
                return dict(found["sidecar"])
            if found["state"] not in ("queued", "running"):
                raise CommandError(
                    f"the export {export_id} {found['state']}: {found['error'] or 'ask again'}"
                )
            time.sleep(POLL_S)


def _fetch(admin: AdminClient, export_id: str, out: Path, sidecar: dict[str, Any]) -> None:
    """Load the file, check it, and only then give it its name."""
    partial = out.with_name(out.name + ".partial")
    digest = hashlib.sha256()
    try:
        with partial.open("wb") as file, _bar() as progress:
            task = progress.add_task("bytes", total=sidecar["bytes"])
            for block in admin.download(f"/exports/{export_id}/file", _BLOCK):
                file.write(block)
                digest.update(block)
                progress.advance(task, len(block))
        if digest.hexdigest() != sidecar["sha256"]:
            raise CommandError("the file that came is not the one that was written; try again")
        os.replace(partial, out)
    except OSError as error:
        raise CommandError(f"{out}: {error.strerror}") from error
    finally:
        partial.unlink(missing_ok=True)


def _bar() -> Progress:
    """On standard error, and only where somebody watches it."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
