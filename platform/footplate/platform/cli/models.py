"""`footplate models`: what is served, and what adds, reloads and removes a model."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer
import yaml

from footplate.platform.cli.client import AdminClient
from footplate.platform.cli.errors import CommandError
from footplate.platform.cli.show import AsJson, show_one, show_rows

model_commands = typer.Typer(help="Add, list, reload and remove models.", no_args_is_help=True)

COLUMNS = ("id", "state", "generation", "serving_generation", "num_replicas", "origin", "source", "reason")
LOOK_S = 0.25
_Name = Annotated[str, typer.Argument(help="The model's name.")]
_Wait = Annotated[
    float, typer.Option("--wait", help="Seconds to wait until it serves; 0: return at once.", min=0)
]


@model_commands.command("list")
def list_models(as_json: AsJson = False) -> None:
    """List all models, those that don't serve too."""
    with AdminClient() as admin:
        show_rows(admin.rows("/models"), COLUMNS, as_json=as_json)


@model_commands.command()
def add(
    name: Annotated[str, typer.Argument(help="What clients send as the model.")],
    source: Annotated[str, typer.Argument(help="gguf:/path, hf:/folder, package:NAME, dummy:/config.json.")],
    alias: Annotated[list[str] | None, typer.Option(help="Another name; any number of times.")] = None,
    chat_template: Annotated[
        str | None, typer.Option(help="A Jinja file, in place of the template in the weights.")
    ] = None,
    engine: Annotated[
        list[str] | None, typer.Option(help="OPTION=VALUE of the engine; any number of times.")
    ] = None,
    replicas: Annotated[int, typer.Option(help="How many.", min=1)] = 1,
    wait: _Wait = 600,
    as_json: AsJson = False,
) -> None:
    """Serve a model, or another version of one that was added."""
    body = {
        "name": name,
        "source": _whole_source(source),
        "aliases": alias or [],
        "chat_template": None if chat_template is None else _whole(chat_template),
        "engine": _options(engine),
        "replicas": {"min": replicas},
    }
    with AdminClient() as admin:
        _finish(admin, admin.ask("POST", "/models", body), wait, as_json)


@model_commands.command()
def reload(name: _Name, wait: _Wait = 600, as_json: AsJson = False) -> None:
    """Start a model anew from its files, without a gap."""
    with AdminClient() as admin:
        _finish(admin, admin.ask("POST", f"{_path(name)}/reload"), wait, as_json)


@model_commands.command()
def remove(name: _Name, as_json: AsJson = False) -> None:
    """Serve a model no longer; its open answers end by themselves."""
    with AdminClient() as admin:
        show_one(admin.ask("DELETE", _path(name)), as_json=as_json)


def _finish(admin: AdminClient, model: dict[str, Any], wait_s: float, as_json: bool) -> None:
    """Show a model once it serves. Raises CommandError for one that can't start, or doesn't in time."""
    end = time.monotonic() + wait_s
    asked = model["generation"]
    while model["state"] in ("starting", "updating") and time.monotonic() < end:
        time.sleep(LOOK_S)
        model = admin.ask("GET", _path(model["id"]))
        if model["generation"] != asked or model["state"] == "removing":
            raise CommandError(f"{model['id']} was changed by somebody else meanwhile")
    if model["state"] == "failed":
        still = model["serving_generation"]
        rest = f"; generation {still} goes on serving" if still is not None else ""
        raise CommandError(f"{model['id']} can't start: {model['reason']}{rest}")
    if wait_s and model["state"] != "ready":
        raise CommandError(f"{model['id']} is still {model['state']}; 'footplate models list' shows it")
    show_one(model, as_json=as_json, leave_out=("object", "name", "engine"))


def _whole_source(source: str) -> str:
    """A source whose path does not depend on where this command runs."""
    kind, colon, path = source.partition(":")
    return source if kind == "package" or not path else f"{kind}{colon}{_whole(path)}"


def _whole(path: str) -> str:
    return str(Path(path).expanduser().absolute())


def _path(name: str) -> str:
    return f"/models/{quote(name, safe='')}"


def _options(given: list[str] | None) -> dict[str, Any]:
    """`NAME=VALUE` with values as the configuration writes them."""
    found = {}
    for text in given or ():
        name, equals, value = text.partition("=")
        if not equals:
            raise typer.BadParameter(f"{text!r} must be OPTION=VALUE", param_hint="--engine")
        try:
            found[name] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise typer.BadParameter(f"the value of {name!r} is not YAML", param_hint="--engine") from None
    return found
