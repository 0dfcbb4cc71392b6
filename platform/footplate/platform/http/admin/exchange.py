"""One request to the admin API: who asks, what for, and how it is answered and written down."""

from __future__ import annotations

import hashlib
import ipaddress
import json
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from footplate.platform.administration import AdminDesk
from footplate.platform.billing_desk import BillingDesk
from footplate.platform.errors import UnsupportedParameter
from footplate.platform.http.admin.schemas import EmptyBody
from footplate.platform.http.errors import MAX_NAME_CHARACTERS, api_error
from footplate.platform.http.gateway import Gateway
from footplate.platform.http.schemas import Body, parse_body
from footplate.tenancy.access import Action, require_role
from footplate.tenancy.admin.administration import Changed, Enclosing, IdempotentRequest
from footplate.tenancy.admin.audit import AuditRecord, Caller, Outcome, Target, TargetKind
from footplate.tenancy.admin.store import DEFAULT_LIMIT, Page, Writer
from footplate.tenancy.api_keys import Role
from footplate.tenancy.errors import InvalidValue, NotFound, StoreUnavailable
from footplate.tenancy.tenants import TENANT_ID, refuse_keys

_Done = TypeVar("_Done")
PREFIX = "/admin/v1"
PAGE_PARAMETERS = ("limit", "after", "order")
MAX_IDEMPOTENCY_KEY = 255
# What else stands in their place is no id: it is looked for nowhere and written down nowhere.
_KEY_ID = re.compile(r"[0-9A-Za-z]{12}")
PERIOD_ID = re.compile(r"[0-9]{4}-[0-9]{2}", re.ASCII)


@dataclass(frozen=True, slots=True)
class AdminRoute:
    """One endpoint. `parameters`: the names in its query; `body` None: it takes none."""

    method: str
    path: str
    action: Action
    handler: Callable[[AdminExchange], Awaitable[Response]] = field(repr=False)
    answer: type[BaseModel]
    body: type[Body] | None = None
    parameters: tuple[str, ...] = ()
    is_list: bool = False
    # A POST that changes nothing, for what is too long to be asked for in a URL.
    is_question: bool = False
    # A read that leaves a record, refused or not.
    is_audited: bool = False
    # Of an answer that is a file.
    media_types: tuple[str, ...] = ()

    @property
    def is_change(self) -> bool:
        """Whether it leaves an audit record, refused or not."""
        return self.method != "GET" and not self.is_question


@dataclass(frozen=True, slots=True)
class AdminExchange:
    """What a handler works with. `body` is empty where the route takes none."""

    route: AdminRoute
    gateway: Gateway
    desk: AdminDesk
    caller: Caller
    request: Request
    body: Body

    @property
    def tenant_id(self) -> str:
        """The path's tenant. Raises NotFound for what can't be an id."""
        return _path_id(self.request, "tenant_id", TENANT_ID)

    @property
    def key_id(self) -> str:
        """The path's key. Raises NotFound for what can't be an id."""
        return _path_id(self.request, "key_id", _KEY_ID)

    @property
    def given(self) -> dict[str, Any]:
        """The body's fields that the client wrote."""
        return {name: getattr(self.body, name) for name in self.body.model_fields_set}

    def query(self, name: str) -> str | None:
        """A parameter of the query. Raises InvalidValue for what stands in no name and no id."""
        value = self.request.query_params.get(name)
        if value is not None and not value.isprintable():
            raise InvalidValue(f"{name} must hold printable characters only", name)
        return value

    @property
    def billing(self) -> BillingDesk:
        """Where the books are asked. Raises NotFound where none are kept."""
        if self.desk.billing is None:
            raise NotFound("this platform keeps no books")
        return self.desk.billing

    def page(self) -> Page:
        """Which part of the list is asked for. Raises InvalidValue."""
        limit, order = self.query("limit") or str(DEFAULT_LIMIT), self.query("order") or "asc"
        if not (limit.isascii() and limit.isdigit() and len(limit) <= 6):
            raise InvalidValue("limit must be a whole number", "limit")
        if order not in ("asc", "desc"):
            raise InvalidValue("order must be asc or desc", "order")
        return Page(int(limit), self.query("after"), order == "desc")

    async def change(self, work: Callable[[Writer], dict[str, Any]]) -> Response:
        """Run a change and answer; a repeated request is answered as it was, and says so in a header."""
        return _changed(await self.desk.change(self.caller, work, self._idempotent()))

    async def change_books(
        self, enclosing: Enclosing[_Done], work: Callable[[Writer, _Done], dict[str, Any]]
    ) -> Response:
        """The same of a change of the books: it is committed with its record, or not at all."""
        return _changed(await self.desk.change_books(self.caller, enclosing, work, self._idempotent()))

    async def change_within(
        self, enclosing: Enclosing[_Done], work: Callable[[Writer, _Done], dict[str, Any]]
    ) -> Response:
        """The same of a change of another store on the same database."""
        return _changed(await self.desk.change_within(self.caller, enclosing, work, self._idempotent()))

    def _idempotent(self) -> IdempotentRequest | None:
        key = self.request.headers.get("idempotency-key")
        if key is None:
            return None
        if not (0 < len(key) <= MAX_IDEMPOTENCY_KEY and key.isascii() and key.isprintable()):
            raise InvalidValue(
                f"Idempotency-Key must be 1 to {MAX_IDEMPOTENCY_KEY} printable ASCII characters",
                "Idempotency-Key",
            )
        refuse_keys({"Idempotency-Key": key})
        asked = self.body.model_dump(mode="json", exclude_unset=True)
        # The path tells the endpoint and its target apart; ids can't hold a line break.
        text = f"{self.request.url.path}\n{json.dumps(asked, sort_keys=True)}"
        return IdempotentRequest(key, hashlib.sha256(text.encode()).digest())


def _changed(changed: Changed) -> Response:
    headers = {"idempotency-replayed": "true"} if changed.is_repeated else {}
    # A key's text must stay in no cache on the way.
    return JSONResponse(changed.answer, headers={"cache-control": "no-store", **headers})


def listed(items: list[dict[str, Any]], *, has_more: bool) -> Response:
    """A page of a list; `next` is the `after` of the page that follows."""
    following = items[-1]["id"] if has_more and items else None
    return JSONResponse({"object": "list", "data": items, "has_more": has_more, "next": following})


def listed_by_name(items: Iterable[dict[str, Any]], page: Page) -> Response:
    """A page of a list that is at hand as a whole, ordered by id; none is lost while others come."""
    ordered = sorted(items, key=lambda item: item["id"], reverse=page.is_newest_first)
    if page.after is not None:
        after = page.after
        ordered = [
            each for each in ordered if (each["id"] < after if page.is_newest_first else each["id"] > after)
        ]
    return listed(ordered[: page.limit], has_more=len(ordered) > page.limit)


async def answer(route: AdminRoute, desk: AdminDesk, gateway: Gateway, request: Request) -> Response:
    """Authenticate, let the role in, parse, act. A change that is refused is written down first.

    Raises:
        AuthenticationFailed: no live key; that leaves no record, for there is nobody to name.
        AccessDenied, NotFound, Conflict, InvalidValue, ValidationError: as the action says.
        StoreUnavailable: the database can't be asked.
    """
    principal = await gateway.authenticate(request, roles=None)
    caller = Caller(
        principal.key_id,
        principal.tenant_id,
        Role(principal.role),
        _source(request, desk.source_header),
        request.scope.get("footplate.request_id", ""),
    )
    try:
        require_role(caller.role, route.action)
        _check_query(request, route)
        body = await _body(request, route)
        return await route.handler(AdminExchange(route, gateway, desk, caller, request, body))
    except ClientDisconnect:
        raise
    except Exception as error:
        refusal = api_error(error)
        # One that failed by a fault of ours too. Without the database there is nowhere to write.
        if (route.is_change or route.is_audited) and not isinstance(error, StoreUnavailable):
            target = _target(request, gateway)
            await desk.note_refusal(
                AuditRecord(route.action, Outcome.REFUSED, caller, target, code=refusal.code)
            )
        raise


async def _body(request: Request, route: AdminRoute) -> Body:
    if route.body is None:
        return EmptyBody()
    data = await request.body()
    # What all may be left out of may be left out itself.
    is_optional = not any(info.is_required() for info in route.body.model_fields.values())
    data = data or b"{}" if is_optional else data
    body = parse_body(route.body, data)
    # Which of two values was meant nobody can say, and audit records would show one of them.
    json.loads(data, object_pairs_hook=_refuse_repeated)
    return body


def _refuse_repeated(pairs: list[tuple[str, Any]]) -> None:
    if len({name for name, _ in pairs}) < len(pairs):
        raise InvalidValue("an object in the body has one name twice; write each name once", "body")


def _check_query(request: Request, route: AdminRoute) -> None:
    for name in request.query_params:
        if name not in route.parameters:
            known = ", ".join(route.parameters) or "none"
            shown = name if name.isidentifier() and len(name) <= MAX_NAME_CHARACTERS else None
            raise UnsupportedParameter(
                f"This URL takes no such parameter; it takes {known}.", shown or "query"
            )
        if len(request.query_params.getlist(name)) > 1:
            raise InvalidValue(f"{name} is given twice; only one can be meant", name)


def _source(request: Request, header: str | None) -> str:
    """Where a request came from: what the proxy in front says, where there is one that we trust."""
    told = request.headers.get(header) if header is not None else None
    if told is not None:
        try:
            return str(ipaddress.ip_address(told))
        except ValueError:
            pass  # no address, so nothing that may be written down
    return request.client.host if request.client is not None else ""


def _path_id(request: Request, name: str, form: re.Pattern[str]) -> str:
    value = str(request.path_params[name])
    if not form.fullmatch(value):
        raise NotFound("there is no such tenant or key")
    return value


def _target(request: Request, gateway: Gateway) -> Target | None:
    """What a path names, if that can be an id, or is a model that is served."""
    parameters: Mapping[str, Any] = request.path_params
    if (model := str(parameters.get("model_name", ""))) in gateway.client.models():
        return Target(TargetKind.MODEL, model)
    tenant_id, key_id = str(parameters.get("tenant_id", "")), str(parameters.get("key_id", ""))
    if TENANT_ID.fullmatch(tenant_id):
        return Target(TargetKind.TENANT, tenant_id, tenant_id)
    if period_id := PERIOD_ID.fullmatch(str(parameters.get("period_id", ""))):
        return Target(TargetKind.PERIOD, period_id[0])
    return Target(TargetKind.KEY, key_id) if _KEY_ID.fullmatch(key_id) else None
