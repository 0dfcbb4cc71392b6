"""Answers of running generations: a server-sent stream or one body, both ended by the client's leaving."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Protocol

import msgspec
from starlette.responses import Response

from footplate.engine.types import TokenUsage
from footplate.platform.admitted_run import AdmittedRun
from footplate.platform.errors import AnswerNotRead
from footplate.platform.generation import Sink
from footplate.platform.http.edge import Receive, Scope, Send, note_failure
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


class _RunResponse(Response, ABC):
    """Runs the request when it is called, so that refusals still become plain error answers."""

    def __init__(self, run: AdmittedRun) -> None:
        super().__init__()
        self._run = run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with until_disconnect(receive):
                await self._run.open()
                await self._answer(scope, send)
        finally:
            await self._run.close()

    @abstractmethod
    async def _answer(self, scope: Scope, send: Send) -> None: ...


class BodyResponse(_RunResponse):
    """The whole answer at once."""

    def __init__(self, run: AdmittedRun, sink: BodySink, apart: Apart) -> None:
        super().__init__(run)
        self._sink = sink
        self._apart = apart

    async def _answer(self, scope: Scope, send: Send) -> None:
        await self._run.drain(self._sink)
        usage = self._run.usage()

        def work() -> bytes:
            return msgspec.json.encode(self._sink.body(usage))

        body = await self._apart(work) if self._sink.is_large else work()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            *_told(self._run),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class StreamResponse(_RunResponse):
    """Server-sent events; all that is pending goes out in one send."""

    def __init__(self, run: AdmittedRun, sink: StreamSink, apart: Apart) -> None:
        super().__init__(run)
        self._sink = sink
        self._apart = apart

    async def _answer(self, scope: Scope, send: Send) -> None:
        out, late = self._sink.out, self._sink.late

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
            await self._run.drain(self._sink, flush)
            self._sink.last(self._run.usage())
        except AnswerNotRead:
            raise  # an error event would not be read either
        except Exception as error:
            note_failure(scope, error)
            out.append(b"data: " + api_error(error).encode() + b"\n\n")
        out.append(DONE)
        await send({"type": "http.response.body", "body": b"".join(out)})


def _told(run: AdmittedRun) -> list[tuple[bytes, bytes]]:
    headers = limit_headers(run.states)
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
