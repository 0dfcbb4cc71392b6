"""Each difference between the ledger and what else counted is explained or listed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
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
    Reservations,
    WaitingEvents,
    reconcile,
)
from footplate.billing.time_ranges import TimeRange
from footplate.billing.usage import Attempt, AttemptOutcome, EventId, ModelName, TokenCounts
from tests.billing.builders import NOON, OpenBooks, event

SINCE = NOON - timedelta(hours=1)


def ledger(
    name: str = "r", output: int = 10, *, at: datetime = NOON, **more: bool | int | datetime
) -> LedgerCount:
    return LedgerCount(EventId(name), at, output, **more)  # type: ignore[arg-type]


def run(
    counts: Iterable[LedgerCount] = (),
    made: dict[str, EngineCount] | None = None,
    *,
    books: BooksState | None = None,
    since: datetime | None = SINCE,
    reservations: Reservations | None = None,
    batches: Iterable[BatchCount] = (),
    waiting: WaitingEvents | None = None,
    recorded: Iterable[str] = (),
) -> Reconciliation:
    engines = None if made is None else EngineCounts({EventId(k): v for k, v in made.items()}, since)
    return reconcile(
        ReconciliationInput(
            counts,
            books or BooksState(),
            engines,
            reservations,
            batches,
            waiting,
            lambda asked: names(*recorded) & set(asked),
        )
    )


def held(*ids: str, lost: Iterable[str] = ()) -> Reservations:
    return Reservations(names(*ids), names(*lost), NOON)


def names(*ids: str) -> frozenset[EventId]:
    return frozenset(map(EventId, ids))


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
    assert kinds(run((), made, reservations=held("r"))) == {"still_running": 1}
    assert kinds(run((), made, reservations=held(lost=["r"]))) == {"waits_for_reaper": 1}
    assert kinds(run((), made, reservations=held())) == {"not_in_ledger": 1}
    # Its client left before it had begun: engines know that none of it counts.
    unread = run((), {"r": EngineCount(5, 0)}, reservations=held())
    assert (kinds(unread), unread.state) == ({"discarded": 1}, "explained")
    assert kinds(run((), {"r": EngineCount(5, 0)}, reservations=held("r"))) == {"still_running": 1}
    books = BooksState(journals=("gateway-1",))
    assert kinds(run((), made, books=books)) == {"waits_in_journal": 1}
    # A journal that was read holds it or not; of one elsewhere nobody can say.
    here = WaitingEvents(names("r"), frozenset({"gateway-1"}))
    assert kinds(run((), made, books=books, waiting=here)) == {"waits_in_journal": 1}
    other = WaitingEvents(names("x"), frozenset({"gateway-1"}))
    assert kinds(run((), made, books=books, waiting=other)) == {"not_in_ledger": 1}
    both = BooksState(journals=("gateway-1", "elsewhere"))
    assert kinds(run((), made, books=both, waiting=other)) == {"waits_in_journal": 1}


def test_what_the_ledger_has_at_another_time_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines write down no times: their journals hold other months too."""
    monkeypatch.setattr("footplate.billing.reconcile.LOOKED_UP", 2)
    made = {name: EngineCount(5, 5) for name in ("here", "then", "before", "long ago", "nowhere")}
    found = run([ledger("here", 5)], made, recorded=["then", "before", "long ago"])
    assert kinds(found) == {"not_in_ledger": 1} and found.unexplained[0].subject == "nowhere"
    assert (found.num_engine_requests, found.engine) == (2, EngineCount(10, 10))


def test_a_reservation_that_outlives_its_event_is_listed() -> None:
    just, long_ago = (NOON - timedelta(minutes=minutes) for minutes in (4, 6))
    counts = [
        ledger("ending", recorded_at=just),
        ledger("left", recorded_at=long_ago),
        ledger("released", recorded_at=long_ago),
    ]
    found = run(counts, reservations=held("ending", "left", "running", lost=["dead"]))
    assert [(each.kind, each.subject) for each in found.unexplained] == [("reservation_left", "left")]
    assert found.fields()["reservations"] == {"held": 3, "lost": 1}


def test_events_that_were_put_aside_are_listed() -> None:
    waiting = WaitingEvents(names("a", "b"), refused=names("c"), num_damaged_files=2)
    found = run([ledger()], waiting=waiting)
    assert (found.state, kinds(found)) == ("differs", {"event_refused": 1, "journal_damaged": 1})
    assert found.fields()["backlog"] == {"events_in_journals": 2, "events_refused": 1}
    assert run([ledger()]).fields()["backlog"] is None


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
    assert [replace(each, recorded_at=None) for each in found] == [
        LedgerCount(EventId("req_guess"), NOON, 9, False, 0),
        LedgerCount(EventId("req_two"), NOON, 7, False, 6),
    ]
    assert all(each.recorded_at is not None for each in found)
    assert reader.recorded([EventId("req_out"), EventId("req_none")]) == {"req_out"}
    assert reader.books_state(span) == BooksState()
    books.events.commit([event(served="new", batch_id="b1")])
    assert reader.books_state(span).num_quarantined == 1
    assert reader.batches(span) == {"b1": 1}
