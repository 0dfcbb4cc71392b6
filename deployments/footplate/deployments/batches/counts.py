"""What batches bring to a reconciliation: how many lines have an answer, and which attempts are of which."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sqlalchemy import Engine, text

from footplate.billing.adapters.postgres.books import reading
from footplate.billing.reconcile import BatchCount, EngineCount
from footplate.billing.time_ranges import TimeRange
from footplate.billing.usage import EventId
from footplate.platform.batches.values import event_of_request

# Those that began and ended in a range: then all their lines' events are in it, too.
_BATCHES = text("""
select id, completed from batches.batches
where created_at >= :begin and created_at < :end and status in ('completed', 'expired', 'cancelled')
and to_timestamp(cast(stamps ->> status as float)) < :end order by seq""")


def batch_counts(engine: Engine, events: Mapping[str, int], span: TimeRange) -> list[BatchCount]:
    """Batches of a range beside `events`, how many the ledger has of each. Raises StoreUnavailable."""
    with reading(engine) as connection:
        rows = connection.execute(_BATCHES, {"begin": span.begin, "end": span.end}).all()
    return [BatchCount(batch_id, completed, events.get(batch_id, 0)) for batch_id, completed in rows]


def by_event(counts: Iterable[tuple[str, EngineCount]]) -> dict[EventId, EngineCount]:
    """What engines have made, by the events that it belongs to, from counts by request id.

    Of a batch's line the last attempt's tokens are delivered. What earlier attempts made has gone to nobody
    and is billed to nobody, as if it had been discarded.
    """
    attempts: dict[str, dict[int, EngineCount]] = {}
    for request_id, count in counts:
        event_id, attempt = event_of_request(request_id)
        of_event = attempts.setdefault(event_id, {})
        of_event[attempt] = of_event[attempt] + count if attempt in of_event else count
    found: dict[EventId, EngineCount] = {}
    for event_id, of_event in attempts.items():
        last = max(of_event)
        earlier = sum(count.produced for attempt, count in of_event.items() if attempt != last)
        found[EventId(event_id)] = of_event[last] + EngineCount(earlier, 0)
    return found


def event_ids(request_ids: Iterable[str]) -> frozenset[EventId]:
    """The events that reservations are for."""
    return frozenset(EventId(event_of_request(request_id)[0]) for request_id in request_ids)
