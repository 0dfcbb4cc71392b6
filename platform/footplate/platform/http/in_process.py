"""Requests that the platform makes of its own endpoints for a key: past the network, not past a rule.

An endpoint sees a request like any other. Who asks stands in its scope, where no client can write.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import structlog
from starlette.requests import Request

from footplate.platform.admitted_run import AdmittedRun
from footplate.platform.http.edge import TRACE, Message
from footplate.platform.http.errors import api_error
from footplate.platform.http.straight_path import Route, StraightEndpoint
from footplate.platform.metering import LineAttempt
from footplate.platform.ports import Principal
from footplate.platform.telemetry.spans import CURRENT, INTERNAL, RequestTrace, Tracer

CALLER = "footplate.caller"
_log = structlog.get_logger("footplate.batches")


@dataclass(slots=True, eq=False)
class InProcessCaller:
    """Who asks, and for which attempt at a line. `run` is the request's, once there is one."""

    principal: Principal
    line: LineAttempt
    run: AdmittedRun | None = None
    tracer: Tracer = field(default_factory=Tracer)


@dataclass(frozen=True, slots=True)
class InProcessAnswer:
    """What a client would have got. Names of headers are in lower case."""

    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


async def ask_in_process(
    endpoint: StraightEndpoint,
    request: tuple[str, str, bytes],
    caller: InProcessCaller,
    leave: asyncio.Event,
    keep: Callable[[bytes], Awaitable[None]],
) -> InProcessAnswer | None:
    """POST to an endpoint; `request`: its path, the request's id, the body. None: `leave` was set first.

    A whole answer goes to `keep` before the run's end is metered, and what that raises is raised here.
    """
    path, request_id, body = request
    trace = caller.tracer.begin(request_id)
    scope: dict[str, Any] = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "client": None,
        "server": None,
        "route": Route(path),
        "footplate.request_id": request_id,
        CALLER: caller,
        TRACE: trace,
    }
    exchange = _Exchange(body, leave, keep)
    before = CURRENT.set(trace)
    try:
        response = await endpoint(Request(scope, exchange.receive))
        await response(scope, exchange.receive, exchange.send)
    except _NotKept as error:
        raise error.cause from None
    except Exception as error:
        found = api_error(error)
        if found.status >= 500:
            _log.error(
                "a line of a batch failed",
                request_id=request_id,
                status=found.status,
                type=found.type,
                code=found.code,
                error=type(error).__name__,
                route=path,
            )
        headers = {name.lower(): value for name, value in found.headers.items()}
        _end_span(trace, caller, found.status, type(error).__name__)
        return InProcessAnswer(found.status, found.encode(), headers)
    finally:
        CURRENT.reset(before)
    _end_span(trace, caller, 0 if exchange.answer is None else exchange.answer.status)
    return exchange.answer


def _end_span(trace: RequestTrace, caller: InProcessCaller, status: int, error: str = "") -> None:
    """One attempt at a line is a trace of its own: its batch may last a day."""
    attributes: dict[str, Any] = {
        "footplate.batch.id": str(caller.line.batch_id),
        "footplate.tenant.id": caller.principal.tenant_id,
        "footplate.key.id": caller.principal.key_id,
    }
    if status:
        attributes["http.response.status_code"] = status
    if error:
        attributes["error.type"] = error
    is_error = status >= 500
    trace.end("footplate.batch_line", "", attributes, kind=INTERNAL, is_error=is_error)


class _NotKept(Exception):
    """The answer is there and could not be kept: not the request's fault."""

    def __init__(self, cause: Exception) -> None:
        super().__init__()
        self.cause = cause


class _Exchange:
    """Both ends of one request, as an ASGI server would hold them."""

    def __init__(self, body: bytes, leave: asyncio.Event, keep: Callable[[bytes], Awaitable[None]]) -> None:
        self.answer: InProcessAnswer | None = None
        self._body: bytes | None = body
        self._leave = leave
        self._keep = keep
        self._status = 0
        self._headers: dict[str, str] = {}
        self._parts: list[bytes] = []

    async def receive(self) -> Message:
        body, self._body = self._body, None
        if body is not None:
            return {"type": "http.request", "body": body, "more_body": False}
        await self._leave.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._headers = {
                name.decode("latin-1").lower(): value.decode("latin-1")
                for name, value in message.get("headers", ())
            }
            return
        self._parts.append(message.get("body", b""))
        if message.get("more_body", False):
            return
        body = b"".join(self._parts)
        if self._status == 200:
            try:
                await self._keep(body)
            except Exception as error:
                raise _NotKept(error) from error
        self.answer = InProcessAnswer(self._status, body, self._headers)
