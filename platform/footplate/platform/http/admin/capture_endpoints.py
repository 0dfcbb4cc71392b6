"""Endpoints of `/admin/v1` for kept prompts and answers. Each reading and erasure leaves a record."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Literal

from starlette.responses import JSONResponse, Response

from footplate.billing.time_ranges import parse_range
from footplate.platform.capture.store import CaptureFilter, CaptureShelf
from footplate.platform.http.admin.exchange import PREFIX, AdminExchange, AdminRoute, listed
from footplate.platform.http.admin.schemas import Answer, EmptyBody
from footplate.tenancy.access import Action
from footplate.tenancy.admin.audit import AuditRecord, Outcome, Target, TargetKind
from footplate.tenancy.admin.store import Writer
from footplate.tenancy.errors import InvalidValue, NotFound
from footplate.tenancy.tenants import TENANT_ID, refuse_keys

_MAX_ID_DIGITS = 18


class CaptureHeadAnswer(Answer):
    """A kept request without its texts. Seconds; `redacted`: how many of each kind were taken out."""

    id: str
    object: Literal["capture"]
    request_id: str
    tenant_id: str
    key_id: str
    model: str
    endpoint: str
    why: Literal["error", "slow_first_token", "slow_tokens", "sample"]
    error: str | None
    first_token_s: float | None
    captured_at: str
    expires_at: str
    redacted: dict[str, int]
    is_cut: bool


class CaptureAnswer(CaptureHeadAnswer):
    """With them, redacted."""

    prompts: list[str]
    answers: list[str]


class ErasureAnswer(Answer):
    """How many were there; what is still on its way into the store when it is asked for comes later."""

    object: Literal["captures.erased"]
    tenant_id: str
    num_erased: int


async def list_captures(exchange: AdminExchange) -> Response:
    """Kept requests without their texts; that they were listed is written down."""
    captures, page, wanted = _captures(exchange), exchange.page(), _wanted(exchange)

    def work(writer: Writer) -> dict[str, Any]:
        found = captures.heads(page, wanted)
        target = None
        if wanted.tenant_id is not None:
            # Not of the tenant's own kind: nothing of it has changed that gateways would have to forget.
            target = Target(TargetKind.CAPTURE, "list", wanted.tenant_id)
        shown = {
            "num_listed": len(found.items),
            "tenants": sorted({record.tenant_id for record in found.items}),
        }
        _record(exchange, writer, target, shown)
        return {"items": [record.head() for record in found.items], "has_more": found.has_more}

    changed = await exchange.desk.change(exchange.caller, work)
    return listed(changed.answer["items"], has_more=changed.answer["has_more"])


async def show_capture(exchange: AdminExchange) -> Response:
    """One kept request with its texts; who read it is written down first."""
    captures, given = _captures(exchange), str(exchange.request.path_params["capture_id"])
    if not (given.isascii() and given.isdigit() and len(given) <= _MAX_ID_DIGITS):
        raise NotFound("there is no such capture")

    def work(writer: Writer) -> dict[str, Any]:
        found = captures.record(int(given))
        if found is None:
            raise NotFound("there is no such capture")
        target = Target(TargetKind.CAPTURE, str(found.id), found.tenant_id)
        _record(exchange, writer, target, {"request_id": found.request_id})
        return found.fields()

    changed = await exchange.desk.change(exchange.caller, work)
    return JSONResponse(changed.answer, headers={"cache-control": "no-store"})


async def erase_captures(exchange: AdminExchange) -> Response:
    """Delete all that was kept of a tenant, without waiting for it to expire."""
    captures, tenant_id = _captures(exchange), exchange.tenant_id

    def work(writer: Writer) -> dict[str, Any]:
        if writer.tenant(tenant_id) is None:
            raise NotFound("there is no such tenant")
        num_erased = captures.erase(tenant_id)
        target = Target(TargetKind.CAPTURE, tenant_id, tenant_id)
        before, after = {"num_kept": num_erased}, {"num_kept": 0}
        writer.record(
            AuditRecord(exchange.route.action, Outcome.DONE, exchange.caller, target, before, after)
        )
        return {"object": "captures.erased", "tenant_id": tenant_id, "num_erased": num_erased}

    changed = await exchange.desk.change(exchange.caller, work)
    return JSONResponse(changed.answer)


def capture_routes(paged: tuple[str, ...]) -> tuple[AdminRoute, ...]:
    """The endpoints of kept content."""
    every, a = f"{PREFIX}/captures", Action
    return (
        AdminRoute(
            "GET",
            every,
            a.LIST_CAPTURES,
            list_captures,
            CaptureHeadAnswer,
            None,
            (*paged, "tenant_id", "from", "to"),
            is_list=True,
            is_audited=True,
        ),
        AdminRoute(
            "GET", f"{every}/{{capture_id}}", a.READ_CAPTURE, show_capture, CaptureAnswer, is_audited=True
        ),
        AdminRoute(
            "DELETE",
            f"{PREFIX}/tenants/{{tenant_id}}/captures",
            a.ERASE_CAPTURES,
            erase_captures,
            ErasureAnswer,
            EmptyBody,
        ),
    )


def _captures(exchange: AdminExchange) -> CaptureShelf:
    if exchange.desk.captures is None:
        raise NotFound("this platform keeps no content")
    return exchange.desk.captures


def _wanted(exchange: AdminExchange) -> CaptureFilter:
    given = {name: exchange.query(name) for name in ("tenant_id", "from", "to")}
    refuse_keys(given)
    tenant_id = given["tenant_id"]
    if tenant_id is not None and not TENANT_ID.fullmatch(tenant_id):
        raise InvalidValue("tenant_id must be the id of a tenant", "tenant_id")
    begin, end = given["from"], given["to"]
    now = exchange.desk.now()
    if begin is not None and end is not None:
        span = parse_range(begin, end, "UTC", now)
        return CaptureFilter(tenant_id, span.begin, span.end)
    # A bound that is left out is none, whatever the range would take in its place.
    if begin is not None:
        return CaptureFilter(tenant_id, parse_range(begin, None, "UTC", now).begin)
    if end is not None:
        # Nothing is kept for longer than a month.
        since = (now - timedelta(days=60)).isoformat()
        return CaptureFilter(tenant_id, end=parse_range(since, end, "UTC", now).end)
    return CaptureFilter(tenant_id)


def _record(exchange: AdminExchange, writer: Writer, target: Target | None, after: dict[str, Any]) -> None:
    writer.record(AuditRecord(exchange.route.action, Outcome.DONE, exchange.caller, target, None, after))
