"""Endpoints of `/admin/v1` for use, prices, months, statements, exports and reconciliation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.responses import FileResponse, JSONResponse, Response

from footplate.billing.errors import NotFound
from footplate.billing.exports.request import Export, ExportFormat, ExportRequest, FocusVersion
from footplate.billing.money import decimal_text
from footplate.billing.periods import ClosedPeriod, Period
from footplate.billing.price_import import from_fields
from footplate.billing.prices import PriceVersion, diff
from footplate.billing.rating import simulate
from footplate.billing.reconcile import Reconciliation, ReconciliationInput, reconcile
from footplate.billing.reports import (
    DEFAULT_LIMIT,
    ReportQuery,
    UsageFilter,
    parse_cursor,
    parse_groups,
    report_fields,
)
from footplate.billing.statement_html import statement_html
from footplate.billing.statements import Statement, StatementHead, make_statement
from footplate.billing.store import Beside
from footplate.billing.time_ranges import TimeRange, parse_range
from footplate.billing.usage import KeyId, ModelName, TenantId
from footplate.platform.billing_desk import LONG_S, BillingDesk
from footplate.platform.http.admin.billing_schemas import (
    ExportAnswer,
    ExportBody,
    PeriodAnswer,
    PriceAnswer,
    PriceBody,
    PricePreviewAnswer,
    PricePreviewBody,
    ReconciliationAnswer,
    UsageAnswer,
)
from footplate.platform.http.admin.exchange import PERIOD_ID, PREFIX, AdminExchange, AdminRoute, listed
from footplate.platform.http.admin.schemas import EmptyBody
from footplate.tenancy.access import Action, Reach, reach_of, require_reach
from footplate.tenancy.admin.audit import AuditRecord, Outcome, Target, TargetKind
from footplate.tenancy.admin.store import Writer
from footplate.tenancy.admin.tenants import find_tenant
from footplate.tenancy.errors import InvalidValue
from footplate.tenancy.tenants import TENANT_ID, refuse_keys

RANGE = ("from", "to", "timezone")
FILTERS = ("tenant_id", "key_id", "model")
USAGE_PARAMETERS = (*RANGE, "group_by", *FILTERS, "limit", "after")
_MEDIA = {
    ExportFormat.CSV: "text/csv; charset=utf-8",
    ExportFormat.FOCUS: "text/csv; charset=utf-8",
    ExportFormat.JSONL: "application/jsonl",
    ExportFormat.PARQUET: "application/vnd.apache.parquet",
    ExportFormat.XLSX: "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet",
}
# The page needs its own styles and nothing else.
_PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'",
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
}


async def show_usage(exchange: AdminExchange) -> Response:
    """Use of a range by any grouping, and the totals of all its rows."""
    billing, asked = exchange.billing, _asked(exchange, *USAGE_PARAMETERS)
    groups = parse_groups(asked.get("group_by"))
    wanted = _filter(exchange, asked)
    query = ReportQuery(
        await _range_for(exchange, asked, wanted),
        groups,
        wanted,
        _limit(asked.get("limit")),
        parse_cursor(asked.get("after"), groups),
    )
    report = await billing.ask(lambda: billing.reports.report(query))
    return JSONResponse(report_fields(query, report, billing.currency))


async def import_prices(exchange: AdminExchange) -> Response:
    """Add a version of the price book; events that waited for a price are rated by it."""
    billing = exchange.billing
    prices = from_fields(_given(exchange))

    def enclosing(beside: Beside[PriceVersion]) -> PriceVersion:
        return billing.prices.add(prices, imported_by=exchange.caller.key_id, beside=beside)

    def work(writer: Writer, version: PriceVersion) -> dict[str, Any]:
        shown = _price_fields(version, is_in_force=version.effective_from <= billing.now())
        _record(exchange, writer, Target(TargetKind.PRICES, str(version.id)), None, prices.fields())
        return shown

    answer = await exchange.change_books(enclosing, work)
    await billing.ask(billing.rate_quarantined, wait_s=LONG_S)
    return answer


async def list_prices(exchange: AdminExchange) -> Response:
    """Every version of the price book, in the order in which they were imported."""
    billing, page = exchange.billing, exchange.page()
    book = await billing.ask(billing.prices.book)
    in_force = book.in_force(billing.now())
    versions = sorted(book.versions, key=lambda each: each.id, reverse=page.is_newest_first)
    ids = [str(version.id) for version in versions]
    first = _position(page.after, ids)
    shown = versions[first : first + page.limit]
    return listed(
        [_price_fields(version, is_in_force=version is in_force) for version in shown],
        has_more=first + page.limit < len(versions),
    )


async def show_prices(exchange: AdminExchange) -> Response:
    """One version."""
    billing, wanted = exchange.billing, str(exchange.request.path_params["price_id"])
    book = await billing.ask(billing.prices.book)
    found = next((each for each in book.versions if str(each.id) == wanted), None)
    if found is None:
        raise NotFound("there is no such version of the price book")
    return JSONResponse(_price_fields(found, is_in_force=found is book.in_force(billing.now())))


async def preview_prices(exchange: AdminExchange) -> Response:
    """What a price book would change against the one it follows, and what a month would have cost by it."""
    billing, given = exchange.billing, _given(exchange)
    prices = from_fields(given["prices"])
    month = given.get("period")
    period = None if month is None else billing.calendar.period(month)
    book = await billing.ask(billing.prices.book)
    before = book.in_force(prices.effective_from)
    changes = [
        {
            "kind": each.kind.value,
            "model": each.model,
            "token_class": None if each.token_class is None else each.token_class.value,
            "before": each.before,
            "after": each.after,
        }
        for each in diff(None if before is None else before.prices, prices)
    ]
    simulation: dict[str, Any] | None = None
    if period is not None:
        totals = await billing.ask(lambda: billing.months.usage_totals(period))
        span = TimeRange(period.begins_at, period.ends_at, billing.calendar.timezone)
        actual = await billing.ask(lambda: billing.reports.report(ReportQuery(span)))
        found = simulate(totals, prices)
        simulation = {
            "period": period.id,
            "currency": found.currency,
            "actual_cost": decimal_text(actual.totals.cost),
            "simulated_cost": decimal_text(found.total),
            "by_model": {name: decimal_text(cost) for name, cost in sorted(found.by_model.items())},
            "models_without_a_price": list(found.unpriced),
        }
    return JSONResponse(
        {
            "object": "price_preview",
            "against": None if before is None else str(before.id),
            "changes": changes,
            "simulation": simulation,
        }
    )


async def list_periods(exchange: AdminExchange) -> Response:
    """Months, from the first that has any use up to this one."""
    billing, page = exchange.billing, exchange.page()

    def read() -> list[tuple[Period, ClosedPeriod | None]]:
        closed = billing.periods.closed()
        found: list[tuple[Period, ClosedPeriod | None]] = [(each.period, each) for each in closed]
        period = billing.periods.first_open()
        while period is not None and period.begins_at <= billing.now():
            found.append((period, None))
            period = billing.calendar.next_period(period)
        return found

    months = await billing.ask(read)
    if page.is_newest_first:
        months.reverse()
    first = _position(page.after, [period.id for period, _ in months])
    return listed(
        [_period_fields(billing, *each) for each in months[first : first + page.limit]],
        has_more=first + page.limit < len(months),
    )


async def close_period(exchange: AdminExchange) -> Response:
    """Close a month: nothing counts in it afterwards. Reads all its events first, which may take minutes."""
    billing = exchange.billing
    period = _period(exchange)

    def enclosing(beside: Beside[ClosedPeriod]) -> ClosedPeriod:
        return billing.periods.close(period, closed_by=exchange.caller.key_id, beside=beside)

    def work(writer: Writer, closed: ClosedPeriod) -> dict[str, Any]:
        shown = _period_fields(billing, period, closed)
        _record(exchange, writer, Target(TargetKind.PERIOD, period.id), {"state": "open"}, shown)
        return shown

    return await exchange.change_books(enclosing, work)


async def show_statement(exchange: AdminExchange) -> Response:
    """What a tenant owes for a month, as a page that can be printed."""
    billing, tenant_id = exchange.billing, exchange.tenant_id
    tenant = await exchange.desk.read(
        lambda reader: find_tenant(reader, exchange.caller, tenant_id, Action.READ_STATEMENT)
    )
    period = _period(exchange)
    statement = await billing.ask(lambda: _statement(billing, TenantId(tenant_id), period))
    return Response(
        statement_html(statement, tenant.name), media_type="text/html; charset=utf-8", headers=_PAGE_HEADERS
    )


async def show_reconciliation(exchange: AdminExchange) -> Response:
    """The ledger against engines, reservations and itself; each difference explained or listed."""
    billing = exchange.billing
    span = _range(exchange, _asked(exchange, *RANGE))
    found = await billing.ask(lambda: _reconcile(billing, span), wait_s=LONG_S)
    fields = found.fields()
    return JSONResponse(
        {
            **fields,
            **span.fields(),
            "sources": {
                "ledger": True,
                "engines": fields["engines"] is not None,
                "reservations": fields["reservations"] is not None,
                "journals": fields["backlog"] is not None,
            },
        }
    )


async def create_export(exchange: AdminExchange) -> Response:
    """Ask for a file of usage; `GET` it until its state is `completed`, then download it."""
    billing, given = exchange.billing, _given(exchange)
    wanted = _filter(exchange, given)
    request = ExportRequest(
        await _range_for(exchange, given, wanted),
        ExportFormat(given.get("format", "csv")),
        FocusVersion(given.get("focus_version", "1.2")),
        wanted,
    )
    added: list[Export] = []

    def work(writer: Writer) -> dict[str, Any]:
        export = billing.exports.add(request, created_by=exchange.caller.key_id)
        added.append(export)
        shown = export.fields()
        target = Target(TargetKind.EXPORT, export.id, request.filter.tenant_id)
        _record(exchange, writer, target, None, {**request.span.fields(), "format": request.format.value})
        return shown

    answer = await exchange.change(work)
    for export in added:
        billing.launch(export.id)
    return answer


async def show_export(exchange: AdminExchange) -> Response:
    """How far an export has come, and what stands beside its file."""
    return JSONResponse((await _export(exchange)).fields())


async def download_export(exchange: AdminExchange) -> Response:
    """The file."""
    export = await _export(exchange)
    path = await exchange.billing.ask(lambda: exchange.billing.exports.file_of(export))
    media = _MEDIA[export.request.format]
    headers = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
    return FileResponse(path, media_type=media, filename=export.file_name, headers=headers)


async def _export(exchange: AdminExchange) -> Export:
    wanted = str(exchange.request.path_params["export_id"])
    if not wanted.isprintable():
        raise NotFound("there is no such export")
    export = await exchange.billing.ask(lambda: exchange.billing.exports.find(wanted))
    caller = exchange.caller
    is_own = export.request.filter.tenant_id == caller.tenant_id
    if reach_of(caller.role, exchange.route.action) is Reach.OWN and not is_own:
        raise NotFound("there is no such export")
    return export


def _statement(billing: BillingDesk, tenant_id: TenantId, period: Period) -> Statement:
    is_closed = any(each.period.id == period.id for each in billing.periods.closed())
    timezone, now = billing.calendar.timezone, billing.now()
    head = StatementHead(tenant_id, period, timezone, billing.currency, now, is_final=is_closed)
    usage = billing.months.month_usage(period, tenant_id)
    num_unpriced = billing.months.num_unpriced(period, tenant_id)
    return make_statement(head, usage, billing.prices.book(), num_unpriced=num_unpriced)


def _reconcile(billing: BillingDesk, span: TimeRange) -> Reconciliation:
    ledger = billing.ledger_counts
    books = ledger.books_state(span)
    with ledger.counts(span) as counts:
        # In this order: see `ReconciliationInput`.
        engines = None if billing.engine_counts is None else billing.engine_counts()
        reservations = None if billing.reservations is None else billing.reservations()
        waiting = None if billing.waiting_events is None else billing.waiting_events()
        batches = None if billing.batch_counts is None else billing.batch_counts(span)
        return reconcile(
            ReconciliationInput(
                counts, books, engines, reservations, batches, waiting=waiting, recorded=ledger.recorded
            )
        )


async def _range_for(exchange: AdminExchange, given: Mapping[str, Any], wanted: UsageFilter) -> TimeRange:
    """The range; where it is one tenant's use and no zone is asked for, in that tenant's zone."""
    zone, tenant_id = given.get("timezone"), wanted.tenant_id
    if not zone and tenant_id is not None:
        tenant = await exchange.desk.read(lambda reader: reader.tenant(tenant_id))
        zone = None if tenant is None else tenant.timezone
    return _range(exchange, {**given, "timezone": zone})


def _range(exchange: AdminExchange, given: Mapping[str, Any]) -> TimeRange:
    billing = exchange.billing
    timezone = given.get("timezone") or billing.calendar.timezone
    return parse_range(given.get("from"), given.get("to"), timezone, billing.now())


def _filter(exchange: AdminExchange, given: Mapping[str, Any]) -> UsageFilter:
    """What a caller asks for, within what it may see. Raises NotFound for another tenant's."""
    caller, action = exchange.caller, exchange.route.action
    for name in FILTERS:
        # Bodies come here too; a NUL is a character of JSON and none of PostgreSQL's.
        if not (given.get(name) or "").isprintable():
            raise InvalidValue(f"{name} must hold printable characters only", name)
    tenant_id, key_id, model = (given.get(name) for name in FILTERS)
    if tenant_id is not None and not TENANT_ID.fullmatch(tenant_id):
        raise InvalidValue("tenant_id is no id of a tenant", "tenant_id")
    if reach_of(caller.role, action) is Reach.OWN:
        tenant_id = tenant_id or caller.tenant_id
        require_reach(caller.role, caller.tenant_id, action, tenant_id)
    return UsageFilter(
        None if tenant_id is None else TenantId(tenant_id),
        None if key_id is None else KeyId(key_id),
        None if model is None else ModelName(model),
    )


def _given(exchange: AdminExchange) -> dict[str, Any]:
    """The body's fields as the client wrote them. Raises InvalidValue for an API key among them."""
    given = exchange.body.model_dump(exclude_unset=True, by_alias=True)
    refuse_keys(given)
    return given


def _asked(exchange: AdminExchange, *names: str) -> dict[str, Any]:
    """Parameters of the query that are given. Raises InvalidValue for an API key among them."""
    asked = {name: value for name in names if (value := exchange.query(name)) is not None}
    refuse_keys(asked)
    return asked


def _period(exchange: AdminExchange) -> Period:
    """The path's month. Raises NotFound."""
    name = str(exchange.request.path_params["period_id"])
    if not PERIOD_ID.fullmatch(name):
        raise NotFound("there is no such period; write a year and a month, such as 2026-11")
    return exchange.billing.calendar.period(name)


def _limit(text: str | None) -> int:
    if text is None:
        return DEFAULT_LIMIT
    if not (text.isascii() and text.isdigit() and len(text) <= 6):
        raise InvalidValue("limit must be a whole number", "limit")
    return int(text)


def _position(after: str | None, ids: list[str]) -> int:
    if after is None:
        return 0
    if after not in ids:
        raise InvalidValue("after names no row of this list; give the `next` of an answer", "after")
    return ids.index(after) + 1


def _record(
    exchange: AdminExchange,
    writer: Writer,
    target: Target,
    before: Mapping[str, Any] | None,
    after: Mapping[str, Any],
) -> None:
    action = exchange.route.action
    writer.record(AuditRecord(action, Outcome.DONE, exchange.caller, target, before, after))


def _price_fields(version: PriceVersion, *, is_in_force: bool) -> dict[str, Any]:
    return {
        "id": str(version.id),
        "object": "price_version",
        **version.prices.fields(),
        "imported_at": version.imported_at.isoformat().replace("+00:00", "Z"),
        "imported_by": version.imported_by,
        "is_in_force": is_in_force,
    }


def _period_fields(billing: BillingDesk, period: Period, closed: ClosedPeriod | None) -> dict[str, Any]:
    span = TimeRange(period.begins_at, period.ends_at, billing.calendar.timezone).fields()
    totals: dict[str, Any] | None = None
    if closed is not None:
        kept = closed.totals
        totals = {
            "requests": kept.requests,
            "input_tokens": kept.input_uncached + kept.input_cached,
            "cached_input_tokens": kept.input_cached,
            "output_tokens": kept.output,
            "total_tokens": kept.input_uncached + kept.input_cached + kept.output,
            "cost": {currency: decimal_text(amount) for currency, amount in kept.amounts.items()},
        }
    return {
        "id": period.id,
        "object": "period",
        "state": "open" if closed is None else "closed",
        "begins_at": span["from"],
        "ends_at": span["to"],
        "timezone": span["timezone"],
        "closed_at": None if closed is None else closed.closed_at.isoformat().replace("+00:00", "Z"),
        "closed_by": None if closed is None else closed.closed_by,
        "totals": totals,
    }


def billing_routes(paged: tuple[str, ...]) -> tuple[AdminRoute, ...]:
    """The endpoints of billing."""
    a = Action
    prices, periods, exports = f"{PREFIX}/prices", f"{PREFIX}/periods", f"{PREFIX}/exports"
    statement = f"{periods}/{{period_id}}/statements/{{tenant_id}}"
    return (
        AdminRoute("GET", f"{PREFIX}/usage", a.READ_USAGE, show_usage, UsageAnswer, None, USAGE_PARAMETERS),
        AdminRoute("POST", prices, a.IMPORT_PRICES, import_prices, PriceAnswer, PriceBody),
        AdminRoute("GET", prices, a.READ_PRICES, list_prices, PriceAnswer, None, paged, is_list=True),
        AdminRoute("GET", f"{prices}/{{price_id}}", a.READ_PRICES, show_prices, PriceAnswer),
        AdminRoute(
            "POST",
            f"{prices}/preview",
            a.READ_PRICES,
            preview_prices,
            PricePreviewAnswer,
            PricePreviewBody,
            is_question=True,
        ),
        AdminRoute("GET", periods, a.READ_PERIODS, list_periods, PeriodAnswer, None, paged, is_list=True),
        AdminRoute(
            "POST", f"{periods}/{{period_id}}/close", a.CLOSE_PERIOD, close_period, PeriodAnswer, EmptyBody
        ),
        AdminRoute(
            "GET", statement, a.READ_STATEMENT, show_statement, PeriodAnswer, media_types=("text/html",)
        ),
        AdminRoute("POST", exports, a.CREATE_EXPORT, create_export, ExportAnswer, ExportBody),
        AdminRoute("GET", f"{exports}/{{export_id}}", a.READ_EXPORT, show_export, ExportAnswer),
        AdminRoute(
            "GET",
            f"{exports}/{{export_id}}/file",
            a.READ_EXPORT,
            download_export,
            ExportAnswer,
            media_types=tuple(dict.fromkeys(_MEDIA.values())),
        ),
        AdminRoute(
            "GET",
            f"{PREFIX}/reconciliation",
            a.READ_RECONCILIATION,
            show_reconciliation,
            ReconciliationAnswer,
            None,
            RANGE,
        ),
    )
