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
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from footplate.routing.types import BlockKey, Ranked, Reason, ReplicaId, ReplicaLoad


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


def rank(
    question: Question,
    loads: Mapping[ReplicaId, ReplicaLoad],
    rng: random.Random,
    settings: AffinitySettings = AffinitySettings(),
) -> list[Ranked]:
    """All replicas in the order in which to ask them; empty only without replicas. Never raises."""
    if not loads:
        return []
    cached = {replica: _cached_tokens(question, replica) for replica in loads}
    costs = {
        replica: _cost(load, question.num_prompt_tokens - cached[replica], settings)
        for replica, load in loads.items()
    }
    first, reason = _first(question, loads, cached, costs, rng, settings)
    rest = sorted((replica for replica in loads if replica != first), key=costs.__getitem__)
    return [
        Ranked(first, reason, cached[first]),
        *(Ranked(replica, Reason.FALLBACK, cached[replica]) for replica in rest),
    ]


def _cached_tokens(question: Question, replica: ReplicaId) -> int:
    # The last token of a prompt is always computed.
    num_blocks = question.matches.get(replica, 0)
    if replica == question.recent:
        num_blocks = max(num_blocks, question.num_recent_blocks)
    return min(num_blocks * question.block_size, max(question.num_prompt_tokens - 1, 0))


def _cost(load: ReplicaLoad, num_new_tokens: int, settings: AffinitySettings) -> float:
    cost = (
        load.num_prefill_tokens
        + num_new_tokens * settings.new_token_weight
        + load.num_running * settings.running_tokens
        + load.num_waiting * settings.waiting_tokens
    )
    if load.kv_usage > settings.full_kv_usage:
        cost += num_new_tokens
    return cost


def _first(
    question: Question,
    loads: Mapping[ReplicaId, ReplicaLoad],
    cached: Mapping[ReplicaId, int],
    costs: Mapping[ReplicaId, float],
    rng: random.Random,
    settings: AffinitySettings,
) -> tuple[ReplicaId, Reason]:
    wanted, reason = _affine(question, cached, costs)
    if wanted is None:
        return _of_two(costs, rng), Reason.LOAD
    mean = (sum(load.num_requests for load in loads.values()) + 1) / len(loads)
    most = settings.load_factor * mean + settings.spare_requests
    # Somebody has less than the mean.
    cheapest = min(
        (name for name, load in loads.items() if load.num_requests + 1 <= most), key=costs.__getitem__
    )
    if loads[wanted].num_requests + 1 > most:
        return cheapest, Reason.SPILL
    saved = costs[wanted] - costs[cheapest]
    is_far = saved > settings.hysteresis_tokens and saved > settings.hysteresis_share * costs[wanted]
    return (cheapest, Reason.LOAD) if is_far else (wanted, reason)


def _affine(
    question: Question, cached: Mapping[ReplicaId, int], costs: Mapping[ReplicaId, float]
) -> tuple[ReplicaId | None, Reason]:
    """Where the request belongs if load did not matter: by what is held, by what comes, by its session."""
    most = max(cached.values())
    holders = [replica for replica, held in cached.items() if held == most]
    if most and holders == [question.recent]:
        return holders[0], Reason.RECENT
    if question.session_key and (len(holders) > 1 or not most):
        return preferred(question.session_key, holders), Reason.SESSION
    if most:
        return min(holders, key=costs.__getitem__), Reason.PREFIX
    return None, Reason.LOAD


def _of_two(costs: Mapping[ReplicaId, float], rng: random.Random) -> ReplicaId:
    names = list(costs)
    drawn = names if len(names) < 3 else rng.sample(names, 2)
    return min(drawn, key=costs.__getitem__)


def preferred(key: BlockKey, replicas: Sequence[ReplicaId]) -> ReplicaId:
    """The replica that a key belongs to, the same for every router and nearly the same when replicas change.

    Rendezvous hashing (Thaler and Ravishankar 1998): only the keys of a replica that goes are moved.
    """
    return max(
        replicas,
        key=lambda replica: hashlib.blake2b(key + replica.encode(), digest_size=8).digest(),
    )
