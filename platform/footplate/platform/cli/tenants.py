"""`footplate tenants`: teams and what they are called."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from footplate.platform.cli.client import AdminClient
from footplate.platform.cli.options import parse_labels
from footplate.platform.cli.show import AsJson, show_one, show_rows

tenant_commands = typer.Typer(help="Make, list, change, suspend and resume tenants.", no_args_is_help=True)

Tenant = Annotated[str, typer.Argument(help="A tenant's id or name.")]
_Center = Annotated[str | None, typer.Option(help="Cost centre that its use is booked to.")]
_Group = Annotated[
    str | None, typer.Option(help="Tenants of one share group use each other's cached prompts.")
]
_Zone = Annotated[
    str | None,
    typer.Option(
        "--timezone", help="What days are in its reports, such as Europe/Berlin; '' for the books'."
    ),
]
_Capture = Annotated[
    bool | None,
    typer.Option(
        "--capture-content/--no-capture-content",
        help="Whether its prompts and answers may be kept, redacted, where the platform keeps any.",
    ),
]
_Labels = Annotated[list[str] | None, typer.Option("--label", help="NAME=VALUE; any number of times.")]
COLUMNS = ("id", "name", "state", "cost_center", "share_group", "labels", "created_at")


@tenant_commands.command()
def create(
    name: Annotated[str, typer.Argument(help="The new tenant's name.")],
    cost_center: _Center = None,
    share_group: _Group = None,
    timezone: _Zone = None,
    label: _Labels = None,
    captures_content: _Capture = None,
    as_json: AsJson = False,
) -> None:
    """Make a tenant."""
    body = _given(
        name=name,
        cost_center=cost_center,
        share_group=share_group,
        timezone=timezone or None,
        labels=parse_labels(label),
        captures_content=captures_content,
    )
    with AdminClient() as admin:
        show_one(admin.ask("POST", "/tenants", body), as_json=as_json)


@tenant_commands.command("list")
def list_tenants(
    limit: Annotated[int | None, typer.Option(help="At most so many.", min=1)] = None, as_json: AsJson = False
) -> None:
    """List all tenants that the key may see."""
    with AdminClient() as admin:
        show_rows(admin.rows("/tenants", limit=limit), COLUMNS, as_json=as_json)


@tenant_commands.command()
def show(tenant: Tenant, as_json: AsJson = False) -> None:
    """Show one tenant."""
    with AdminClient() as admin:
        show_one(admin.ask("GET", f"/tenants/{admin.tenant_id(tenant)}"), as_json=as_json)


@tenant_commands.command()
def update(  # noqa: PLR0913 - an option for each field
    tenant: Tenant,
    name: Annotated[str | None, typer.Option(help="A new name.")] = None,
    cost_center: _Center = None,
    share_group: _Group = None,
    no_share_group: Annotated[bool, typer.Option("--no-share-group", help="Leave the share group.")] = False,
    timezone: _Zone = None,
    label: _Labels = None,
    captures_content: _Capture = None,
    as_json: AsJson = False,
) -> None:
    """Change what is given; labels are replaced as a whole."""
    if no_share_group and share_group is not None:
        raise typer.BadParameter("give --share-group or --no-share-group, not both")
    body = _given(
        name=name,
        cost_center=cost_center,
        share_group=share_group,
        labels=parse_labels(label),
        captures_content=captures_content,
    )
    if no_share_group:
        body["share_group"] = None
    if timezone is not None:
        body["timezone"] = timezone or None
    if not body:
        raise typer.BadParameter(
            "nothing to change: give --name, --cost-center, --share-group, --timezone, --label "
            "or --capture-content"
        )
    with AdminClient() as admin:
        show_one(admin.ask("PATCH", f"/tenants/{admin.tenant_id(tenant)}", body), as_json=as_json)


@tenant_commands.command()
def suspend(tenant: Tenant, as_json: AsJson = False) -> None:
    """Let none of a tenant's keys open anything, within two seconds."""
    _switch(tenant, "suspend", as_json)


@tenant_commands.command()
def resume(tenant: Tenant, as_json: AsJson = False) -> None:
    """Undo a suspension."""
    _switch(tenant, "resume", as_json)


def _switch(tenant: str, action: str, as_json: bool) -> None:
    with AdminClient() as admin:
        show_one(admin.ask("POST", f"/tenants/{admin.tenant_id(tenant)}/{action}"), as_json=as_json)


def _given(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
