"""`footplate keys`: API keys of tenants."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from footplate.platform.cli.client import AdminClient
from footplate.platform.cli.options import expiry, parse_labels, parse_span_s
from footplate.platform.cli.show import AsJson, show_json, show_one, show_rows
from footplate.platform.cli.tenants import Tenant
from footplate.tenancy.api_keys import Role

key_commands = typer.Typer(help="Make, list, rotate and revoke API keys.", no_args_is_help=True)

_Key = Annotated[str, typer.Argument(help="A key's id: the part between the underscores.")]
_ExpiresAt = Annotated[str | None, typer.Option(help="When it ends, such as 2027-01-31T00:00:00Z.")]
_ExpiresIn = Annotated[str | None, typer.Option(help="How long it works: 12h, 90d.")]
COLUMNS = ("id", "name", "role", "state", "created_at", "expires_at", "last_used_at", "replaces", "labels")


@key_commands.command()
def create(
    tenant: Tenant,
    name: Annotated[str, typer.Option(help="What it is for.")] = "",
    role: Annotated[Role, typer.Option(help="What it may do.")] = Role.MEMBER,
    expires_at: _ExpiresAt = None,
    expires_in: _ExpiresIn = None,
    label: Annotated[
        list[str] | None, typer.Option("--label", help="NAME=VALUE; any number of times.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a key. Standard output gets its text, which is shown this once."""
    body: dict[str, Any] = {"name": name, "role": role.value, "labels": parse_labels(label) or {}}
    body["expires_at"] = expiry(expires_at, expires_in)
    with AdminClient() as admin:
        _show_new(admin.ask("POST", f"/tenants/{admin.tenant_id(tenant)}/keys", body), as_json)


@key_commands.command("list")
def list_keys(tenant: Tenant, as_json: AsJson = False) -> None:
    """List a tenant's keys, ended ones too."""
    with AdminClient() as admin:
        show_rows(admin.rows(f"/tenants/{admin.tenant_id(tenant)}/keys"), COLUMNS, as_json=as_json)


@key_commands.command()
def rotate(
    key: _Key,
    overlap: Annotated[str, typer.Option(help="How long both keys work: 0s, 30m, 24h, 7d.")] = "24h",
    expires_at: _ExpiresAt = None,
    expires_in: _ExpiresIn = None,
    as_json: AsJson = False,
) -> None:
    """Make a key in place of one that goes on working for a while."""
    body = {"overlap_s": parse_span_s(overlap, "--overlap"), "expires_at": expiry(expires_at, expires_in)}
    with AdminClient() as admin:
        _show_new(admin.ask("POST", f"/keys/{key}/rotate", body), as_json)


@key_commands.command()
def revoke(key: _Key, as_json: AsJson = False) -> None:
    """End a key for good, within two seconds."""
    with AdminClient() as admin:
        show_one(admin.ask("POST", f"/keys/{key}/revoke"), as_json=as_json)


def _show_new(made: dict[str, Any], as_json: bool) -> None:
    """The text alone on standard output, so that `KEY=$(footplate keys create …)` works."""
    if as_json:
        show_json(made)
        return
    ends = f", ends {made['expires_at']}" if made["expires_at"] else ""
    print(f"key {made['id']} ({made['role']}{ends}); keep it now, it is not shown again:", file=sys.stderr)
    if "replaced" in made:
        old = made["replaced"]
        until = f"works until {old['expires_at']}" if old["state"] == "live" else "works no more"
        print(f"the old key {old['id']} {until}", file=sys.stderr)
    print(made["key"])
