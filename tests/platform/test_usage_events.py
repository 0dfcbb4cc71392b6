"""Events from what is known of a request at its end: every state, every kind of count. Pure."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from footplate.billing.usage import (
    AttemptOutcome,
    BatchId,
    EventId,
    EventSkeleton,
    EventState,
    ModelName,
    Progress,
    TokenCounts,
    UsageEvent,
)
from footplate.platform.errors import MeteringUnavailable
from footplate.platform.generation import PromptUsage, Run
from footplate.platform.metering import LineAttempt, LostRequestMeter, Metering, RequestFacts
from footplate.tenancy.limiter.reservations import LostRequest
from tests.builders import model_card, principal

AT = datetime(2026, 12, 1, tzinfo=UTC)
STATES = (EventState.COMPLETED, EventState.CLIENT_CANCELLED, EventState.FAILED)


class Sink:
    def __init__(self) -> None:
        self.may_begin = True
        self.taken: list[UsageEvent] = []

    def take(self, event: UsageEvent) -> asyncio.Future[Any]:
        self.taken.append(event)
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done


class Seen(Run):
    """A run of which the engines have said so much."""

    def __init__(self, *usages: PromptUsage, first_token_s: float | None = None) -> None:
        self._usages = list(usages)
        self._model = "smollm2-135m"
        self._first_token_s = first_token_s

    def usages(self) -> list[PromptUsage]:
        return self._usages


def used(prompt: int, cached: int, output: int, engine: str = "0") -> PromptUsage:
    return PromptUsage(engine, prompt, cached, output)


def metering_at(*times: datetime) -> Metering:
    left = list(times)
    return Metering(Sink(), lambda: left.pop(0) if len(left) > 1 else left[0])


FACTS = RequestFacts("req-1", principal(), "small", model_card(), "/v1/completions")


def end(
    run: Run, state: EventState, *, is_exact: bool = True, is_final: bool = True, facts: RequestFacts = FACTS
) -> UsageEvent:
    metering = metering_at(AT, AT + timedelta(seconds=9))
    return metering.end(metering.begin(facts, 10), run, state, is_exact=is_exact, is_final=is_final)


# --- what is known before ---------------------------------------------------------------------------------


def test_a_skeleton_names_who_asked_for_what_and_survives_its_way() -> None:
    caller = replace(principal(), cost_center="4711", labels=(("env", "prod"),))
    skeleton = metering_at(AT).begin(replace(FACTS, principal=caller), 12)
    assert (skeleton.event_id, skeleton.tenant_id, skeleton.key_id) == ("req-1", "tenant-a", "key-a")
    assert (skeleton.requested_model, skeleton.target_model) == ("small", "smollm2-135m")
    assert (skeleton.started_at, skeleton.num_prompt_tokens, skeleton.is_batch) == (AT, 12, False)
    assert (skeleton.cost_center, skeleton.labels) == ("4711", (("env", "prod"),))
    assert EventSkeleton.from_bytes(skeleton.to_bytes()) == skeleton


def test_every_attempt_at_a_line_is_the_lines_one_event() -> None:
    line = LineAttempt(EventId("line-7"), BatchId("batch-1"))
    skeletons = [
        metering_at(AT).begin(replace(FACTS, request_id=f"try-{number}", line=line), 1) for number in (1, 2)
    ]
    assert [(each.event_id, each.batch_id) for each in skeletons] == [("line-7", "batch-1")] * 2


def test_nothing_begins_that_could_not_be_recorded() -> None:
    metering = metering_at(AT)
    metering.check_room()
    metering.sink.may_begin = False  # type: ignore[misc]
    with pytest.raises(MeteringUnavailable):
        metering.check_room()


# --- how it ended -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("is_exact", [True, False])
def test_each_end_counts_what_was_used_and_says_whether_it_is_known(
    state: EventState, is_exact: bool
) -> None:
    event = end(Seen(used(10, 4, 3), first_token_s=0.5), state, is_exact=is_exact)
    assert (event.state, event.tokens, event.is_estimated) == (state, TokenCounts(6, 4, 3), not is_exact)
    assert event.first_token_at == AT + timedelta(seconds=0.5)
    assert event.ended_at == AT + timedelta(seconds=9)
    [attempt] = event.attempts
    wanted = {
        EventState.COMPLETED: AttemptOutcome.COMPLETED,
        EventState.CLIENT_CANCELLED: AttemptOutcome.CANCELLED,
        EventState.FAILED: AttemptOutcome.FAILED,
    }[state]
    assert (attempt.outcome, attempt.replica, attempt.model) == (wanted, "0", "smollm2-135m")


@pytest.mark.parametrize(("state", "tokens"), [(s, TokenCounts(6, 4, 0)) for s in STATES[:2]])
def test_a_prompt_counts_also_where_no_token_was_asked_for_or_came(
    state: EventState, tokens: TokenCounts
) -> None:
    event = end(Seen(used(10, 4, 0)), state)
    assert (event.tokens, event.is_estimated, event.first_token_at) == (tokens, False, None)


@pytest.mark.parametrize("is_exact", [True, False])
@pytest.mark.parametrize("cached", [4, 99])
def test_a_failure_without_a_token_is_free_and_that_is_no_estimate(is_exact: bool, cached: int) -> None:
    event = end(Seen(used(10, cached, 0), used(7, 0, 0)), EventState.FAILED, is_exact=is_exact)
    assert (event.tokens, event.is_estimated) == (TokenCounts(), False)
    assert [attempt.tokens for attempt in event.attempts] == [TokenCounts()] * 2


def test_a_failure_with_a_token_of_one_prompt_is_billed_for_all_that_had_begun() -> None:
    event = end(Seen(used(10, 4, 0), used(7, 0, 1, "3")), EventState.FAILED)
    assert event.tokens == TokenCounts(13, 4, 1)
    assert [(each.replica, each.tokens.total) for each in event.attempts] == [("0", 10), ("3", 8)]


@pytest.mark.parametrize("state", STATES)
def test_more_cached_tokens_than_the_prompt_has_are_all_of_it_and_an_estimate(state: EventState) -> None:
    """FAULTS b1 10: for that prompt; another's count stays what it is."""
    event = end(Seen(used(10, 11, 3), used(8, 8, 1)), state)
    assert (event.tokens, event.is_estimated) == (TokenCounts(0, 18, 4), True)


def test_a_prompt_that_was_cached_as_a_whole_is_no_estimate() -> None:
    event = end(Seen(used(10, 10, 3)), EventState.COMPLETED)
    assert (event.tokens, event.is_estimated) == (TokenCounts(0, 10, 3), False)


def test_a_count_that_may_be_mended_later_is_an_estimate() -> None:
    assert end(Seen(used(10, 0, 3)), EventState.COMPLETED, is_final=False).is_estimated
    # Also one of nothing: a line that failed once may yet cost something.
    assert end(Seen(used(10, 0, 0)), EventState.FAILED, is_final=False).is_estimated


def test_nothing_that_an_engine_has_begun_is_nothing_used() -> None:
    event = end(Seen(), EventState.CLIENT_CANCELLED)
    assert (event.tokens, event.attempts, event.is_estimated) == (TokenCounts(), (), False)


def test_a_clock_that_steps_back_gives_an_event_all_the_same() -> None:
    metering = metering_at(AT, AT - timedelta(hours=1))
    run = Seen(used(10, 0, 3), first_token_s=2.0)
    event = metering.end(metering.begin(FACTS, 10), run, EventState.COMPLETED, is_exact=True)
    assert event.started_at == AT and event.first_token_at == event.ended_at == AT + timedelta(seconds=2)


# --- gateways that are gone -------------------------------------------------------------------------------


def test_progress_is_the_sum_of_prompts_and_survives_its_way() -> None:
    metering = metering_at(AT)
    skeleton = metering.begin(FACTS, 10)
    run = Seen(used(10, 4, 3, "2"), used(7, 1, 2, "5"), first_token_s=1.0)
    assert Progress.from_bytes(metering.progress(skeleton, run)) == Progress(
        ModelName("smollm2-135m"), 5, 5, AT + timedelta(seconds=1), "2"
    )
    nothing = Progress.from_bytes(metering.progress(skeleton, Seen()))
    assert (nothing.output, nothing.first_token_at, nothing.replica) == (0, None, "")


def lost(*requests: LostRequest) -> tuple[list[UsageEvent], int]:
    sink = Sink()
    meter = LostRequestMeter(Metering(sink, lambda: AT + timedelta(minutes=1)))
    asyncio.run(meter.take_care(requests))
    return sink.taken, meter.num_unreadable


def note(num_prompt: int = 10) -> bytes:
    return metering_at(AT).begin(FACTS, num_prompt).to_bytes()


@pytest.mark.parametrize(
    ("progress", "tokens", "num_attempts"),
    [
        (b"", TokenCounts(10, 0, 0), 0),
        (Progress(ModelName("smollm2-135m"), 7, 4).to_bytes(), TokenCounts(6, 4, 7), 1),
        (Progress(ModelName("smollm2-135m"), 7, 99).to_bytes(), TokenCounts(0, 10, 7), 1),
        (b"no progress", TokenCounts(10, 0, 0), 0),
        (Progress(ModelName("smollm2-135m"), -7, 4).to_bytes(), TokenCounts(10, 0, 0), 0),
    ],
    ids=["never told", "told", "more cached than there is", "unreadable", "a count that can't be"],
)
def test_a_lost_request_is_an_estimate_and_never_free(
    progress: bytes, tokens: TokenCounts, num_attempts: int
) -> None:
    [event], num_unreadable = lost(LostRequest("req-1", note(), progress))
    assert (event.state, event.is_estimated, num_unreadable) == (EventState.GATEWAY_LOST, True, 0)
    assert (event.tokens, len(event.attempts)) == (tokens, num_attempts)
    assert event.ended_at == AT + timedelta(minutes=1)


def test_a_note_that_can_not_be_read_is_counted_and_costs_no_other() -> None:
    events, num_unreadable = lost(LostRequest("a", b"no note", b""), LostRequest("req-1", note(), b""))
    assert [event.event_id for event in events] == ["req-1"] and num_unreadable == 1
