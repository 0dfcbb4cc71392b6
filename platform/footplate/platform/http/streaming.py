"""Answers of running generations: a server-sent stream or one body, both ended by the client's leaving."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Generic, Protocol, TypeVar

import msgspec
from starlette.responses import Response

from footplate.engine.types import TokenUsage
from footplate.platform.admitted_run import AdmittedRun
from footplate.platform.errors import AnswerNotRead
from footplate.platform.generation import Sink
from footplate.platform.http.edge import Receive, Scope, Send, note_failure, note_model
from footplate.platform.http.errors import api_error
from footplate.platform.http.limit_headers import limit_headers

DONE = b"data: [DONE]\n\n"
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


# How large work is done beside the event loop.
Apart = Callable[[Callable[[], bytes]], Awaitable[bytes]]


class StreamSink(Sink, Protocol):
    """A sink that turns pieces into server-sent events, appended to `out` as parts of bytes.

    What makes large events is appended to `late` instead; they go out before what is in `out` by then.
    """

    out: list[bytes]
    late: list[Callable[[], bytes]]

    def last(self, usage: TokenUsage) -> None:
        """Append what comes after all choices have ended."""
        ...


class BodySink(Sink, Protocol):
    """A sink that gathers pieces for one JSON body."""

    @property
    def is_large(self) -> bool:
        """Whether its body is to be made beside the event loop."""
        ...

    def body(self, usage: TokenUsage) -> dict[str, Any]: ...


_AnySink = TypeVar("_AnySink", bound=Sink)


class _RunResponse(Response, ABC, Generic[_AnySink]):
    """Runs the request when it is called, so that refusals still become plain error answers.

    `sinks`: one for each model that may answer, by its name.
    """

    def __init__(self, run: AdmittedRun, sinks: Mapping[str, _AnySink], apart: Apart) -> None:
        super().__init__()
        self._run = run
        self._sinks = sinks
        self._apart = apart

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with until_disconnect(receive):
                await self._run.open()
                note_model(scope, self._run.served_model)
                await self._answer(scope, send, self._sinks[self._run.served_model])
        finally:
            await self._run.close()

    @abstractmethod
    async def _answer(self, scope: Scope, send: Send, sink: _AnySink) -> None: ...


class BodyResponse(_RunResponse[BodySink]):
    """The whole answer at once."""

    async def _answer(self, scope: Scope, send: Send, sink: BodySink) -> None:
        await self._run.drain(sink)
        usage = self._run.usage()

        def work() -> bytes:
            return msgspec.json.encode(sink.body(usage))

        body = await self._apart(work) if sink.is_large else work()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            *_told(self._run),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class StreamResponse(_RunResponse[StreamSink]):
    """Server-sent events; all that is pending goes out in one send."""

    async def _answer(self, scope: Scope, send: Send, sink: StreamSink) -> None:
        out, late = sink.out, sink.late
        self._run.record.is_stream = True

        async def flush() -> None:
            if out or late:
                body = b"".join(out)
                out.clear()
                if late:
                    makers = late.copy()
                    late.clear()
                    body = await self._apart(lambda: b"".join(make() for make in makers)) + body
                await send({"type": "http.response.body", "body": body, "more_body": True})

        headers = [*_STREAM_HEADERS, *_told(self._run)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            await self._run.drain(sink, flush)
            sink.last(self._run.usage())
        except AnswerNotRead:
            raise  # an error event would not be read either
        except Exception as error:
            note_failure(scope, error)
            out.append(b"data: " + api_error(error).encode() + b"\n\n")
        out.append(DONE)
        await send({"type": "http.response.body", "body": b"".join(out)})


def _told(run: AdmittedRun) -> list[tuple[bytes, bytes]]:
    headers = limit_headers(run.states)
    if run.is_routed:
        headers.append((b"x-footplate-model", run.served_model.encode()))
    return [*headers, (b"x-footplate-budget", b"soft_exceeded")] if run.is_over_soft_budget else headers


@asynccontextmanager
async def until_disconnect(receive: Receive) -> AsyncIterator[None]:
    """Run the block until it ends or the client leaves; then it is cancelled and nothing is raised.

    The request's body must have been read. Cancelling costs nothing while tokens flow, where waiting for two
    things at once would cost a task a token.
    """
    owner = asyncio.current_task()
    assert owner is not None
    has_left = False

    async def watch() -> None:
        nonlocal has_left
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                has_left = True
                owner.cancel()
                return

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        # Somebody else (a server that shuts down) may have cancelled too: then it stays cancelled.
        if not has_left or owner.uncancel() > 0:
            raise
    finally:
        watcher.cancel()
