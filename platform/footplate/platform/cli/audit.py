"""`footplate audit`: who changed what."""

from __future__ import annotations

from typing import Annotated

import typer

from footplate.platform.cli.client import AdminClient
from footplate.platform.cli.show import AsJson, show_rows

COLUMNS = (
    "at",
    "action",
    "outcome",
    "code",
    "actor.role",
    "actor.key_id",
    "source",
    "target.id",
    "request_id",
)


def audit(
    limit: Annotated[int, typer.Option(help="At most so many.", min=1)] = 50,
    tenant: Annotated[str | None, typer.Option(help="Only what concerns this tenant (id or name).")] = None,
    target: Annotated[str | None, typer.Option(help="Only what was done to this tenant or key (id).")] = None,
    oldest_first: Annotated[
        bool, typer.Option("--oldest-first", help="Begin with the first record.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List audit records, the last ones first; --json has what was before and after."""
    with AdminClient() as admin:
        tenant_id = None if tenant is None else admin.tenant_id(tenant)
        order = "asc" if oldest_first else "desc"
        rows = admin.rows("/audit", limit=limit, order=order, tenant_id=tenant_id, target_id=target)
        show_rows(rows, COLUMNS, as_json=as_json)
