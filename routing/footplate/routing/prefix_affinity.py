"""The order in which replicas are asked: where the prefix is, unless the way there is too long. Pure.

The cost of a replica is the work that stands before a request's first token, in prompt tokens: what the
replica still has to compute for others, what it would have to compute of this prompt, and what its running
sequences take of each step. Costs that differ by little are no reason to move a session (hysteresis), and a
replica that has taken more than its share is passed over however much it holds (bounded loads, Mirrokni,
Thorup and Zadimoghaddam 2018), so that one hot prefix spreads. Where nothing matches, the cheaper of two
drawn replicas comes first (Mitzenmacher 2001): the best of all, by reports that are 50 ms old, is where
everybody else goes too.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from footplate.routing.types import BlockKey, Ranked, Reason, ReplicaId, ReplicaLoad

NUM_RANKS = 4


@dataclass(frozen=True, slots=True)
class AffinitySettings:
    """The policy's constants; those here come out of `routing/benchmarks/bench_policies.py`."""

    # What a running sequence takes of the way to a first token, in prompt tokens.
    running_tokens: float = 24.0
    # A waiting request has an answer to come besides its prompt.
    waiting_tokens: float = 96.0
    # A prompt token to compute, against one that waits: it delays this request as much, and then it is work
    # that another replica had spared the fleet.
    new_token_weight: float = 4.0
    # A holder is left only for one that is cheaper by both.
    hysteresis_tokens: float = 128.0
    hysteresis_share: float = 0.4
    # The most requests that a replica may have for its prefixes' sake: a multiple of the mean, and some more,
    # so that a few requests at an idle fleet stay where their prefix is.
    load_factor: float = 1.75
    spare_requests: float = 4.0
    # From this use of the KV pool on, what a prompt needs anew must push something out.
    full_kv_usage: float = 0.9


@dataclass(frozen=True, slots=True)
class Question:
    """What the policy needs of a request."""

    num_prompt_tokens: int
    block_size: int
    # Blocks of it that each replica holds, from the index.
    matches: Mapping[ReplicaId, int]
    # Where a request with the same beginning was sent a moment ago, and its engine has not told yet; and how
    # many of its first blocks that one had.
    recent: ReplicaId | None = None
    num_recent_blocks: int = 0
    # Stands for the session, inside its tenant; empty: it has none.
    session_key: BlockKey = b""


class Fleet:
    """Every replica's load, as decisions need it: what stands before a new request there, in prompt tokens.

    Kept up by reports and by what is sent between them: a decision computes nothing for a replica that
    holds nothing of its prompt.
    """

    def __init__(self, settings: AffinitySettings | None = None) -> None:
        self.settings = settings or AffinitySettings()
        self.queues: dict[ReplicaId, float] = {}
        self.num_requests: dict[ReplicaId, int] = {}
        self.total_requests = 0
        # Whose KV pool is so full that a prompt pushes something out.
        self.full: set[ReplicaId] = set()

    def report(self, replica: ReplicaId, load: ReplicaLoad) -> None:
        """A replica's load takes the place of all that was known of it."""
        settings = self.settings
        self.queues[replica] = (
            load.num_prefill_tokens
            + load.num_running * settings.running_tokens
            + load.num_waiting * settings.waiting_tokens
        )
        self.total_requests += load.num_requests - self.num_requests.get(replica, 0)
        self.num_requests[replica] = load.num_requests
        if load.kv_usage > settings.full_kv_usage:
            self.full.add(replica)
        else:
            self.full.discard(replica)

    def add(self, replica: ReplicaId, num_new_tokens: int) -> None:
        """A request is on its way there."""
        if replica in self.queues:
            self.queues[replica] += num_new_tokens + self.settings.waiting_tokens
            self.num_requests[replica] += 1
            self.total_requests += 1

    def remove(self, replica: ReplicaId) -> None:
        """The replica is there no more."""
        if self.queues.pop(replica, None) is not None:
            self.total_requests -= self.num_requests.pop(replica)
            self.full.discard(replica)


def rank(
    question: Question, fleet: Fleet, rng: random.Random, without: Collection[ReplicaId] = ()
) -> list[Ranked]:
    """The first four in the order in which to ask them, of all but those `without`. Never raises.

    Empty only when nobody is left. Whoever was refused by all asks again without them.
    """
    cached = _cached_tokens(question, fleet)
    costs = _costs(question, fleet, cached)
    for name in without:
        costs.pop(name, None)
        cached.pop(name, None)
    if not costs:
        return []
    first, reason = _first(question, fleet, cached, costs, rng)
    rest = heapq.nsmallest(NUM_RANKS, costs, key=costs.__getitem__)
    return [
        Ranked(first, reason, cached.get(first, 0)),
        *(Ranked(name, Reason.FALLBACK, cached.get(name, 0)) for name in rest if name != first),
    ][:NUM_RANKS]


def _cached_tokens(question: Question, fleet: Fleet) -> dict[ReplicaId, int]:
    # The last token of a prompt is always computed.
    most = max(question.num_prompt_tokens - 1, 0)
    cached = {
        replica: min(num_blocks * question.block_size, most)
        for replica, num_blocks in question.matches.items()
        if replica in fleet.queues and num_blocks
    }
    if question.recent is not None and question.recent in fleet.queues:
        coming = min(question.num_recent_blocks * question.block_size, most)
        cached[question.recent] = max(cached.get(question.recent, 0), coming)
    return cached


def _costs(question: Question, fleet: Fleet, cached: Mapping[ReplicaId, int]) -> dict[ReplicaId, float]:
    """What each replica costs, less what the whole prompt costs anywhere: only differences matter."""
    costs = fleet.queues.copy()
    weight = fleet.settings.new_token_weight
    for replica, num_tokens in cached.items():
        costs[replica] -= num_tokens * weight
    for replica in fleet.full:
        costs[replica] += question.num_prompt_tokens - cached.get(replica, 0)
    return costs


def _first(
    question: Question,
    fleet: Fleet,
    cached: Mapping[ReplicaId, int],
    costs: Mapping[ReplicaId, float],
    rng: random.Random,
) -> tuple[ReplicaId, Reason]:
    wanted, reason = _affine(question, cached, costs)
    if wanted is None:
        return _of_two(costs, rng), Reason.LOAD
    settings, requests = fleet.settings, fleet.num_requests
    most = settings.load_factor * (fleet.total_requests + 1) / len(requests) + settings.spare_requests
    if requests[wanted] + 1 > most:
        # Of all, somebody has less than the mean; of those that are left, perhaps nobody.
        free = [name for name in costs if requests[name] + 1 <= most]
        return min(free or costs, key=costs.__getitem__), Reason.SPILL
    cheapest = min(costs, key=costs.__getitem__)
    whole = costs[wanted] + question.num_prompt_tokens * settings.new_token_weight
    saved = costs[wanted] - costs[cheapest]
    is_far = saved > settings.hysteresis_tokens and saved > settings.hysteresis_share * whole
    return (cheapest, Reason.LOAD) if is_far and requests[cheapest] + 1 <= most else (wanted, reason)


def _affine(
    question: Question,
    cached: Mapping[ReplicaId, int],
    costs: Mapping[ReplicaId, float],
) -> tuple[ReplicaId | None, Reason]:
    """Where the request belongs if load did not matter: by what is held, by what comes, by its session."""
    if not cached:
        if question.session_key:
            return preferred(question.session_key, costs), Reason.SESSION
        return None, Reason.LOAD
    most = max(cached.values())
    holders = [replica for replica, held in cached.items() if held == most]
    if holders == [question.recent]:
        return holders[0], Reason.RECENT
    if question.session_key and len(holders) > 1:
        return preferred(question.session_key, holders), Reason.SESSION
    return min(holders, key=costs.__getitem__), Reason.PREFIX


def _of_two(costs: Mapping[ReplicaId, float], rng: random.Random) -> ReplicaId:
    names = list(costs)
    drawn = names if len(names) < 3 else rng.sample(names, 2)
    return min(drawn, key=costs.__getitem__)


def preferred(key: BlockKey, replicas: Iterable[ReplicaId]) -> ReplicaId:
    """The replica that a key belongs to, the same for every router and nearly the same when replicas change.

    Rendezvous hashing (Thaler and Ravishankar 1998): only the keys of a replica that goes are moved.
    """
    return max(
        replicas,
        key=lambda replica: hashlib.blake2b(key + replica.encode(), digest_size=8).digest(),
    )
