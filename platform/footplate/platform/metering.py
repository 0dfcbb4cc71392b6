"""From requests to usage events: what is known at admission, how far it has come, and how it ended.

A request's event has the id that the client is told as `x-request-id`: what a bill shows can be asked for by
the id that stands in the client's own log, and the engines' journals begin theirs with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol

from footplate.billing.errors import InvalidUsage
from footplate.billing.usage import (
    Attempt,
    AttemptOutcome,
    BatchId,
    EventId,
    EventSkeleton,
    EventState,
    KeyId,
    ModelName,
    Progress,
    TenantId,
    TokenCounts,
    UsageEvent,
    split_input,
)
from footplate.engine.types import ModelCard
from footplate.platform.errors import MeteringUnavailable
from footplate.platform.generation import PromptUsage, RequestRun
from footplate.platform.ports import Principal
from footplate.platform.usage_metrics import UsageMetrics
from footplate.routing.cascade import Cascade
from footplate.tenancy.limiter.reservations import LostRequest

_LOGGER = logging.getLogger(__name__)
_OUTCOMES = {
    EventState.COMPLETED: AttemptOutcome.COMPLETED,
    EventState.CLIENT_CANCELLED: AttemptOutcome.CANCELLED,
    EventState.FAILED: AttemptOutcome.FAILED,
}


class EventSink(Protocol):
    """Where events go; `footplate.billing.event_writer.EventWriter` is one."""

    @property
    def may_begin(self) -> bool:
        """Whether new work may begin: its event would be kept."""
        ...

    def take(self, event: UsageEvent) -> asyncio.Future[Any]:
        """Take an event at once; the future is done when it is durable."""
        ...


@dataclass(slots=True, eq=False)
class LineAttempt:
    """One attempt at a line of a batch: the line is one event, however often it is begun.

    Whoever runs it knows more of its end than the run does. While another attempt may follow, whatever this
    one used is an estimate of what the line costs, and the count of the answer that is kept mends it.
    """

    event_id: EventId
    batch_id: BatchId
    # Its answer is kept, or the line is not begun again.
    is_final: bool = False


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What an event says of a request beside its tokens.

    `request_id` is what reservations and engines know it by, and never used twice. The event's id is the same
    unless this is an attempt at a batch's `line`.
    """

    request_id: str
    principal: Principal
    # The name that the client wrote, which is known by then, and what it led to.
    requested_model: str
    card: ModelCard
    endpoint: str
    idempotency_key: str | None = None
    line: LineAttempt | None = None
    # The route that the name stands for.
    cascade: Cascade | None = None

    @property
    def event_id(self) -> EventId:
        """Of the one event that it becomes, or of the line's."""
        return EventId(self.request_id) if self.line is None else self.line.event_id


def utc_now() -> datetime:
    """The clock of production."""
    return datetime.now(UTC)


class Metering:
    """Makes events and hands them on. One event loop owns it."""

    def __init__(
        self,
        sink: EventSink,
        now: Callable[[], datetime] = utc_now,
        metrics: UsageMetrics | None = None,
    ) -> None:
        self.sink = sink
        self.now = now
        self.metrics = metrics or UsageMetrics()

    def check_room(self) -> None:
        """Refuse new work rather than lose its event.

        Raises:
            MeteringUnavailable: neither database nor disk takes events, or more wait than memory may hold.
        """
        if not self.sink.may_begin:
            raise MeteringUnavailable("Usage can't be recorded now, so nothing new begins; try again.")

    def begin(self, facts: RequestFacts, num_prompt_tokens: int) -> EventSkeleton:
        """What is known of a request that is about to be admitted."""
        principal = facts.principal
        return EventSkeleton(
            facts.event_id,
            TenantId(principal.tenant_id),
            KeyId(principal.key_id),
            ModelName(facts.requested_model),
            ModelName(facts.card.name),
            facts.endpoint,
            self.now(),
            num_prompt_tokens,
            principal.cost_center,
            principal.labels,
            None if facts.line is None else facts.line.batch_id,
        )

    def progress(self, skeleton: EventSkeleton, run: RequestRun) -> bytes:
        """How far a request has come, for whoever finds that this gateway is gone."""
        everything = run.usages()
        usages = [usage for usage in everything if not usage.is_left]
        served = ModelName(run.served_model)
        return Progress(
            served,
            sum(usage.output for usage in usages),
            sum(usage.cached for usage in usages),
            _first_token_at(skeleton, run),
            usages[0].engine if usages else "",
            None if served == skeleton.target_model else run.usage().prompt_tokens,
            tuple(_left(usage) for usage in everything if usage.is_left),
        ).to_bytes()

    def end(
        self,
        skeleton: EventSkeleton,
        run: RequestRun,
        state: EventState,
        *,
        is_exact: bool,
        is_final: bool = True,
    ) -> UsageEvent:
        """The event of a request that an engine had begun. Not `is_final`: a later count may mend it.

        A prompt counts in full once an engine has it, cached tokens apart, and the answer as far as it came.
        Of a request that failed without a token of an answer nothing counts. What a route's other model had
        begun stands beside the answer, for the platform to know what it cost; nobody is billed for it.
        """
        everything = run.usages()
        usages = [usage for usage in everything if not usage.is_left]
        left = [usage for usage in everything if usage.is_left]
        is_free = state is EventState.FAILED and not any(usage.output for usage in usages)
        served = ModelName(run.served_model)
        attempts = tuple(
            Attempt(
                served,
                usage.engine,
                _OUTCOMES[state],
                TokenCounts() if is_free else _tokens(usage),
                usage.reason,
            )
            for usage in usages
        )
        is_known = is_free or (is_exact and all(map(_is_plausible, usages)))
        return skeleton.end(
            state,
            sum((attempt.tokens for attempt in attempts), TokenCounts()),
            self.now(),
            served_model=served,
            is_estimated=not (is_final and is_known and all(map(_is_plausible, left))),
            first_token_at=_first_token_at(skeleton, run),
            attempts=(*map(_left, left), *attempts),
        )


class LostRequestMeter:
    """Writes the events of requests whose gateways died; see `LostPort` of the limiter's reaper."""

    def __init__(self, metering: Metering) -> None:
        self._metering = metering
        self.num_unreadable = 0

    async def take_care(self, lost: Sequence[LostRequest]) -> None:
        """Returns when all their events are durable. The same event again changes nothing."""
        found_at = self._metering.now()
        taken = []
        for request in lost:
            try:
                taken.append(self._metering.sink.take(_lost_event(request, found_at)))
            except InvalidUsage:
                self.num_unreadable += 1
                _LOGGER.error("what was noted of a lost request can't be read; it is in no bill")
        await asyncio.gather(*taken)


def _lost_event(request: LostRequest, found_at: datetime) -> UsageEvent:
    """Its prompt at least: one whose progress can't be read isn't free. Raises InvalidUsage for its note."""
    skeleton = EventSkeleton.from_bytes(request.note)
    try:
        progress = Progress.from_bytes(request.progress) if request.progress else None
        return skeleton.lost(progress, found_at)
    except InvalidUsage:
        _LOGGER.error("how far a lost request had come can't be read; its prompt alone is billed")
        return skeleton.lost(None, found_at)


def _left(usage: PromptUsage) -> Attempt:
    """An attempt at a model that another answered in place of."""
    outcome = AttemptOutcome.FAILED if usage.has_failed else AttemptOutcome.ESCALATED
    assert usage.model is not None, "runs name their models"
    return Attempt(ModelName(usage.model), usage.engine, outcome, _tokens(usage), usage.reason)


def _is_plausible(usage: PromptUsage) -> bool:
    return usage.is_exact and usage.cached <= usage.prompt


def _tokens(usage: PromptUsage) -> TokenCounts:
    """An engine that counts more cached tokens than the prompt has is wrong, and its event still made."""
    return split_input(usage.prompt, min(usage.cached, usage.prompt), usage.output)


def _first_token_at(skeleton: EventSkeleton, run: RequestRun) -> datetime | None:
    first_s = run.first_token_s
    return None if first_s is None else skeleton.started_at + timedelta(seconds=first_s)
