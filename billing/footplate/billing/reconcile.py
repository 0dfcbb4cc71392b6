"""Compares the ledger with what else counted the same tokens, and explains or lists each difference. Pure.

Engines write down what they make before it leaves them, by request. So of each request either both sides say
the same, or the reason stands somewhere: it still runs, its event waits in a journal, its count is an
estimate, its engine was killed. What nothing explains is listed, and is a fault.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Protocol

from footplate.billing.usage import EventId

MAX_LISTED = 1_000


@dataclass(frozen=True, slots=True)
class EngineCount:
    """What engines made of one request, over all its prompts and choices."""

    produced: int
    # Up to a stop string, or until it was heard that the client left.
    delivered: int
    # An engine's process was killed while it ran: what it made last is in nobody's count.
    is_cut_off: bool = False

    @property
    def discarded(self) -> int:
        """Made and billed to nobody."""
        return self.produced - self.delivered

    def __add__(self, other: EngineCount) -> EngineCount:
        return EngineCount(
            self.produced + other.produced,
            self.delivered + other.delivered,
            self.is_cut_off or other.is_cut_off,
        )


@dataclass(frozen=True, slots=True)
class EngineCounts:
    """All that engines have written down and still keep."""

    by_request: Mapping[EventId, EngineCount]
    # Since when nothing is missing; None: nobody can say.
    complete_since: datetime | None = None


class EngineCountReader(Protocol):
    """Reads the journals of engines. May block."""

    def __call__(self) -> EngineCounts: ...


@dataclass(frozen=True, slots=True)
class LedgerCount:
    """What the ledger says of one request; the better count where there is one."""

    event_id: EventId
    started_at: datetime
    output: int
    is_estimated: bool = False
    # Whether another model's attempt was thrown away: its tokens are at engines and not in `output`.
    other_attempts_output: int = 0


@dataclass(frozen=True, slots=True)
class BatchCount:
    """A batch and its events."""

    batch_id: str
    # Lines that ended with an answer, as the batch says.
    lines_done: int
    events: int


@dataclass(frozen=True, slots=True)
class BooksState:
    """What the books say of themselves."""

    num_rollup_differences: int = 0
    num_posting_differences: int = 0
    unbalanced: Mapping[str, int] = field(default_factory=dict)
    num_quarantined: int = 0
    num_conflicting: int = 0
    journals: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ReconciliationInput:
    """Everything that is compared. None: that source could not be asked, which is said and explains nothing.

    `open_requests`: those whose reservations are held. The ledger is read before the other sources, so that
    what ends meanwhile is found somewhere.
    """

    ledger: Iterable[LedgerCount]
    books: BooksState
    engines: EngineCounts | None = None
    open_requests: frozenset[EventId] | None = None
    batches: Iterable[BatchCount] | None = None


class DifferenceKind(StrEnum):
    """What was found. See `EXPLAINED` for those that need nobody."""

    # The reservation is held: its event comes when it ends.
    STILL_RUNNING = "still_running"
    # Engines have it, the ledger doesn't, and journals wait to be replayed.
    WAITS_IN_JOURNAL = "waits_in_journal"
    # Its gateway died; the count is that of its last heart-beat, and is marked so.
    ESTIMATED = "estimated"
    # An engine was killed; what it made last is not in its journal.
    ENGINE_CUT_OFF = "engine_cut_off"
    # Begun before what the engines' journals still hold.
    ENGINE_FORGOT = "engine_forgot"
    QUARANTINED = "quarantined"
    NOT_IN_LEDGER = "not_in_ledger"
    NOT_AT_ENGINES = "not_at_engines"
    COUNTS_DIFFER = "counts_differ"
    BATCH_DIFFERS = "batch_differs"
    ROLLUPS_DIFFER = "rollups_differ"
    POSTINGS_DIFFER = "postings_differ"
    ENTRIES_UNBALANCED = "entries_unbalanced"
    CONFLICTING_EVENTS = "conflicting_events"


EXPLAINED: Mapping[DifferenceKind, str] = {
    DifferenceKind.STILL_RUNNING: "its reservation is held; the event is written when it ends",
    DifferenceKind.WAITS_IN_JOURNAL: "gateways hold events that are not in the database yet",
    DifferenceKind.ESTIMATED: "its gateway was lost; what its last heart-beat said is billed",
    DifferenceKind.ENGINE_CUT_OFF: "its engine was killed; its last tokens are in no count",
    DifferenceKind.ENGINE_FORGOT: "it is older than what the engines' journals keep",
    DifferenceKind.QUARANTINED: "these events wait for a price of their models",
}


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that two sources don't agree on; `explanation` None: nobody knows why."""

    kind: DifferenceKind
    subject: str
    ledger: int | None
    other: int | None

    @property
    def explanation(self) -> str | None:
        """Why it is as it should be."""
        return EXPLAINED.get(self.kind)

    def fields(self) -> dict[str, object]:
        """As it is shown."""
        return {
            "kind": self.kind.value,
            "subject": self.subject,
            "ledger": self.ledger,
            "other": self.other,
            "explanation": self.explanation,
        }


@dataclass(frozen=True, slots=True)
class Reconciliation:
    """What was compared, and all that differs; of the unexplained at most `MAX_LISTED` are listed."""

    num_requests: int
    ledger_output: int
    num_estimated: int
    engine: EngineCount | None
    num_engine_requests: int
    unexplained: tuple[Difference, ...]
    explained: tuple[Difference, ...]
    counts: Mapping[DifferenceKind, int]

    @property
    def state(self) -> str:
        """`balanced`, `explained`, or `differs` when something needs somebody."""
        if any(kind not in EXPLAINED for kind in self.counts):
            return "differs"
        return "explained" if self.counts else "balanced"

    def fields(self) -> dict[str, object]:
        """As it is shown."""
        engine = self.engine
        return {
            "object": "reconciliation",
            "state": self.state,
            "ledger": {
                "requests": self.num_requests,
                "output_tokens": self.ledger_output,
                "estimated_requests": self.num_estimated,
            },
            "engines": None
            if engine is None
            else {
                "requests": self.num_engine_requests,
                "produced_tokens": engine.produced,
                "delivered_tokens": engine.delivered,
                "discarded_tokens": engine.discarded,
            },
            "counts": {kind.value: self.counts[kind] for kind in sorted(self.counts)},
            "unexplained": [each.fields() for each in self.unexplained],
            "explained": [each.fields() for each in self.explained],
        }


def reconcile(given: ReconciliationInput) -> Reconciliation:
    """Compare everything with everything."""
    found = _Found()
    left = dict(given.engines.by_request) if given.engines is not None else {}
    num_requests = ledger_output = num_estimated = num_engine_requests = 0
    engine_total = EngineCount(0, 0)
    for count in given.ledger:
        num_requests += 1
        ledger_output += count.output
        num_estimated += count.is_estimated
        if given.engines is None:
            continue
        made = left.pop(count.event_id, None)
        if made is not None:
            engine_total += made
            num_engine_requests += 1
        found.add(_compared(count, made, given.engines))
    for event_id, made in left.items():
        if not made.produced:
            continue
        engine_total += made
        num_engine_requests += 1
        found.add(Difference(_missing(event_id, given), event_id, None, made.delivered))
    for batch in given.batches or ():
        if batch.lines_done > batch.events:
            found.add(
                Difference(DifferenceKind.BATCH_DIFFERS, batch.batch_id, batch.events, batch.lines_done)
            )
    _compare_books(given.books, found)
    return Reconciliation(
        num_requests,
        ledger_output,
        num_estimated,
        None if given.engines is None else engine_total,
        num_engine_requests,
        tuple(found.unexplained),
        tuple(found.explained),
        dict(found.counts),
    )


@dataclass(slots=True)
class _Found:
    unexplained: list[Difference] = field(default_factory=list)
    explained: list[Difference] = field(default_factory=list)
    counts: Counter[DifferenceKind] = field(default_factory=Counter)

    def add(self, difference: Difference | None) -> None:
        if difference is None:
            return
        self.counts[difference.kind] += 1
        kept = self.unexplained if difference.explanation is None else self.explained
        if len(kept) < MAX_LISTED:
            kept.append(difference)


def _compared(count: LedgerCount, made: EngineCount | None, engines: EngineCounts) -> Difference | None:
    """What differs between the two counts of one request."""
    wanted = count.output + count.other_attempts_output
    if made is None:
        if not wanted:
            return None
        is_old = engines.complete_since is None or count.started_at < engines.complete_since
        kind = DifferenceKind.ENGINE_FORGOT if is_old else DifferenceKind.NOT_AT_ENGINES
        return Difference(kind, count.event_id, count.output, None)
    if made.delivered == wanted:
        return None
    if count.is_estimated and made.produced >= wanted:
        kind = DifferenceKind.ESTIMATED
    elif made.is_cut_off and made.produced <= wanted:
        kind = DifferenceKind.ENGINE_CUT_OFF
    else:
        kind = DifferenceKind.COUNTS_DIFFER
    return Difference(kind, count.event_id, count.output, made.delivered)


def _missing(event_id: EventId, given: ReconciliationInput) -> DifferenceKind:
    """Why engines have a request that the ledger doesn't have."""
    if given.open_requests is not None and event_id in given.open_requests:
        return DifferenceKind.STILL_RUNNING
    if given.books.journals:
        return DifferenceKind.WAITS_IN_JOURNAL
    return DifferenceKind.NOT_IN_LEDGER


def _compare_books(books: BooksState, found: _Found) -> None:
    for kind, number in (
        (DifferenceKind.ROLLUPS_DIFFER, books.num_rollup_differences),
        (DifferenceKind.POSTINGS_DIFFER, books.num_posting_differences),
        (DifferenceKind.CONFLICTING_EVENTS, books.num_conflicting),
        (DifferenceKind.QUARANTINED, books.num_quarantined),
    ):
        if number:
            found.add(Difference(kind, kind.value, number, 0))
    for currency, amount in books.unbalanced.items():
        found.add(Difference(DifferenceKind.ENTRIES_UNBALANCED, currency, amount, 0))
