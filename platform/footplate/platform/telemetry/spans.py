"""Spans as plain values, and the trace of one request: what the rest of the platform knows of tracing.

A span is made in one go when its end is known, and handed to a sink that never waits. Nothing is done while
tokens flow.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

from footplate.platform.telemetry.trace_context import TraceContext, is_chosen, new_span_id, new_trace_id

INTERNAL, SERVER = 1, 2


@dataclass(slots=True)
class Span:
    """One piece of work. `verb` and `subject` make its name; times are unix nanoseconds.

    Names and values meet the allow-list where a span is written, not here. Nobody changes one; a frozen class
    would say so, and takes three times as long to make.
    """

    trace_id: bytes
    span_id: bytes
    parent_id: bytes
    verb: str
    begin_ns: int
    end_ns: int
    attributes: Mapping[str, Any] = field(default_factory=dict)
    subject: str = ""
    kind: int = INTERNAL
    events: Sequence[tuple[str, int]] = ()
    is_error: bool = False


class SpanSink(Protocol):
    """Where spans go."""

    def take(self, spans: Sequence[Span], is_forced: bool = False) -> None:
        """Take spans at once, or drop and count them; never waits, never raises.

        `is_forced`: only a client's flag had them recorded; they may not take the room of others.
        """
        ...


class RequestTrace:
    """One request's place in a trace. `span_id` is the span of the request itself.

    One that isn't recorded still has its ids, for log lines. `asked`: what the client's flag says, with the
    sink that takes what only the flag has recorded; it counts from `heed_client` on.
    """

    __slots__ = (
        "_asked",
        "_base_ns",
        "_is_forced",
        "_sink",
        "begun_at",
        "parent_id",
        "request_id",
        "span_id",
        "trace_id",
    )

    def __init__(
        self,
        request_id: str,
        came: TraceContext | None,
        sink: SpanSink | None,
        asked: tuple[bool, SpanSink | None] | None = None,
    ) -> None:
        self.request_id = request_id
        self.trace_id = new_trace_id() if came is None else came.trace_id
        self.parent_id = b"" if came is None else came.span_id
        self.span_id = new_span_id()
        self._sink = sink
        self._asked = asked
        self._is_forced = False
        self.begun_at = time.monotonic()
        self._base_ns = time.time_ns() - int(self.begun_at * 1e9)

    @property
    def is_recorded(self) -> bool:
        """Whether its spans go anywhere."""
        return self._sink is not None

    def pass_over(self) -> None:
        """Record nothing of it unless its client has a say and asks for it."""
        self._sink = None

    def leave_out(self) -> None:
        """Record nothing of it, whatever its client asks for."""
        self._sink = self._asked = None

    def heed_client(self) -> None:
        """Somebody whose key is known sent the request: from here on the client's flag decides."""
        if self._asked is None:
            return
        is_sampled, sink = self._asked
        self._asked = None
        if not is_sampled:
            self._sink = None
        elif self._sink is None:
            self._sink, self._is_forced = sink, True

    def unix_ns(self, at: float) -> int:
        """Of a moment on the monotonic clock, by the wall clock as it was when the request came."""
        return self._base_ns + int(at * 1e9)

    def context(self, span_id: bytes) -> bytes:
        """What goes to whoever works on a span of this trace, on the wire."""
        return TraceContext(self.trace_id, span_id, self.is_recorded).to_wire()

    def take(self, spans: Sequence[Span]) -> None:
        """Hand spans on."""
        if self._sink is not None:
            self._sink.take(spans, self._is_forced)

    def end(
        self, verb: str, subject: str, attributes: Mapping[str, Any], *, kind: int, is_error: bool
    ) -> None:
        """The request's own span, now that it is over."""
        if self._sink is None:
            return
        span = Span(
            self.trace_id,
            self.span_id,
            self.parent_id,
            verb,
            self.unix_ns(self.begun_at),
            self.unix_ns(time.monotonic()),
            {**attributes, "footplate.request.id": self.request_id},
            subject,
            kind,
            (),
            is_error,
        )
        self._sink.take((span,), self._is_forced)


# For log lines, which nobody hands a request to.
CURRENT: ContextVar[RequestTrace | None] = ContextVar("footplate_trace", default=None)


class Tracer:
    """Begins traces. Without a sink nothing is recorded.

    `ratio` decides which are. With `trusts_client` the flag of a client's `traceparent` decides instead, from
    when its key is known; without, the flag counts for nothing. The ids are the client's in any case.
    """

    def __init__(
        self, sink: SpanSink | None = None, ratio: float = 1.0, *, trusts_client: bool = True
    ) -> None:
        self._sink = sink
        self._ratio = ratio
        self._trusts_client = trusts_client

    def begin(self, request_id: str, traceparent: bytes | None = None) -> RequestTrace:
        """The trace of a request that has just come."""
        came = None if traceparent is None else TraceContext.from_header(traceparent)
        asked = (came.is_sampled, self._sink) if came is not None and self._trusts_client else None
        trace = RequestTrace(request_id, came, self._sink, asked)
        # By an id of ours: who makes up a trace's id could make up one that is chosen.
        if not is_chosen(trace.trace_id if came is None else trace.span_id, self._ratio):
            trace.pass_over()
        return trace
