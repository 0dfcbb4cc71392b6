"""The outermost layer: request ids, timing, body limits, and an answer for every failure. Plain ASGI."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import structlog

from footplate.platform.errors import AnswerNotRead, BodyEncoded, BodyTooLarge, BodyTooSlow
from footplate.platform.http.body_room import BodyRoom
from footplate.platform.http.errors import api_error
from footplate.platform.ports import Principal
from footplate.platform.telemetry.spans import CURRENT, SERVER, RequestTrace, Tracer

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_FAILURE, _MODEL, _CALLER = "footplate.failure", "footplate.model", "footplate.principal"
TRACE = "footplate.trace"
# What probes and scrapers ask all the time.
_UNTRACED = frozenset({"/health", "/healthz", "/readyz", "/metrics"})

_log = structlog.get_logger("footplate.edge")


@dataclass(frozen=True, slots=True)
class EdgeLimits:
    """How large a body may be, how long it may take to come, and how long a client may read nothing.

    `max_held_bytes`: of all bodies that a gateway holds at once, the default's for all endpoints. Not
    `is_held`: who reads this endpoint's bodies keeps no more than a piece.
    """

    max_body_bytes: int = 8 << 20
    max_body_s: float = 60.0
    max_stall_s: float = 60.0
    max_held_bytes: int = 256 << 20
    is_held: bool = True


def note_failure(scope: Scope, error: Exception) -> None:
    """Say why a request fails whose answer has begun: the edge writes the one line of every 5xx."""
    scope[_FAILURE] = error


def note_model(scope: Scope, model: str) -> None:
    """Say which served model a request is for (never a name that a client made up)."""
    scope[_MODEL] = model


def note_caller(scope: Scope, principal: Principal) -> None:
    """Say who asks, now that a key is known; only such a client has a say on its trace."""
    scope[_CALLER] = principal
    trace = scope.get(TRACE)
    if trace is not None:
        trace.heed_client()


class Edge:
    """Wraps an ASGI app. Every HTTP response gets `x-request-id` and `openai-processing-ms`.

    An exception that reaches this layer before the response has begun becomes an error answer; later ones end
    the connection. Every 5xx, in a status or in an error event, leaves exactly one line in the log; it names
    the exception's class, never its text: texts can quote what a client sent. Each request is a span, in the
    client's trace where it sends a `traceparent`; until a key is known only the ratio says if it is recorded.
    """

    def __init__(
        self,
        app: App,
        limits: EdgeLimits | None = None,
        clock: Callable[[], float] = time.perf_counter,
        own_limits: Mapping[tuple[str, str], EdgeLimits] | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self._app = app
        self._tracer = tracer or Tracer()
        self._limits = limits or EdgeLimits()
        self._room = BodyRoom(self._limits.max_held_bytes)
        # Of single endpoints, by method and path: for uploads.
        self._own_limits = own_limits or {}
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limits = self._own_limits.get((scope["method"], scope["path"]), self._limits)
        exchange = _Exchange(send, limits.max_stall_s, self._clock)
        scope["footplate.request_id"] = exchange.request_id
        body = _BoundedBody(receive, scope, limits, self._room)
        trace = self._tracer.begin(exchange.request_id, _traceparent(scope))
        if scope["path"] in _UNTRACED:
            trace.leave_out()
        scope[TRACE] = trace
        before = CURRENT.set(trace)
        try:
            await self._app(scope, body.receive, exchange.send)
        except Exception as error:
            note_failure(scope, error)
            if exchange.has_begun:
                raise ConnectionAbortedError("the answer broke off") from None
            await api_error(error).response()(scope, receive, exchange.send)
        finally:
            body.let_go()
            _log_failure(scope, exchange)
            if trace.is_recorded:
                _end_span(scope, exchange, trace)
            CURRENT.reset(before)


class _Exchange:
    """One response: its id and its clock."""

    def __init__(self, send: Send, max_stall_s: float, clock: Callable[[], float]) -> None:
        self.request_id = "req_" + secrets.token_hex(12)
        self.status = 0
        self._send = send
        self._max_stall_s = max_stall_s
        self._clock = clock
        self._begin = clock()

    @property
    def has_begun(self) -> bool:
        return self.status > 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            elapsed_ms = round((self._clock() - self._begin) * 1000)
            message["headers"] = [
                *message.get("headers", ()),
                (b"x-request-id", self.request_id.encode()),
                (b"openai-processing-ms", b"%d" % elapsed_ms),
            ]
        # The server holds a send back while the client reads nothing.
        try:
            async with asyncio.timeout(self._max_stall_s):
                await self._send(message)
        except TimeoutError:
            raise AnswerNotRead(f"Nothing of the answer was read for {self._max_stall_s:g} s.") from None


def _log_failure(scope: Scope, exchange: _Exchange) -> None:
    error = scope.get(_FAILURE)
    answer = api_error(error) if error is not None else None
    status = exchange.status if answer is None else answer.status
    if status < 500:
        return
    _log.error(
        "request failed",
        request_id=exchange.request_id,
        status=status,
        # What the client saw first: below 400 the failure went out as an event of a stream that had begun.
        sent_status=exchange.status,
        type="server_error" if answer is None else answer.type,
        code=None if answer is None else answer.code,
        error=None if error is None else type(error).__name__,
        model=scope.get(_MODEL),
        # The route's own pattern: what a client wrote in a path can be content.
        route=getattr(scope.get("route"), "path", ""),
    )


def _end_span(scope: Scope, exchange: _Exchange, trace: RequestTrace) -> None:
    """The request's own span. Its route is our pattern, never what a client wrote in a path."""
    error, caller = scope.get(_FAILURE), scope.get(_CALLER)
    status = exchange.status if error is None else api_error(error).status
    route = getattr(scope.get("route"), "path", "")
    attributes: dict[str, Any] = {"http.request.method": scope["method"]}
    if exchange.status:
        attributes["http.response.status_code"] = exchange.status
    if route:
        attributes["http.route"] = route
    if caller is not None:
        attributes["footplate.tenant.id"] = caller.tenant_id
        attributes["footplate.key.id"] = caller.key_id
    if error is not None:
        attributes["error.type"] = type(error).__name__
    elif status >= 500:
        attributes["error.type"] = str(status)
    trace.end(scope["method"], route, attributes, kind=SERVER, is_error=status >= 500)


def _traceparent(scope: Scope) -> bytes | None:
    """The header, where there is exactly one."""
    found = [value for name, value in scope.get("headers", ()) if name == b"traceparent"]
    return found[0] if len(found) == 1 else None


class _BoundedBody:
    """A request's body that raises once it is too large or too slow, before more of it is read.

    One that is compressed raises at once: it would be taken for broken JSON. What has come counts in `room`
    until `let_go`.
    """

    def __init__(self, receive: Receive, scope: Scope, limits: EdgeLimits, room: BodyRoom) -> None:
        self._receive = receive
        self._scope = scope
        self._room = room if limits.is_held else None
        self._tenant_id, self._num_held = "", 0
        self._announced = _content_length(scope)
        self._is_encoded = _is_encoded(scope)
        self._max_bytes = limits.max_body_bytes
        self._max_s = limits.max_body_s
        self._num_bytes = 0
        self._deadline: float | None = None
        self._is_complete = False

    async def receive(self) -> Message:
        if self._is_complete:
            return await self._receive()
        if self._is_encoded:
            raise BodyEncoded("Content-Encoding is not supported; send the body as it is.")
        if self._announced is not None and self._announced > self._max_bytes:
            raise self._too_large()
        loop = asyncio.get_running_loop()
        if self._deadline is None:
            self._deadline = loop.time() + self._max_s
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            raise BodyTooSlow(f"The body did not arrive within {self._max_s:g} s.") from None
        if message["type"] == "http.request":
            num_bytes = len(message.get("body", b""))
            self._num_bytes += num_bytes
            if self._num_bytes > self._max_bytes:
                raise self._too_large()
            self._hold(num_bytes)
            self._is_complete = not message.get("more_body", False)
        return message

    def let_go(self) -> None:
        """The request is over."""
        if self._room is not None and self._num_held:
            self._room.give_back(self._tenant_id, self._num_held)
        self._num_held = 0

    def _hold(self, num_bytes: int) -> None:
        """Raises NoRoomForBody. Endpoints that read a body have said by then whose it is."""
        if self._room is None:
            return
        caller = self._scope.get(_CALLER)
        if not self._num_held:
            self._tenant_id = "" if caller is None else caller.tenant_id
        self._room.take(self._tenant_id, num_bytes)
        self._num_held += num_bytes

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(f"The body is larger than {self._max_bytes} bytes.")


def _is_encoded(scope: Scope) -> bool:
    found = [value for name, value in scope.get("headers", ()) if name == b"content-encoding"]
    return any(value.strip().lower() not in (b"", b"identity") for value in found)


def _content_length(scope: Scope) -> int | None:
    for name, value in scope.get("headers", ()):
        if name == b"content-length":
            return int(value) if value.isdigit() else None
    return None
