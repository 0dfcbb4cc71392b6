"""`footplate prices`: the price book."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from footplate.billing.errors import InvalidPrice
from footplate.billing.price_import import from_csv, from_yaml
from footplate.billing.prices import PriceList
from footplate.platform.cli.client import AdminClient
from footplate.platform.cli.errors import CommandError
from footplate.platform.cli.show import AsJson, show_json, show_one, show_rows

price_commands = typer.Typer(
    help="Import, list and show prices; see what new ones would change.", no_args_is_help=True
)

_File = Annotated[Path, typer.Argument(help="A YAML file, or CSV with model,input,cached_input,output.")]
_From = Annotated[str | None, typer.Option(help="When the prices of a CSV file begin: 2026-12-01T00:00:00Z.")]
_Currency = Annotated[str | None, typer.Option(help="Of a CSV file, such as USD.")]
_Multiplier = Annotated[
    str | None, typer.Option(help="Of a CSV file: what a token in a batch costs of its price.")
]
COLUMNS = ("id", "effective_from", "currency", "num_models", "batch_multiplier", "is_in_force", "imported_at")


@price_commands.command("import")
def import_prices(
    file: _File,
    effective_from: _From = None,
    currency: _Currency = None,
    batch_multiplier: _Multiplier = None,
    as_json: AsJson = False,
) -> None:
    """Add a version of the price book; a price is never edited, only followed by another."""
    prices = _read(file, effective_from, currency, batch_multiplier)
    with AdminClient() as admin:
        made = admin.ask("POST", "/prices", prices.fields())
        show_json(made) if as_json else print(f"prices of {made['effective_from']} are version {made['id']}")


@price_commands.command("list")
def list_prices(as_json: AsJson = False) -> None:
    """List all versions."""
    with AdminClient() as admin:
        rows = admin.rows("/prices")
        shown = rows if as_json else [{**row, "num_models": len(row["models"])} for row in rows]
        show_rows(shown, COLUMNS, as_json=as_json)


@price_commands.command()
def show(
    version: Annotated[
        str | None, typer.Argument(help="A version's number; the one in force when left out.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show one version, by model, for a million tokens."""
    with AdminClient() as admin:
        found = admin.ask("GET", f"/prices/{version}") if version is not None else _in_force(admin)
    if as_json:
        show_json(found)
        return
    show_one({name: value for name, value in found.items() if name != "models"}, as_json=False)
    rows = [{"model": name, **prices} for name, prices in found["models"].items()]
    show_rows(rows, ("model", "input", "cached_input", "output"), as_json=False)


@price_commands.command()
def diff(
    file: _File,
    effective_from: _From = None,
    currency: _Currency = None,
    batch_multiplier: _Multiplier = None,
    as_json: AsJson = False,
) -> None:
    """Say what a file would change against the prices that it would follow. Changes nothing."""
    prices = _read(file, effective_from, currency, batch_multiplier)
    with AdminClient() as admin:
        found = admin.ask("POST", "/prices/preview", {"prices": prices.fields()})
    show_rows(found["changes"], ("kind", "model", "token_class", "before", "after"), as_json=as_json)


@price_commands.command()
def simulate(
    file: _File,
    period: Annotated[str, typer.Option(help="The month whose use is priced anew: 2026-11.")],
    effective_from: _From = None,
    currency: _Currency = None,
    batch_multiplier: _Multiplier = None,
    as_json: AsJson = False,
) -> None:
    """Say what a month would have cost by the prices of a file. Changes nothing."""
    prices = _read(file, effective_from, currency, batch_multiplier)
    with AdminClient() as admin:
        body = {"prices": prices.fields(), "period": period}
        found: dict[str, Any] = admin.ask("POST", "/prices/preview", body)["simulation"]
    if as_json:
        show_json(found)
        return
    by_model = found.pop("by_model")
    show_one(found, as_json=False)
    show_rows(
        [{"model": name, "cost": cost} for name, cost in by_model.items()], ("model", "cost"), as_json=False
    )


def _in_force(admin: AdminClient) -> dict[str, Any]:
    for row in admin.rows("/prices"):
        if row["is_in_force"]:
            return row
    raise CommandError("no prices are in force; 'footplate prices import FILE' adds some")


def _read(file: Path, effective_from: str | None, currency: str | None, multiplier: str | None) -> PriceList:
    """A price list from a file. Raises CommandError, or BadParameter for options that don't fit the file."""
    try:
        text = file.read_text("utf-8")
    except OSError as error:
        raise CommandError(f"{file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CommandError(f"{file} is not UTF-8") from error
    try:
        if file.suffix.lower() != ".csv":
            if effective_from or currency or multiplier:
                raise typer.BadParameter("a YAML file says by itself when it begins, and in which currency")
            return from_yaml(text)
        if effective_from is None or currency is None:
            raise typer.BadParameter("a CSV file wants --effective-from and --currency")
        return from_csv(
            text, effective_from=effective_from, currency=currency, batch_multiplier=multiplier or "1"
        )
    except InvalidPrice as error:
        where = f"{error.field}: " if error.field else ""
        raise CommandError(f"{file}: {where}{error}") from error
