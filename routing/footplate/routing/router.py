"""What one router of one model knows, and what it decides. One event loop owns it; it asks nobody.

Values and a clock's readings come in, ranks go out: engines' events and loads, and the router's own decisions
that no report holds yet, since many requests can come between two reports.
"""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from footplate.routing.prefix_affinity import AffinitySettings, Fleet, Question, rank
from footplate.routing.prefix_index import PrefixIndex
from footplate.routing.types import BlockEvents, BlockKey, Ranked, ReplicaId, ReplicaLoad

# What was sent somewhere is in the engine's own events once it is computed.
RECENT_S = 5.0
MAX_RECENT_BLOCKS = 131_072
# A report holds what was placed at least so long before it came.
REPORT_LAG_S = 0.03


@dataclass(frozen=True, slots=True)
class Decision:
    """Whom to ask, in order, and what `Router.placed` has to know of it."""

    ranks: Sequence[Ranked]
    num_prompt_tokens: int
    # The blocks that no replica was known to hold.
    new_keys: Sequence[BlockKey] = ()
    # Whether it was looked at what replicas hold of the prompt.
    is_matched: bool = False


class Router:
    """Ranks a model's replicas for each request: those that have reported and were not removed."""

    def __init__(
        self,
        block_size: int,
        *,
        index: PrefixIndex | None = None,
        settings: AffinitySettings | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self.block_size = block_size
        self.index = index or PrefixIndex()
        self._fleet = Fleet(settings)
        self._rng = rng or random.Random()
        # (when, tokens to compute) of requests that are sent and in no report yet.
        self._placed: dict[ReplicaId, deque[tuple[float, int]]] = {}
        self._recent: OrderedDict[BlockKey, tuple[ReplicaId, float]] = OrderedDict()

    @property
    def replicas(self) -> Collection[ReplicaId]:
        """Those that can be asked."""
        return self._fleet.queues.keys()

    def report(self, replica: ReplicaId, load: ReplicaLoad, now: float) -> None:
        """A replica's load as it has just come."""
        placed = self._placed.setdefault(replica, deque())
        while placed and placed[0][0] <= now - REPORT_LAG_S:
            placed.popleft()
        self._fleet.report(replica, load)
        for _, num_tokens in placed:
            self._fleet.add(replica, num_tokens)

    def apply(self, replica: ReplicaId, events: BlockEvents) -> bool:
        """As `PrefixIndex.apply`: False when a snapshot must be asked for."""
        return self.index.apply(replica, events)

    def remove(self, replica: ReplicaId) -> None:
        """The replica is dead or drains: nothing new goes there, and its blocks are forgotten."""
        self._fleet.remove(replica)
        self._placed.pop(replica, None)
        self.index.remove(replica)

    def decide(
        self,
        keys: Sequence[BlockKey] | None,
        num_prompt_tokens: int,
        now: float,
        session_key: BlockKey = b"",
        without: Collection[ReplicaId] = (),
    ) -> Decision:
        """Ranks, as `rank`, for a prompt with these full blocks, scoped to its tenant. Never raises.

        `keys` is None where what replicas hold does not matter, as with one that was always alone.
        """
        is_matched, keys = keys is not None, keys or ()
        matches = self.index.match(keys)
        num_known = max(matches.values(), default=0)
        recent, num_recent = self._find_recent(keys, num_known, now)
        question = Question(num_prompt_tokens, self.block_size, matches, recent, num_recent, session_key)
        ranks = rank(question, self._fleet, self._rng, without)
        return Decision(ranks, num_prompt_tokens, keys[num_known:], is_matched)

    def placed(self, decision: Decision, chosen: Ranked, now: float) -> None:
        """A replica is being asked: what it does is on its way, and who begins the same follows it."""
        placed = self._placed.get(chosen.replica)
        if placed is not None:
            num_new_tokens = decision.num_prompt_tokens - chosen.num_cached_tokens
            placed.append((now, num_new_tokens))
            self._fleet.add(chosen.replica, num_new_tokens)
        recent, until = self._recent, now + RECENT_S
        for key in decision.new_keys:
            recent[key] = (chosen.replica, until)
            recent.move_to_end(key)
        while len(recent) > MAX_RECENT_BLOCKS:
            recent.popitem(last=False)

    def _find_recent(
        self, keys: Sequence[BlockKey], num_known: int, now: float
    ) -> tuple[ReplicaId | None, int]:
        """Who was sent the most of these blocks, and how many from the prompt's beginning on.

        A prompt is sent whole, so where a block was sent all before it were.
        """
        low, high, found = num_known, len(keys), None
        while low < high:
            middle = (low + high) // 2
            replica, until = self._recent.get(keys[middle], (None, 0.0))
            if replica in self._placed and now < until:
                low, found = middle + 1, replica
            else:
                high = middle
        return found, low if found is not None else 0
