"""Usage events: what one request used, immutable, whole or not at all. Pure.

Nothing here holds text of a prompt or an answer. A request belongs to the moment it was admitted: that moment
says its price, its day and its month, however long it ran.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from enum import StrEnum
from typing import NewType, TypeVar

import msgspec

from footplate.billing.errors import InvalidUsage

EventId = NewType("EventId", str)
TenantId = NewType("TenantId", str)
KeyId = NewType("KeyId", str)
ModelName = NewType("ModelName", str)
BatchId = NewType("BatchId", str)
_Value = TypeVar("_Value")

MAX_ID_CHARS = 200
# No request of today comes near; it keeps sums over a month inside 64 bits.
MAX_TOKENS = 10**11


class TokenClass(StrEnum):
    """What is priced apart. Every token of an event is in one of them."""

    INPUT = "input"  # not found in a cache
    CACHED_INPUT = "cached_input"
    OUTPUT = "output"  # reasoning inside


class EventState(StrEnum):
    """How a request ended."""

    COMPLETED = "completed"
    CLIENT_CANCELLED = "client_cancelled"
    FAILED = "failed"
    # Its gateway died: written by whoever found the lease over.
    GATEWAY_LOST = "gateway_lost"


class AttemptOutcome(StrEnum):
    """How one attempt at a request ended."""

    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    # The answer was thrown away and another model asked.
    ESCALATED = "escalated"


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Tokens of a request. The first three are disjoint and billed; the others are only reported."""

    input_uncached: int = 0
    input_cached: int = 0
    output: int = 0
    # Inside `output`.
    reasoning: int = 0
    # Run by the engine beyond the end of the answer: outside `output`, never billed.
    discarded: int = 0

    def __post_init__(self) -> None:
        counts = (self.input_uncached, self.input_cached, self.output, self.reasoning, self.discarded)
        for count in counts:
            if type(count) is not int:
                raise InvalidUsage(f"a count of tokens is a whole number, not {type(count).__name__}")
        if min(counts) < 0 or max(counts) > MAX_TOKENS:
            raise InvalidUsage(f"counts of tokens are 0 to {MAX_TOKENS}; got {counts}")
        if self.reasoning > self.output:
            raise InvalidUsage(f"reasoning is a part of output: {self.reasoning} of {self.output} can't be")

    @property
    def total(self) -> int:
        """All that is billed, each token once."""
        return self.input_uncached + self.input_cached + self.output

    def __add__(self, other: TokenCounts) -> TokenCounts:
        return TokenCounts(
            self.input_uncached + other.input_uncached,
            self.input_cached + other.input_cached,
            self.output + other.output,
            self.reasoning + other.reasoning,
            self.discarded + other.discarded,
        )


def split_input(num_prompt: int, num_cached: int, num_output: int, **reported: int) -> TokenCounts:
    """Counts from an engine's: it counts cached tokens inside the prompt, as the OpenAI API does.

    Raises:
        InvalidUsage: more tokens are cached than the prompt has, or a count is negative.
    """
    if num_cached > num_prompt:
        raise InvalidUsage(f"{num_cached} cached tokens of a prompt of {num_prompt} can't be")
    return TokenCounts(num_prompt - num_cached, num_cached, num_output, **reported)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try at a request on one replica. What a failed one did not produce it has not used."""

    model: ModelName
    replica: str
    outcome: AttemptOutcome
    tokens: TokenCounts = TokenCounts()
    # A short word of the route that decided for this model, or against what it had begun.
    reason: str = ""

    def __post_init__(self) -> None:
        _check_text("an attempt's reason", self.reason or "-")
        _check_text("an attempt's model", self.model)
        _check_text("an attempt's replica", self.replica or "-")


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a request has come, as its last heart-beat said it."""

    served_model: ModelName
    output: int = 0
    input_cached: int = 0
    first_token_at: datetime | None = None
    replica: str = ""
    # Of the served model, where that is not the one of the skeleton: each counts in tokens of its own.
    num_prompt_tokens: int | None = None
    # Those at other models, which were thrown away.
    attempts: tuple[Attempt, ...] = ()

    def to_bytes(self) -> bytes:
        """A few tens of bytes, to stand beside a reservation."""
        return _ENCODER.encode(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> Progress:
        """Raises InvalidUsage when the bytes are none of `to_bytes`."""
        return _decoded(_PROGRESS, data)


@dataclass(frozen=True, slots=True)
class EventSkeleton:
    """What is known of a request at admission, so that whoever finds its end can write the event."""

    event_id: EventId
    tenant_id: TenantId
    key_id: KeyId
    requested_model: ModelName
    # The model that a route or an alias led to; an attempt may still be led elsewhere.
    target_model: ModelName
    endpoint: str
    started_at: datetime
    num_prompt_tokens: int
    cost_center: str = ""
    # Of the key (and tenant), as they were; sorted by name.
    labels: tuple[tuple[str, str], ...] = ()
    batch_id: BatchId | None = None

    def __post_init__(self) -> None:
        for name in ("event_id", "tenant_id", "key_id", "requested_model", "target_model", "endpoint"):
            _check_text(name, getattr(self, name))
        _check_text("batch_id", self.batch_id or "-")
        _check_text("cost_center", self.cost_center or "-")
        _check_utc("started_at", self.started_at)
        if not 0 <= self.num_prompt_tokens <= MAX_TOKENS:
            raise InvalidUsage(f"num_prompt_tokens is 0 to {MAX_TOKENS}; got {self.num_prompt_tokens}")
        names = [name for name, _ in self.labels]
        if names != sorted(set(names)):
            raise InvalidUsage("labels stand in the order of their names, each once")
        for name, value in self.labels:
            if not (name.isprintable() and value.isprintable()):
                raise InvalidUsage("labels are of visible characters")

    @property
    def is_batch(self) -> bool:
        """Whether it is a line of a batch, and priced as one."""
        return self.batch_id is not None

    def end(
        self,
        state: EventState,
        tokens: TokenCounts,
        ended_at: datetime,
        *,
        served_model: ModelName | None = None,
        is_estimated: bool = False,
        first_token_at: datetime | None = None,
        attempts: Iterable[Attempt] = (),
    ) -> UsageEvent:
        """The event of a request that ended. Times that a clock stepped back over move to the start.

        Raises:
            InvalidUsage: counts don't add up.
        """
        first = None if first_token_at is None else max(first_token_at, self.started_at)
        end = max(ended_at, self.started_at, first or self.started_at)
        model = served_model or self.target_model
        return UsageEvent(self, model, tokens, state, is_estimated, first, end, tuple(attempts))

    def lost(self, progress: Progress | None, found_at: datetime) -> UsageEvent:
        """The event of a request whose gateway died: estimated, from its last heart-beat.

        The prompt counts in full, the answer as far as it had come: it is never free, and never the longest
        answer that it might have had.
        """
        if progress is None:
            tokens = split_input(self.num_prompt_tokens, 0, 0)
            return self.end(EventState.GATEWAY_LOST, tokens, found_at, is_estimated=True)
        num_prompt = self.num_prompt_tokens
        if progress.num_prompt_tokens is not None:
            num_prompt = progress.num_prompt_tokens
        cached = min(progress.input_cached, num_prompt)
        tokens = split_input(num_prompt, cached, progress.output)
        attempt = Attempt(progress.served_model, progress.replica, AttemptOutcome.FAILED, tokens)
        return self.end(
            EventState.GATEWAY_LOST,
            tokens,
            found_at,
            served_model=progress.served_model,
            is_estimated=True,
            first_token_at=progress.first_token_at,
            attempts=(*progress.attempts, attempt),
        )

    def to_bytes(self) -> bytes:
        """Some hundreds of bytes, to stand beside a reservation."""
        return _ENCODER.encode(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> EventSkeleton:
        """Raises InvalidUsage when the bytes are none of `to_bytes`."""
        return _decoded(_SKELETON, data)


@dataclass(frozen=True, slots=True)
class UsageEvent:
    """One request and what it used, however many attempts it took.

    Attempts at the served model add up to `tokens`; those at other models are reported and not billed.
    """

    skeleton: EventSkeleton
    served_model: ModelName
    tokens: TokenCounts
    state: EventState
    is_estimated: bool
    first_token_at: datetime | None
    ended_at: datetime
    attempts: tuple[Attempt, ...] = ()

    def __post_init__(self) -> None:
        _check_text("served_model", self.served_model)
        _check_utc("ended_at", self.ended_at)
        begin = self.skeleton.started_at
        if self.first_token_at is not None:
            _check_utc("first_token_at", self.first_token_at)
            if not begin <= self.first_token_at <= self.ended_at:
                raise InvalidUsage("first_token_at lies between started_at and ended_at")
        if self.ended_at < begin:
            raise InvalidUsage("ended_at is not before started_at")
        if self.attempts:
            self._check_attempts()

    def _check_attempts(self) -> None:
        total = TokenCounts()
        for attempt in self.attempts:
            if attempt.model == self.served_model:
                total = total + attempt.tokens
        if total != self.tokens:
            raise InvalidUsage(
                f"attempts at {self.served_model} sum to {_short(total)}, the event has {_short(self.tokens)}"
            )

    @property
    def event_id(self) -> EventId:
        """Of the skeleton."""
        return self.skeleton.event_id

    @property
    def tenant_id(self) -> TenantId:
        """Of the skeleton."""
        return self.skeleton.tenant_id

    @property
    def started_at(self) -> datetime:
        """When it was admitted, which says its price, its day and its month."""
        return self.skeleton.started_at

    def to_bytes(self) -> bytes:
        """For the journal."""
        return _ENCODER.encode(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> UsageEvent:
        """Raises InvalidUsage when the bytes are none of `to_bytes`, or the event can't be."""
        return _decoded(_EVENT, data)


def is_better(later: UsageEvent, earlier: UsageEvent) -> bool:
    """Whether a second count of a request mends the first: exact ones mend estimates, nothing else does."""
    return earlier.is_estimated and not later.is_estimated


def best_of(first: UsageEvent, second: UsageEvent) -> UsageEvent:
    """Of two counts that come at once, the one that stays."""
    return second if is_better(second, first) else first


def _check_text(name: str, text: str) -> None:
    # What can't be stored would stand in the way of all that is committed with it.
    if not 1 <= len(text) <= MAX_ID_CHARS or not text.isprintable():
        raise InvalidUsage(f"{name} must have 1 to {MAX_ID_CHARS} visible characters")


def _check_utc(name: str, at: datetime) -> None:
    if at.tzinfo is not UTC and (at.tzinfo is None or at.utcoffset() != UTC.utcoffset(None)):
        raise InvalidUsage(f"{name} must be an aware time in UTC")


def _short(tokens: TokenCounts) -> str:
    return ", ".join(f"{field.name} {getattr(tokens, field.name)}" for field in fields(tokens))


def _decoded(decoder: msgspec.msgpack.Decoder[_Value], data: bytes) -> _Value:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidUsage("the bytes hold no value of this kind, or one that can't be") from error


_ENCODER = msgspec.msgpack.Encoder()
_PROGRESS = msgspec.msgpack.Decoder(Progress)
_SKELETON = msgspec.msgpack.Decoder(EventSkeleton)
_EVENT = msgspec.msgpack.Decoder(UsageEvent)
