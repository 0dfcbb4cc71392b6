"""Who runs next: the queue of waiting sequences under the policies fcfs, priority and fair."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterator

from footplate.engine.sequence import Sequence, SequenceState

PREFILL_COST = 1.0  # virtual tokens charged for a computed prompt token
DECODE_COST = 2.0  # and for a generated one; the ratio of the virtual token counter paper
PRUNE_ABOVE = 10_000  # idle tenants remembered

OrderKey = tuple[float, float, float]


class VirtualCounters:
    """A virtual token counter per tenant (Sheng et al., "Fairness in Serving LLMs", OSDI 2024).

    Work is charged as it is scheduled, divided by the tenant's weight. A tenant that comes back from idle is
    lifted to the lowest busy counter (to that of the last to leave when nobody is busy), so that idleness
    earns no credit. Under other policies than `fair` all counters stay 0 and the order is that of priority
    and arrival.
    """

    def __init__(self, *, fair: bool) -> None:
        self._fair = fair
        self._counter: dict[str, float] = {}
        self._active: dict[str, int] = {}
        self._last_left = 0.0  # counter of the tenant that left last

    def value(self, tenant: str) -> float:
        return self._counter.get(tenant, 0.0) if self._fair else 0.0

    def arrive(self, tenant: str) -> None:
        if not self._active.get(tenant):
            floor = min((self._counter[t] for t in self._active), default=self._last_left)
            self._counter[tenant] = max(self._counter.get(tenant, 0.0), floor)
        self._active[tenant] = self._active.get(tenant, 0) + 1

    def leave(self, tenant: str) -> None:
        self._active[tenant] -= 1
        if not self._active[tenant]:
            del self._active[tenant]
            self._last_left = self._counter[tenant]
            self._prune()

    def charge(self, sequence: Sequence, num_tokens: int) -> None:
        """Bill tokens that were just counted as computed."""
        if self._fair:
            generates = num_tokens == 1 and sequence.num_computed > sequence.num_prompt
            cost = DECODE_COST if generates else PREFILL_COST
            request = sequence.request
            self._counter[request.tenant] += num_tokens * cost / request.weight

    def _prune(self) -> None:
        if len(self._counter) > PRUNE_ABOVE:
            self._counter = {t: c for t, c in self._counter.items() if t in self._active}


class WaitingQueue:
    """Waiting sequences in policy order. A preempted one keeps its arrival number, and so its place in line.

    One lane a tenant under `fair`, one lane in all otherwise; a lane is a heap by (priority, arrival).
    Sequences that left the WAITING state are dropped when they come up.
    """

    def __init__(self, policy: str) -> None:
        self.counters = VirtualCounters(fair=policy == "fair")
        self.is_fair = policy == "fair"
        self._policy = policy
        self._lanes: dict[str, list[tuple[int, int, Sequence]]] = {}
        self._by_tenant: Counter[str] = Counter()
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def num_of(self, tenant: str) -> int:
        """How many of a tenant's wait."""
        return self._by_tenant[tenant]

    def priority(self, sequence: Sequence) -> int:
        """The sequence's class; policy `fcfs` knows only one."""
        return 0 if self._policy == "fcfs" else sequence.request.priority

    def key(self, sequence: Sequence) -> OrderKey:
        """Sorts sequences, running ones too, the next to serve first."""
        return (self.priority(sequence), self.counters.value(sequence.request.tenant), sequence.arrival)

    def push(self, sequence: Sequence) -> None:
        lane = sequence.request.tenant if self.is_fair else ""
        heapq.heappush(
            self._lanes.setdefault(lane, []), (self.priority(sequence), sequence.arrival, sequence)
        )
        self._count(sequence, 1)

    def discard(self, sequence: Sequence) -> None:
        """Count a waiting sequence out; its state must have changed. The heap drops it lazily."""
        self._count(sequence, -1)

    def peek(self, held: Collection[str] = ()) -> Sequence | None:
        """The next sequence to admit, or None; under `fair`, none of the tenants that are `held`."""
        best: tuple[OrderKey, Sequence] | None = None
        for lane in list(self._lanes):
            if lane in held:
                continue
            head = self._head(lane)
            if head is not None and (best is None or self.key(head) < best[0]):
                best = (self.key(head), head)
        return best[1] if best else None

    def lanes(self) -> set[str]:
        """Tenants that may wait, under `fair`; some may have left."""
        return set(self._lanes)

    def pop(self, sequence: Sequence) -> None:
        """Take out the sequence that `peek` gave."""
        lane = sequence.request.tenant if self.is_fair else ""
        _, _, popped = heapq.heappop(self._lanes[lane])
        assert popped is sequence, "pop takes what peek gave"
        self._count(sequence, -1)

    def __iter__(self) -> Iterator[Sequence]:
        for heap in self._lanes.values():
            yield from (s for _, _, s in heap if s.state is SequenceState.WAITING)

    def _count(self, sequence: Sequence, change: int) -> None:
        self._num_waiting += change
        self._by_tenant[sequence.request.tenant] += change
        if not self._by_tenant[sequence.request.tenant]:
            del self._by_tenant[sequence.request.tenant]

    def _head(self, lane: str) -> Sequence | None:
        heap = self._lanes[lane]
        while heap and heap[0][2].state is not SequenceState.WAITING:
            heapq.heappop(heap)
        if not heap:
            del self._lanes[lane]
            return None
        return heap[0][2]
