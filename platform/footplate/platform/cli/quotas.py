"""`footplate quotas`: how much a tenant or a key may use."""

from __future__ import annotations

import json
from math import isfinite
from typing import Annotated, Any

import typer

from footplate.platform.cli.client import AdminClient
from footplate.platform.cli.show import AsJson, show_one
from footplate.platform.cli.tenants import Tenant
from footplate.tenancy.quotas import AMOUNTS, BUDGETS, FIELDS, LimitMode

quota_commands = typer.Typer(help="Show and set quotas.", no_args_is_help=True)

_Key = Annotated[str | None, typer.Option("--key", help="A key's id: its own quota, not its tenant's.")]
_Amount = Annotated[str | None, typer.Option(metavar="N|none", help="0 refuses all, none is unlimited.")]
_Number = Annotated[str | None, typer.Option(metavar="X|none")]
_Money = Annotated[str | None, typer.Option(metavar="AMOUNT|none", help="By calendar month.")]


@quota_commands.command("set")
def set_quota(  # noqa: PLR0913 - one option for each field of a quota
    tenant: Tenant,
    key: _Key = None,
    requests_per_minute: _Amount = None,
    tokens_per_minute: _Amount = None,
    tokens_per_day: _Amount = None,
    max_concurrent_requests: _Amount = None,
    max_context_tokens: _Amount = None,
    allowed_models: Annotated[
        str | None, typer.Option(metavar="A,B|none", help="Names with commas; an empty text allows no model.")
    ] = None,
    per_model: Annotated[
        str | None, typer.Option(metavar="JSON|none", help='{"MODEL": {"tokens_per_day": 1000}}')
    ] = None,
    priority: Annotated[str | None, typer.Option(metavar="N|none", help="Lower runs first.")] = None,
    weight: _Number = None,
    monthly_budget: _Money = None,
    monthly_soft_budget: _Money = None,
    cached_token_weight: _Number = None,
    mode: Annotated[LimitMode | None, typer.Option(help="Whether limits refuse or only count.")] = None,
    as_json: AsJson = False,
) -> None:
    """Change the fields that are given and keep the others."""
    options = dict(locals())
    given = {name: _value(name, options[name]) for name in FIELDS if options[name] is not None}
    if not given:
        raise typer.BadParameter("nothing to set: give at least one limit, such as --tokens-per-minute 10000")
    with AdminClient() as admin:
        path = _path(admin, tenant, key)
        before = admin.ask("GET", path)
        # Where the default held, its values become the tenant's own: what is not named stays as it is.
        body = {name: before[name] for name in FIELDS if before[name] is not None}
        show_one(admin.ask("PUT", path, {**body, **given}), as_json=as_json)


@quota_commands.command()
def show(tenant: Tenant, key: _Key = None, as_json: AsJson = False) -> None:
    """Show a tenant's quota, or a key's."""
    with AdminClient() as admin:
        show_one(admin.ask("GET", _path(admin, tenant, key)), as_json=as_json)


def _path(admin: AdminClient, tenant: str, key: str | None) -> str:
    return f"/tenants/{admin.tenant_id(tenant)}/quota" if key is None else f"/keys/{key}/quota"


def _value(name: str, text: str) -> Any:
    """An option's text as the API takes the field; whether it may be so, the platform says."""
    if text == "none":
        return None
    if name in BUDGETS or name == "mode":
        return str(text)
    if name == "allowed_models":
        return [model for model in text.split(",") if model]
    try:
        if name == "per_model":
            return json.loads(text, parse_constant=_finite, parse_float=_finite)
        return int(text) if name in (*AMOUNTS, "priority") else _finite(text)
    except (ValueError, RecursionError):
        raise typer.BadParameter(
            f"{text!r} can't be read", param_hint=f"--{name.replace('_', '-')}"
        ) from None


def _finite(text: str) -> float:
    """A number that JSON can hold. Raises ValueError."""
    value = float(text)
    if not isfinite(value):
        raise ValueError
    return value
