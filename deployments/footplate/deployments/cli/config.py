"""`footplate config check|schema`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from footplate.platform.settings import check_settings, settings_schema

config_commands = typer.Typer(
    help="Check a configuration file, or print what may stand in one.", no_args_is_help=True
)


@config_commands.command()
def check(
    file: Annotated[Path, typer.Argument(help="The YAML file.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the faults as JSON.")] = False,
) -> None:
    """Name each fault with its file, line and field; exit 1 when there is one."""
    _, faults = check_settings(file)
    if as_json:
        print(json.dumps([fault.as_dict() for fault in faults]))
    else:
        for fault in faults:
            typer.echo(str(fault), err=True)
        if not faults:
            print(f"{file}: good")
    if faults:
        raise typer.Exit(1)


@config_commands.command()
def schema() -> None:
    """Print the JSON schema of the configuration file."""
    print(json.dumps(settings_schema(), indent=2))
