"""Compares the ledger with what else counted the same tokens, and explains or lists each difference. Pure.

Engines write down what they make before it leaves them, by request. So of each request either both sides say
the same, or the reason stands somewhere: it still runs, its event waits in a journal, its count is an
estimate, its engine was killed. What nothing explains is listed, and is a fault.

Engines write down no times. A range is that of the ledger's requests: what engines made for a request that
the ledger has at another time is left out, and what it has at no time is missing whatever the range.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Protocol

from footplate.billing.usage import EventId

MAX_LISTED = 1_000
# Requests that are looked up in the ledger at a time.
LOOKED_UP = 10_000
# A reservation ends when its event is written, and a gateway that can't tell of that lets its lease end.
RELEASED_WITHIN = timedelta(minutes=5)


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
    recorded_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Reservations:
    """What the limiter and the gateways of this machine hold, over all tenants, at one moment."""

    held: frozenset[EventId]
    # Their gateways are gone: whoever sweeps next writes their events.
    lost: frozenset[EventId] = frozenset()
    read_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class WaitingEvents:
    """Events in the journals of this machine, which are to be replayed, and those that never will be."""

    ids: frozenset[EventId] = frozenset()
    # Journals that were read: others are known by their names alone.
    journals: frozenset[str] = frozenset()
    # Put aside, for the database refuses them as they are.
    refused: frozenset[EventId] = frozenset()
    num_damaged_files: int = 0


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

    The order of reading is that of what is compared: the ledger is one moment, before engines, and those are
    read before reservations and journals. `recorded` says last which of some requests have an event of any
    time: so what ends meanwhile is found somewhere.
    """

    ledger: Iterable[LedgerCount]
    books: BooksState
    engines: EngineCounts | None = None
    reservations: Reservations | None = None
    batches: Iterable[BatchCount] | None = None
    waiting: WaitingEvents | None = None
    recorded: Callable[[Sequence[EventId]], Set[EventId]] | None = None


class DifferenceKind(StrEnum):
    """What was found. See `EXPLAINED` for those that need nobody."""

    # The reservation is held: its event comes when it ends.
    STILL_RUNNING = "still_running"
    # Its gateway is gone and its event not written yet.
    WAITS_FOR_REAPER = "waits_for_reaper"
    # Engines have it, the ledger doesn't, and journals wait to be replayed.
    WAITS_IN_JOURNAL = "waits_in_journal"
    # Its gateway died; the count is that of its last heart-beat, and is marked so.
    ESTIMATED = "estimated"
    # An engine was killed; what it made last is not in its journal.
    ENGINE_CUT_OFF = "engine_cut_off"
    # Begun before what the engines' journals still hold.
    ENGINE_FORGOT = "engine_forgot"
    QUARANTINED = "quarantined"
    # Nothing of what engines made for it counts: whoever asked left before the engine had said yes.
    DISCARDED = "discarded"
    NOT_IN_LEDGER = "not_in_ledger"
    NOT_AT_ENGINES = "not_at_engines"
    COUNTS_DIFFER = "counts_differ"
    BATCH_DIFFERS = "batch_differs"
    ROLLUPS_DIFFER = "rollups_differ"
    POSTINGS_DIFFER = "postings_differ"
    ENTRIES_UNBALANCED = "entries_unbalanced"
    CONFLICTING_EVENTS = "conflicting_events"
    # Its event was written long ago: its tenant's limits are held by nothing.
    RESERVATION_LEFT = "reservation_left"
    EVENT_REFUSED = "event_refused"
    JOURNAL_DAMAGED = "journal_damaged"


EXPLAINED: Mapping[DifferenceKind, str] = {
    DifferenceKind.STILL_RUNNING: "its reservation is held; the event is written when it ends",
    DifferenceKind.WAITS_FOR_REAPER: "its gateway is gone; its event is written when its lease is taken up",
    DifferenceKind.WAITS_IN_JOURNAL: "gateways hold events that are not in the database yet",
    DifferenceKind.ESTIMATED: "its gateway was lost; what its last heart-beat said is billed",
    DifferenceKind.ENGINE_CUT_OFF: "its engine was killed; its last tokens are in no count",
    DifferenceKind.ENGINE_FORGOT: "it is older than what the engines' journals keep",
    DifferenceKind.QUARANTINED: "these events wait for a price of their models",
    DifferenceKind.DISCARDED: "its client left before it had begun, and was sent nothing",
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
    reservations: Reservations | None = None
    waiting: WaitingEvents | None = None

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
            "reservations": None
            if self.reservations is None
            else {"held": len(self.reservations.held), "lost": len(self.reservations.lost)},
            "backlog": None
            if self.waiting is None
            else {"events_in_journals": len(self.waiting.ids), "events_refused": len(self.waiting.refused)},
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
        found.add(_left(count, given.reservations))
        if given.engines is None:
            continue
        made = left.pop(count.event_id, None)
        if made is not None:
            engine_total += made
            num_engine_requests += 1
        found.add(_compared(count, made, given.engines))
    for event_id, made in _not_in_ledger(left, given):
        engine_total += made
        num_engine_requests += 1
        found.add(Difference(_missing(event_id, made, given), event_id, None, made.delivered))
    for batch in given.batches or ():
        if batch.lines_done > batch.events:
            found.add(
                Difference(DifferenceKind.BATCH_DIFFERS, batch.batch_id, batch.events, batch.lines_done)
            )
    _compare_books(given.books, found)
    _note_what_was_put_aside(given.waiting, found)
    return Reconciliation(
        num_requests,
        ledger_output,
        num_estimated,
        None if given.engines is None else engine_total,
        num_engine_requests,
        tuple(found.unexplained),
        tuple(found.explained),
        dict(found.counts),
        given.reservations,
        given.waiting,
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


def _left(count: LedgerCount, reservations: Reservations | None) -> Difference | None:
    """A reservation that should have ended with the event."""
    if reservations is None or count.event_id not in reservations.held:
        return None
    if reservations.read_at is None or count.recorded_at is None:
        return None
    if reservations.read_at - count.recorded_at <= RELEASED_WITHIN:
        return None
    return Difference(DifferenceKind.RESERVATION_LEFT, count.event_id, count.output, None)


def _not_in_ledger(
    left: Mapping[EventId, EngineCount], given: ReconciliationInput
) -> Iterator[tuple[EventId, EngineCount]]:
    """What engines made for requests that have no event at any time."""
    ids = [event_id for event_id, made in left.items() if made.produced]
    for first in range(0, len(ids), LOOKED_UP):
        part = ids[first : first + LOOKED_UP]
        recorded = given.recorded(part) if given.recorded is not None else frozenset()
        yield from ((event_id, left[event_id]) for event_id in part if event_id not in recorded)


def _missing(event_id: EventId, made: EngineCount, given: ReconciliationInput) -> DifferenceKind:
    """Why engines have a request that the ledger doesn't have."""
    if given.reservations is not None and event_id in given.reservations.held:
        return DifferenceKind.STILL_RUNNING
    if given.reservations is not None and event_id in given.reservations.lost:
        return DifferenceKind.WAITS_FOR_REAPER
    waiting = given.waiting or WaitingEvents()
    # Of journals elsewhere nobody can say what is in them.
    if event_id in waiting.ids or not waiting.journals.issuperset(given.books.journals):
        return DifferenceKind.WAITS_IN_JOURNAL
    return DifferenceKind.NOT_IN_LEDGER if made.delivered else DifferenceKind.DISCARDED


def _note_what_was_put_aside(waiting: WaitingEvents | None, found: _Found) -> None:
    if waiting is None:
        return
    for event_id in sorted(waiting.refused):
        found.add(Difference(DifferenceKind.EVENT_REFUSED, event_id, None, 1))
    if waiting.num_damaged_files:
        kind = DifferenceKind.JOURNAL_DAMAGED
        found.add(Difference(kind, kind.value, None, waiting.num_damaged_files))


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
