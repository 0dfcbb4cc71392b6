"""`footplate periods` and `footplate reconcile`: months that add up."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from footplate.platform.cli.client import AdminClient
from footplate.platform.cli.errors import CommandError
from footplate.platform.cli.show import AsJson, show_json, show_one, show_rows

period_commands = typer.Typer(help="List and close months, print statements.", no_args_is_help=True)

_Period = Annotated[str, typer.Argument(help="A month: 2026-11.")]
COLUMNS = ("id", "state", "begins_at", "ends_at", "closed_at", "totals.requests", "totals.cost")


@period_commands.command("list")
def list_periods(as_json: AsJson = False) -> None:
    """List months, from the first that has any use."""
    with AdminClient() as admin:
        show_rows(admin.rows("/periods"), COLUMNS, as_json=as_json)


@period_commands.command()
def close(period: _Period, as_json: AsJson = False) -> None:
    """Close a month for good: what comes late counts in the next one, as an adjustment."""
    with AdminClient() as admin:
        show_one(admin.ask("POST", f"/periods/{period}/close"), as_json=as_json)


@period_commands.command()
def statement(
    period: _Period,
    tenant: Annotated[str, typer.Argument(help="A tenant's id or name.")],
    out: Annotated[Path, typer.Option(help="The HTML file to write; print it to have a PDF.")],
) -> None:
    """Write what a tenant owes for a month, as one page."""
    with AdminClient() as admin:
        page = b"".join(admin.download(f"/periods/{period}/statements/{admin.tenant_id(tenant)}"))
    try:
        out.write_bytes(page)
    except OSError as error:
        raise CommandError(f"{out}: {error.strerror}") from error
    print(out)


def reconcile(
    begin: Annotated[
        str | None, typer.Option("--from", help="A date, or an RFC 3339 time; this month when left out.")
    ] = None,
    end: Annotated[
        str | None, typer.Option("--to", help="Up to and without; the end of today when left out.")
    ] = None,
    timezone: Annotated[str | None, typer.Option(help="What days are.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare the ledger with engines, reservations and itself; ends with 1 if a difference has no reason."""
    with AdminClient() as admin:
        query = {"from": begin, "to": end, "timezone": timezone}
        found: dict[str, Any] = admin.ask("GET", "/reconciliation", **query)
    if as_json:
        show_json(found)
    else:
        _show(found)
    if found["state"] == "differs":
        listed = sum(found["counts"].values()) - len(found["explained"])
        raise CommandError(f"{listed} differences have no reason; they are listed above")


def _show(found: dict[str, Any]) -> None:
    engines, reservations, backlog = (found[name] or {} for name in ("engines", "reservations", "backlog"))
    facts = {
        "state": found["state"],
        **{f"ledger {name}".replace("_", " "): value for name, value in found["ledger"].items()},
        **{f"engines {name}".replace("_", " "): value for name, value in engines.items()},
        **{f"reservations {name}": value for name, value in reservations.items()},
        **{name.replace("_", " "): value for name, value in backlog.items()},
        **{f"found: {name}".replace("_", " "): value for name, value in found["counts"].items()},
    }
    show_one(facts, as_json=False)
    rows = [*found["unexplained"], *found["explained"]]
    if rows:
        show_rows(rows, ("kind", "subject", "ledger", "other", "explanation"), as_json=False)
    for name, is_there in found["sources"].items():
        if not is_there:
            print(f"{name} could not be asked", file=sys.stderr)
