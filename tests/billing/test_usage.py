"""An event's counts add up or it is not made; it travels as bytes and holds no text of a prompt."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from footplate.billing.errors import InvalidUsage
from footplate.billing.usage import (
    Attempt,
    AttemptOutcome,
    EventSkeleton,
    EventState,
    ModelName,
    Progress,
    TokenCounts,
    UsageEvent,
    best_of,
    split_input,
)
from tests.billing.builders import NOON, event, skeleton

M = ModelName("m")
COUNTS = st.integers(0, 10**9)


@given(COUNTS, COUNTS, COUNTS)
def test_classes_are_disjoint_and_sum_to_the_engines_total(prompt: int, cached: int, output: int) -> None:
    """A cached or a reasoning token is counted once."""
    if cached > prompt:
        with pytest.raises(InvalidUsage, match="cached tokens of a prompt"):
            split_input(prompt, cached, output)
        return
    tokens = split_input(prompt, cached, output, reasoning=output, discarded=7)
    assert tokens.total == prompt + output
    assert tokens.input_uncached + tokens.input_cached == prompt


@pytest.mark.parametrize("index", range(5))
@pytest.mark.parametrize("count", [-1, 1.0, True, "1", None, 10**12])
def test_counts_are_whole_and_not_negative(index: int, count: object) -> None:
    counts: list[object] = [5, 5, 5, 5, 5]
    counts[index] = count
    with pytest.raises(InvalidUsage, match="tokens"):
        TokenCounts(*counts)  # type: ignore[arg-type]


def test_reasoning_is_a_part_of_output() -> None:
    with pytest.raises(InvalidUsage, match="part of output"):
        TokenCounts(output=3, reasoning=4)


def test_attempts_at_the_served_model_sum_to_the_event_and_others_are_only_reported() -> None:
    """One request, three attempts; a failed one without tokens costs nothing."""
    tokens = TokenCounts(100, 0, 10)
    tries = [
        Attempt(M, "r1", AttemptOutcome.FAILED),
        Attempt(ModelName("small"), "r2", AttemptOutcome.ESCALATED, TokenCounts(100, 0, 4)),
        Attempt(M, "r3", AttemptOutcome.COMPLETED, tokens),
    ]
    assert len(event(tokens=tokens, attempts=tuple(tries)).attempts) == 3
    with pytest.raises(InvalidUsage, match="attempts at m sum to"):
        event(
            tokens=tokens, attempts=(*tries, Attempt(M, "r4", AttemptOutcome.FAILED, TokenCounts(output=1)))
        )


@pytest.mark.parametrize(
    "field", ["event_id", "tenant_id", "key_id", "requested_model", "target_model", "endpoint", "batch_id"]
)
@pytest.mark.parametrize("text", ["a\x00b", "a\nb", "x" * 201, "\ud800"])
def test_names_that_no_store_can_hold_are_refused(field: str, text: str) -> None:
    with pytest.raises(InvalidUsage, match=field):
        skeleton(**{field: text})


def test_labels_stand_in_order_each_once() -> None:
    for labels in ((("b", "1"), ("a", "1")), (("a", "1"), ("a", "2")), (("a", "\x00"),)):
        with pytest.raises(InvalidUsage, match="labels"):
            skeleton(labels=labels)


def test_times_are_utc_and_a_clock_that_steps_back_ends_no_event_before_its_start() -> None:
    with pytest.raises(InvalidUsage, match="UTC"):
        skeleton(started_at=datetime(2026, 11, 1))
    with pytest.raises(InvalidUsage, match="UTC"):
        skeleton(started_at=NOON.astimezone(timezone(timedelta(hours=1))))
    begun = skeleton()
    early = NOON - timedelta(hours=1)
    ended = begun.end(EventState.COMPLETED, TokenCounts(1, 0, 1), early, first_token_at=early)
    assert (ended.started_at, ended.first_token_at, ended.ended_at) == (NOON, NOON, NOON)
    with pytest.raises(InvalidUsage, match="ended_at"):
        replace(ended, ended_at=early, first_token_at=None)


def test_bytes_give_back_the_very_value_and_fit_beside_a_reservation() -> None:
    begun = skeleton(labels=(("team", "search"),), batch_id="batch_1")
    assert EventSkeleton.from_bytes(begun.to_bytes()) == begun
    assert len(begun.to_bytes()) < 400
    ended = begun.end(
        EventState.FAILED, TokenCounts(1, 2, 3, 1, 9), NOON + timedelta(microseconds=1), first_token_at=NOON
    )
    assert UsageEvent.from_bytes(ended.to_bytes()) == ended
    progress = Progress(M, 7, 3, NOON, "r1")
    assert Progress.from_bytes(progress.to_bytes()) == progress
    assert len(progress.to_bytes()) < 120


@given(st.binary(max_size=300))
def test_bytes_of_something_else_are_refused(data: bytes) -> None:
    for kind in (EventSkeleton, UsageEvent, Progress):
        with pytest.raises(InvalidUsage):
            kind.from_bytes(data)


def test_a_lost_request_is_estimated_from_its_last_heartbeat() -> None:
    """The prompt in full, the answer as far as it came: not free, and not the longest there might be."""
    begun = skeleton(num_prompt_tokens=100)
    lost = begun.lost(Progress(M, 17, 60, NOON, "r1"), NOON + timedelta(seconds=40))
    assert (lost.state, lost.is_estimated) == (EventState.GATEWAY_LOST, True)
    assert lost.tokens == TokenCounts(40, 60, 17)
    silent = begun.lost(None, NOON.astimezone(UTC))
    assert silent.tokens == TokenCounts(100, 0, 0)
    # A heart-beat that was damaged on its way can't take more from the prompt than it has.
    assert begun.lost(Progress(M, 1, 500), NOON).tokens == TokenCounts(0, 100, 1)


def test_an_exact_count_mends_an_estimate_and_nothing_else_mends_anything() -> None:
    exact, other, guess = event("e"), event("e", tokens=(1, 1, 1)), event("e", is_estimated=True)
    assert best_of(guess, exact) is exact
    assert best_of(exact, guess) is exact
    assert best_of(exact, other) is exact
    assert best_of(guess, replace(guess)) is guess
