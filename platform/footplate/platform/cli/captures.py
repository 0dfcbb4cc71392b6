"""`footplate captures`: prompts and answers that were kept. Each reading is written down."""

from __future__ import annotations

from typing import Annotated

import typer

from footplate.platform.cli.client import AdminClient
from footplate.platform.cli.show import AsJson, show_one, show_rows

capture_commands = typer.Typer(
    help="Read what was kept of requests, redacted; each reading leaves an audit record.",
    no_args_is_help=True,
)
COLUMNS = (
    "id",
    "captured_at",
    "why",
    "error",
    "tenant_id",
    "model",
    "request_id",
    "first_token_s",
    "expires_at",
)


@capture_commands.command("list")
def list_captures(
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's (id or name).")] = None,
    begin: Annotated[str | None, typer.Option("--from", help="A date in UTC or a time; included.")] = None,
    end: Annotated[str | None, typer.Option("--to", help="A date in UTC or a time; not included.")] = None,
    limit: Annotated[int, typer.Option(help="At most so many.", min=1)] = 50,
    as_json: AsJson = False,
) -> None:
    """List kept requests without their texts, the last ones first."""
    with AdminClient() as admin:
        tenant_id = None if tenant is None else admin.tenant_id(tenant)
        query = {"from": begin, "to": end, "tenant_id": tenant_id, "order": "desc"}
        show_rows(admin.rows("/captures", limit=limit, **query), COLUMNS, as_json=as_json)


@capture_commands.command()
def erase(
    tenant: Annotated[str, typer.Argument(help="The tenant's id or name.")], as_json: AsJson = False
) -> None:
    """Delete all that was kept of a tenant now; what it sends later is kept as before, if it opted in."""
    with AdminClient() as admin:
        path = f"/tenants/{admin.tenant_id(tenant)}/captures"
        show_one(admin.ask("DELETE", path), as_json=as_json)


@capture_commands.command()
def show(
    capture_id: Annotated[int, typer.Argument(help="A number that the list shows.", min=1)],
    as_json: AsJson = False,
) -> None:
    """Show one kept request with its prompt and answer."""
    with AdminClient() as admin:
        show_one(admin.ask("GET", f"/captures/{capture_id}"), as_json=as_json)
