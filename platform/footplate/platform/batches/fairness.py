"""Whose lines run next. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WaitingBatch:
    """A batch with lines that may run; `order` grows with the time it was made."""

    batch_id: str
    tenant_id: str
    order: int
    num_waiting: int


def shares(
    running: Mapping[str, int], waiting: Sequence[WaitingBatch], num_free: int
) -> list[tuple[str, int]]:
    """How many lines of which batch to begin, for `num_free` places.

    Each place goes to the tenant that has the fewest lines running by then, and there to its oldest batch.
    """
    counts = {batch.tenant_id: running.get(batch.tenant_id, 0) for batch in waiting}
    left = {batch.batch_id: batch.num_waiting for batch in waiting}
    queues: dict[str, list[WaitingBatch]] = {}
    for batch in sorted(waiting, key=lambda each: each.order):
        queues.setdefault(batch.tenant_id, []).append(batch)
    given: dict[str, int] = {}
    for _ in range(num_free):
        ready = [tenant for tenant, queue in queues.items() if queue]
        if not ready:
            break
        tenant = min(ready, key=lambda each: (counts[each], queues[each][0].order))
        batch = queues[tenant][0]
        given[batch.batch_id] = given.get(batch.batch_id, 0) + 1
        counts[tenant] += 1
        left[batch.batch_id] -= 1
        if not left[batch.batch_id]:
            queues[tenant].pop(0)
    return list(given.items())
