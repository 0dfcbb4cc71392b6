"""What is told of one request for a model: its spans and its GenAI metrics, made once, at its end.

chat MODEL                      the request's own work, from its tokens to its end
  footplate.attempt             one replica that was asked; more after a refusal, a loss, an escalation
    footplate.queue             until the engine took it into its batch
    footplate.prefill           until its first token
    footplate.decode            until its last one
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from footplate.billing.usage import EventState
from footplate.engine.types import SamplingParams
from footplate.platform.generation import RequestRun
from footplate.platform.metering import RequestFacts
from footplate.platform.ports import Journey, Placement
from footplate.platform.telemetry.genai_metrics import GenAiMetrics
from footplate.platform.telemetry.spans import RequestTrace, Span
from footplate.platform.telemetry.trace_context import new_span_id

_OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion"}
# Of one request with many prompts; the others are counted.
MAX_ATTEMPTS = 16
_OUTCOMES = {
    EventState.COMPLETED: "completed",
    EventState.CLIENT_CANCELLED: "client_cancelled",
    EventState.FAILED: "failed",
}


@dataclass(slots=True)
class InferenceRecord:
    """Of one request, from the making of its run on. `ended` is told before the run is closed."""

    trace: RequestTrace | None
    metrics: GenAiMetrics
    facts: RequestFacts
    span_id: bytes
    begun_at: float
    clock: Callable[[], float] = time.monotonic
    is_stream: bool = False
    admitted_at: float | None = None
    error: str | None = None
    _is_told: bool = False

    @staticmethod
    def begin(trace: RequestTrace | None, metrics: GenAiMetrics, facts: RequestFacts) -> InferenceRecord:
        """A request whose run is made now."""
        return InferenceRecord(trace, metrics, facts, new_span_id(), time.monotonic())

    @property
    def context(self) -> bytes:
        """The trace that engines are told of; empty: none."""
        return b"" if self.trace is None else self.trace.context(self.span_id)

    def ended(self, run: RequestRun, state: EventState | None) -> None:
        """It is over: in full, by its client, or by a failure whose class is in `error`."""
        if self._is_told:
            return
        self._is_told = True
        now = self.clock()
        state = state or EventState.FAILED
        error = "" if state is EventState.COMPLETED else self.error or state.value
        usage = run.usage()
        begun_at = self.begun_at if self.trace is None else self.trace.begun_at
        duration_s, first_s = now - begun_at, run.first_token_s
        num_after = usage.completion_tokens - 1
        key = (_OPERATIONS.get(self.facts.endpoint, ""), self.facts.requested_model, run.served_model, error)
        self.metrics.ended(
            key, duration_s, first_s,
            (duration_s - first_s) / num_after if first_s is not None and num_after > 0 else None,
        )  # fmt: skip
        if self.trace is not None and self.trace.is_recorded:
            self.trace.take(_spans(self, self.trace, run, state, error, now))


def _spans(
    record: InferenceRecord, trace: RequestTrace, run: RequestRun, state: EventState, error: str, now: float
) -> list[Span]:
    events = []
    if record.admitted_at is not None:
        events.append(("footplate.admitted", trace.unix_ns(record.admitted_at)))
    first_s = run.first_token_s
    if first_s is not None:
        events.append(("footplate.first_token", trace.unix_ns(record.begun_at + first_s)))
    attributes = _attributes(record, run, state, error)
    spans: list[Span] = []
    placed = [(journey, placement) for journey in run.journeys for placement in journey.placements]
    for number, (journey, placement) in enumerate(placed[:MAX_ATTEMPTS]):
        spans += _attempt(record, trace, journey, placement, number, now)
    if len(placed) > MAX_ATTEMPTS:
        attributes["footplate.attempts_left_out"] = len(placed) - MAX_ATTEMPTS
    operation = _OPERATIONS.get(record.facts.endpoint, "")
    spans.append(
        Span(
            trace.trace_id,
            record.span_id,
            trace.span_id,
            operation,
            trace.unix_ns(record.begun_at),
            trace.unix_ns(now),
            attributes,
            record.facts.requested_model,
            events=events,
            is_error=state is EventState.FAILED,
        )
    )
    return spans


def _attributes(record: InferenceRecord, run: RequestRun, state: EventState, error: str) -> dict[str, Any]:
    facts, usage = record.facts, run.usage()
    params = run.prompts[0].request.params
    reasons = {
        choice.decoder.finish_reason
        for prompt in run.prompts
        for choice in prompt.choices
        if choice.decoder.finish_reason is not None
    }
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": _OPERATIONS.get(facts.endpoint, ""),
        "gen_ai.provider.name": "footplate",
        "gen_ai.request.model": facts.requested_model,
        "gen_ai.response.model": run.served_model,
        "gen_ai.request.stream": record.is_stream,
        **_asked(params),
        "gen_ai.response.finish_reasons": tuple(sorted(reason.value for reason in reasons)),
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "footplate.request.id": facts.request_id,
        "footplate.tenant.id": facts.principal.tenant_id,
        "footplate.key.id": facts.principal.key_id,
        "footplate.outcome": _OUTCOMES[state],
    }
    if run.first_token_s is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = run.first_token_s
    if facts.line is not None:
        attributes["footplate.batch.id"] = str(facts.line.batch_id)
    if len(run.prompts) > 1:
        attributes["footplate.prompts"] = len(run.prompts)
    if error:
        attributes["error.type"] = error
    return attributes


def _asked(params: SamplingParams) -> Mapping[str, Any]:
    """What differs from saying nothing."""
    asked: dict[str, Any] = {"gen_ai.request.temperature": params.temperature}
    if params.max_tokens is not None:
        asked["gen_ai.request.max_tokens"] = params.max_tokens
    for name, value, default in (
        ("gen_ai.request.top_p", params.top_p, 1.0),
        ("gen_ai.request.top_k", params.top_k, 0),
        ("gen_ai.request.frequency_penalty", params.frequency_penalty, 0.0),
        ("gen_ai.request.presence_penalty", params.presence_penalty, 0.0),
        ("gen_ai.request.choice.count", params.n, 1),
    ):
        if value != default:
            asked[name] = value
    return asked


def _attempt(
    record: InferenceRecord,
    trace: RequestTrace,
    journey: Journey,
    placement: Placement,
    number: int,
    now: float,
) -> list[Span]:
    begin_ns = trace.unix_ns(placement.asked_at)
    end_ns = trace.unix_ns(now if placement.ended_at is None else placement.ended_at)
    attributes: dict[str, Any] = {
        "gen_ai.request.model": journey.model,
        "footplate.replica": placement.replica,
        "footplate.outcome": placement.outcome,
    }
    if placement.reason:
        attributes["footplate.reason"] = placement.reason
    if number:
        attributes["footplate.retry_count"] = number
    own_id = new_span_id()
    is_error = placement.outcome in ("lost", "failed")
    spans = [
        Span(
            trace.trace_id, own_id, record.span_id, "footplate.attempt", begin_ns, end_ns, attributes,
            is_error=is_error,
        )
    ]  # fmt: skip
    begun = placement.begun
    if begun is None:
        return spans
    # By the engine's wall clock, moved as little as need be to lie inside what is seen from here.
    queue_ns, prefill_ns = int(begun.queue_s * 1e9), int(begun.prefill_s * 1e9)
    latest = max(begin_ns, end_ns - queue_ns - prefill_ns)
    at = min(max(begun.arrived_unix_ns, begin_ns), latest)
    for verb, until in (
        ("footplate.queue", at + queue_ns),
        ("footplate.prefill", at + queue_ns + prefill_ns),
        ("footplate.decode", max(end_ns, at + queue_ns + prefill_ns)),
    ):
        spans.append(Span(trace.trace_id, new_span_id(), own_id, verb, at, until))
        at = until
    return spans
