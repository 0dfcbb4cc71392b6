"""Each difference between the ledger and what else counted is explained or listed."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta

import pytest

from footplate.billing.adapters.postgres.reconcile_reader import PostgresLedgerCountReader
from footplate.billing.reconcile import (
    MAX_LISTED,
    BatchCount,
    BooksState,
    EngineCount,
    EngineCounts,
    LedgerCount,
    Reconciliation,
    ReconciliationInput,
    reconcile,
)
from footplate.billing.time_ranges import TimeRange
from footplate.billing.usage import Attempt, AttemptOutcome, EventId, ModelName, TokenCounts
from tests.billing.builders import NOON, OpenBooks, event

SINCE = NOON - timedelta(hours=1)


def ledger(name: str = "r", output: int = 10, *, at: datetime = NOON, **more: bool | int) -> LedgerCount:
    return LedgerCount(EventId(name), at, output, **more)  # type: ignore[arg-type]


def run(
    counts: Iterable[LedgerCount] = (),
    made: dict[str, EngineCount] | None = None,
    *,
    books: BooksState | None = None,
    since: datetime | None = SINCE,
    open_requests: Iterable[str] | None = None,
    batches: Iterable[BatchCount] = (),
) -> Reconciliation:
    engines = None if made is None else EngineCounts({EventId(k): v for k, v in made.items()}, since)
    running = None if open_requests is None else frozenset(map(EventId, open_requests))
    return reconcile(ReconciliationInput(counts, books or BooksState(), engines, running, batches))


def kinds(found: Reconciliation) -> dict[str, int]:
    return {kind.value: number for kind, number in found.counts.items()}


def test_what_engines_delivered_is_what_the_ledger_has() -> None:
    found = run([ledger("a"), ledger("b", 0)], {"a": EngineCount(13, 10), "b": EngineCount(0, 0)})
    assert (found.state, kinds(found)) == ("balanced", {})
    assert found.engine is not None and (found.engine.produced, found.engine.discarded) == (13, 3)


@pytest.mark.parametrize(
    ("count", "made", "kind", "state"),
    [
        (ledger(), EngineCount(11, 11), "counts_differ", "differs"),
        (ledger(), EngineCount(9, 9), "counts_differ", "differs"),
        (ledger(is_estimated=True), EngineCount(14, 14), "estimated", "explained"),
        # An estimate is never more than what was made.
        (ledger(is_estimated=True), EngineCount(9, 9), "counts_differ", "differs"),
        (ledger(), EngineCount(8, 8, is_cut_off=True), "engine_cut_off", "explained"),
        (ledger(), EngineCount(12, 12, is_cut_off=True), "counts_differ", "differs"),
        (ledger(), None, "not_at_engines", "differs"),
        (ledger(at=SINCE - timedelta(seconds=1)), None, "engine_forgot", "explained"),
        (ledger(other_attempts_output=4), EngineCount(10, 10), "counts_differ", "differs"),
    ],
)
def test_a_request_whose_counts_differ_is_explained_or_listed(
    count: LedgerCount, made: EngineCount | None, kind: str, state: str
) -> None:
    found = run([count], {} if made is None else {"r": made})
    assert (kinds(found), found.state) == ({kind: 1}, state)
    [difference] = found.unexplained or found.explained
    assert (difference.subject, difference.explanation is None) == ("r", state == "differs")


def test_escalated_attempts_were_made_too() -> None:
    assert run([ledger(other_attempts_output=4)], {"r": EngineCount(14, 14)}).state == "balanced"


def test_what_engines_alone_have_runs_or_waits_or_is_missing() -> None:
    made = {"r": EngineCount(5, 5), "idle": EngineCount(0, 0)}
    assert kinds(run((), made, open_requests=["r"])) == {"still_running": 1}
    assert kinds(run((), made, open_requests=[])) == {"not_in_ledger": 1}
    waiting = BooksState(journals=("gateway-1",))
    assert kinds(run((), made, books=waiting)) == {"waits_in_journal": 1}


def test_the_books_themselves_are_compared() -> None:
    books = BooksState(1, 2, {"USD": 3}, 4, 5)
    assert kinds(run(books=books)) == {
        "rollups_differ": 1,
        "postings_differ": 1,
        "entries_unbalanced": 1,
        "quarantined": 1,
        "conflicting_events": 1,
    }
    assert run(books=BooksState(num_quarantined=2)).state == "explained"


def test_a_batch_has_an_event_for_each_line_that_was_answered() -> None:
    batches = [BatchCount("b1", 10, 10), BatchCount("b2", 10, 9), BatchCount("b3", 9, 10)]
    [difference] = run(batches=batches).unexplained
    assert (difference.subject, difference.ledger, difference.other) == ("b2", 9, 10)


def test_a_flood_of_differences_is_counted_and_not_listed() -> None:
    found = run([ledger(f"r{number}") for number in range(MAX_LISTED + 5)], {})
    assert len(found.unexplained) == MAX_LISTED
    assert kinds(found) == {"not_at_engines": MAX_LISTED + 5}


def test_without_engines_nothing_is_said_of_them() -> None:
    found = run([ledger()])
    assert (found.state, found.engine, found.ledger_output) == ("balanced", None, 10)


def test_the_books_give_the_better_count_and_other_models_attempts(books: OpenBooks) -> None:
    guess = event("req_guess", tokens=(100, 0, 5), is_estimated=True)
    tried = Attempt(ModelName("small"), "1", AttemptOutcome.ESCALATED, TokenCounts(5, 0, 6))
    kept = Attempt(ModelName("m"), "2", AttemptOutcome.COMPLETED, TokenCounts(5, 0, 7))
    books.events.commit(
        [
            guess,
            event("req_two", tokens=(5, 0, 7), attempts=(tried, kept)),
            event("req_out", started_at=NOON + timedelta(days=40)),
        ]
    )
    books.events.commit([event("req_guess", tokens=(100, 0, 9))])
    span = TimeRange(datetime(2026, 11, 1, tzinfo=UTC), datetime(2026, 12, 1, tzinfo=UTC))
    reader = PostgresLedgerCountReader(books.books)
    with reader.counts(span) as counts:
        found = sorted(counts, key=lambda each: each.event_id)
    assert found == [
        LedgerCount(EventId("req_guess"), NOON, 9, False, 0),
        LedgerCount(EventId("req_two"), NOON, 7, False, 6),
    ]
    assert reader.books_state(span) == BooksState()
    books.events.commit([event(served="new", batch_id="b1")])
    assert reader.books_state(span).num_quarantined == 1
    assert reader.batches(span) == {"b1": 1}
