"""Events as rows, there and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec

from footplate.billing.adapters.postgres.bulk import Driver
from footplate.billing.adapters.postgres.dimensions import Dimension
from footplate.billing.adapters.postgres.tables import SCHEMA, TOKEN_COLUMNS
from footplate.billing.usage import (
    Attempt,
    BatchId,
    EventId,
    EventSkeleton,
    EventState,
    KeyId,
    ModelName,
    TenantId,
    TokenCounts,
    UsageEvent,
)

# How a request ended, in `events` and `recounts`; attempts are given as text.
END_COLUMNS = {
    "state": "text",
    "is_estimated": "bool",
    "first_token_at": "timestamptz",
    "ended_at": "timestamptz",
    **dict.fromkeys(TOKEN_COLUMNS, "bigint"),
    "attempts": "jsonb",
}
_JSON = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class StoredRow:
    """An event that is there, its better count if one is, and what of them is posted."""

    event_seq: int
    dimension_id: int
    event: UsageEvent
    effective_at: datetime
    recount: UsageEvent | None
    recount_dimension_id: int | None
    recount_effective_at: datetime | None
    # Version of each posting, by its seq.
    versions: dict[int, int]

    @property
    def is_late(self) -> bool:
        """Whether its month was closed when it came."""
        return self.effective_at != self.event.started_at


def token_values(tokens: TokenCounts) -> tuple[int, ...]:
    """In the order of TOKEN_COLUMNS."""
    return (tokens.input_uncached, tokens.input_cached, tokens.output, tokens.reasoning, tokens.discarded)


def end_values(event: UsageEvent) -> tuple[Any, ...]:
    """In the order of END_COLUMNS."""
    return (
        event.state.value,
        event.is_estimated,
        event.first_token_at,
        event.ended_at,
        *token_values(event.tokens),
        _JSON.encode(event.attempts).decode() if event.attempts else None,
    )


def _columns(table: str) -> str:
    return ", ".join(f"{table}.{name}" for name in END_COLUMNS)


_FIND = f"""
select e.seq, e.dimension_id, e.event_id, e.endpoint, e.batch_id, e.started_at, e.effective_at,
       d.tenant_id, d.key_id, d.requested_model, d.served_model, d.cost_center, d.labels,
       r.dimension_id, r.effective_at, rd.served_model,
       (select jsonb_object_agg(p.seq, p.price_version) from {SCHEMA}.postings p where p.event_seq = e.seq),
       {_columns("e")}, {_columns("r")}
from {SCHEMA}.events e
join {SCHEMA}.dimensions d on d.id = e.dimension_id
left join {SCHEMA}.recounts r on r.event_seq = e.seq
left join {SCHEMA}.dimensions rd on rd.id = r.dimension_id
"""
FIND_BY_ID = f"{_FIND} where e.event_id = any(%s)"
FIND_BY_SEQ = f"{_FIND} where e.seq = any(%s) order by e.seq"
_NUM_PLAIN = 17


def find_stored(driver: Driver, query: str, keys: Sequence[Any]) -> list[StoredRow]:
    """Events by FIND_BY_ID or FIND_BY_SEQ."""
    return [stored_row(row) for row in driver.execute(query, (list(keys),)).fetchall()]


def stored_row(row: Sequence[Any]) -> StoredRow:
    """A row of either query."""
    plain, ends = row[:_NUM_PLAIN], row[_NUM_PLAIN:]
    seq, dimension_id, event_id, endpoint, batch_id, started_at, effective_at = plain[:7]
    tenant_id, key_id, requested, served, cost_center, labels = plain[7:13]
    recount_dimension_id, recount_at, recount_served, versions = plain[13:]
    first, second = ends[: len(END_COLUMNS)], ends[len(END_COLUMNS) :]

    def event(model: str, end: Sequence[Any]) -> UsageEvent:
        tokens = TokenCounts(*end[4:9])
        skeleton = EventSkeleton(
            EventId(event_id),
            TenantId(tenant_id),
            KeyId(key_id),
            ModelName(requested),
            # What the reservation was made for is not kept: what was served says it.
            ModelName(model),
            endpoint,
            _utc(started_at),
            tokens.input_uncached + tokens.input_cached,
            cost_center,
            tuple(sorted(labels.items())),
            None if batch_id is None else BatchId(batch_id),
        )
        attempts = msgspec.convert(end[9] or [], tuple[Attempt, ...])
        first_token_at = None if end[2] is None else _utc(end[2])
        return UsageEvent(
            skeleton,
            ModelName(model),
            tokens,
            EventState(end[0]),
            end[1],
            first_token_at,
            _utc(end[3]),
            attempts,
        )

    return StoredRow(
        seq,
        dimension_id,
        event(served, first),
        _utc(effective_at),
        None if recount_dimension_id is None else event(recount_served, second),
        recount_dimension_id,
        None if recount_at is None else _utc(recount_at),
        {int(posted): version for posted, version in (versions or {}).items()},
    )


def same_owner(dimension: Dimension, event: UsageEvent) -> bool:
    """Whether an event is of the tenant that a dimension names."""
    return dimension.tenant_id == event.tenant_id


def _utc(at: datetime) -> datetime:
    return at.astimezone(UTC)
