"""`footplate routes`: what routes do and save, and what one would decide."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import quote

import typer

from footplate.platform.cli.client import AdminClient
from footplate.platform.cli.show import AsJson, show_one, show_rows

route_commands = typer.Typer(
    help="Show routes and what they save; explain what one decides.", no_args_is_help=True
)
COLUMNS = (
    "id",
    "policy",
    "small",
    "large",
    "threshold",
    "requests",
    "escalated_share",
    "attempts_left",
    "saving.saved",
    "saving.currency",
)


@route_commands.command("list")
def list_routes(as_json: AsJson = False) -> None:
    """List all routes with this month's requests, the share the large model answered, and the saving."""
    with AdminClient() as admin:
        show_rows(admin.rows("/routes"), COLUMNS, as_json=as_json)


@route_commands.command()
def explain(
    route: Annotated[str, typer.Argument(help="The route's name.")],
    prompt: Annotated[str, typer.Argument(help="The prompt, as one message of a user.")],
    tags: Annotated[str, typer.Option(help="As in a request's metadata.tags.")] = "",
    as_json: AsJson = False,
) -> None:
    """Say what the route would decide for a prompt, and by which numbers. No model is asked."""
    body: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]}
    if tags:
        body["metadata"] = {"tags": tags}
    with AdminClient() as admin:
        found = admin.ask("POST", f"/routes/{quote(route, safe='')}/explain", body)
        show_one(found, as_json=as_json)
