"""Our policy against round robin, power of two choices, and Ray's prefix router, on simulated engines.

    python routing/benchmarks/bench_policies.py [--output FILE]

Ray's policy is its own prefix tree (`PrefixTree`, the class that its `PrefixCacheAffinityRouter` keeps in an
actor) with that router's rules and defaults, asked without the actor's round trips. Every policy meets the
same loads in the same run; times are of the simulated clock, so they do not depend on the machine.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from simulation import (
    BLOCK,
    Fleet,
    Outcome,
    Policy,
    Request,
    closed_loop,
    infinite_hit_rate,
    sessions,
)

from footplate.engine.bench.workloads import Job, chat_sessions, prefix
from footplate.routing.router import Router
from footplate.routing.types import BlockEvents, ReplicaId, ReplicaLoad

KV_TOKENS = 400_000


class RoundRobin(Policy):
    def __init__(self, names: Sequence[ReplicaId]) -> None:
        self._names, self._next = list(names), 0

    def choose(self, request: Request, now: float) -> ReplicaId:
        self._next += 1
        return self._names[self._next % len(self._names)]


class PowerOfTwo(Policy):
    """The less loaded of two, by what the fleet has at this very moment: better than any report."""

    def __init__(self, names: Sequence[ReplicaId]) -> None:
        self._names, self._rng = list(names), random.Random(1)
        self.fleet: Fleet | None = None

    def _open(self, name: ReplicaId) -> int:
        assert self.fleet is not None
        replica = self.fleet.replicas[name]
        return len(replica.waiting) + len(replica.running)

    def choose(self, request: Request, now: float) -> ReplicaId:
        return min(self._rng.sample(self._names, 2), key=self._open)


class RayPrefix(PowerOfTwo):
    """Ray Serve's PrefixCacheAffinityRouter; `threshold`: the queue difference that turns it off."""

    def __init__(self, names: Sequence[ReplicaId], threshold: float = float("inf")) -> None:
        from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_tree import PrefixTree

        super().__init__(names)
        self._tree = PrefixTree()
        self._tree.add_tenants(list(names), 0.0)
        self._threshold = threshold

    def choose(self, request: Request, now: float) -> ReplicaId:
        # One character a token, above surrogates and specials; tenants apart, as their texts would be.
        text = request.job.tenant + "".join(chr(0x10000 + token) for token in request.job.prompt_token_ids)
        lengths = [self._open(name) for name in self._names]
        chosen: Sequence[ReplicaId] | None = None
        if max(lengths) - min(lengths) <= self._threshold:
            matched, holders = self._tree.prefix_match(text, list(self._names))
            chosen = self._tree.get_smallest_tenants() if len(matched) / len(text) < 0.1 else holders
        chosen = chosen or self._rng.sample(self._names, 2)
        name = min(chosen, key=self._open)
        self._tree.insert(text, name, now)
        return name


class Ours(Policy):
    """`Router`, told what a gateway is told."""

    def __init__(self, names: Sequence[ReplicaId]) -> None:
        self.router = Router(BLOCK, rng=random.Random(1))

    def tell(self, replica: ReplicaId, load: ReplicaLoad, events: BlockEvents | None, now: float) -> None:
        self.router.report(replica, load, now)
        if events is not None:
            assert self.router.apply(replica, events)
        self.router.index.sweep()

    def choose(self, request: Request, now: float) -> ReplicaId:
        decision = self.router.decide(
            request.keys, len(request.job.prompt_token_ids), now, request.session.encode()
        )
        self.router.placed(decision, decision.ranks[0], now)
        return decision.ranks[0].replica


def skewed(seed: int = 11) -> list[Job]:
    """One prefix is in half of all requests; the other half spreads over 63."""
    rng = random.Random(seed)
    jobs = prefix(groups=64, per_group=16, seed=seed)
    hot = jobs[0].prompt_token_ids[:2048]
    return [
        Job([*hot, *job.prompt_token_ids[2048:]], job.output_len, "hot") if rng.random() < 0.5 else job
        for job in jobs
    ]


POLICIES: dict[str, Callable[[Sequence[ReplicaId]], Policy]] = {
    "round robin": RoundRobin,
    "power of two": PowerOfTwo,
    "Ray's prefix router": RayPrefix,
    "Ray's, threshold 10": lambda names: RayPrefix(names, 10),
    "ours": Ours,
}


def play(name: str, load: Callable[[Fleet], Outcome], num_replicas: int) -> Outcome:
    policy = POLICIES[name]([ReplicaId(str(n)) for n in range(num_replicas)])
    fleet = Fleet(policy, num_replicas, KV_TOKENS)
    if isinstance(policy, PowerOfTwo):
        policy.fleet = fleet
    return load(fleet)


# Short names for the columns of a row, in its order.
HEADS = ("hits", "of inf.", "through", "p50 ms", "p99 ms", "requests", "busy")


def printed(texts: Sequence[object]) -> str:
    """A line of the table: load, policy, then figures."""
    return " ".join(f"{text!s:>20}" if i < 2 else f"{text!s:>8}" for i, text in enumerate(texts))


def row_of(load: str, policy: str, outcome: Outcome, best: float, base_s: float) -> dict[str, str | float]:
    waits, requests = outcome.first_token_s, outcome.requests_by_replica
    return {
        "load": load,
        "policy": policy,
        "hit_rate": round(outcome.hit_rate, 4),
        "of_infinite": round(outcome.hit_rate / best, 4),
        "throughput": round(base_s / outcome.seconds, 3),
        "first_token_ms_p50": round(statistics.median(waits) * 1e3, 1),
        "first_token_ms_p99": round(waits[int(len(waits) * 0.99)] * 1e3),
        "max_over_mean_requests": round(max(requests) * len(requests) / sum(requests), 3),
        "max_over_mean_busy": round(outcome.imbalance, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path)
    parser.add_argument("--replicas", type=int, default=4)
    arguments = parser.parse_args()
    count = arguments.replicas
    chats = chat_sessions(sessions=64 * count // 4)
    documents, skew = prefix(), skewed()
    loads: dict[str, tuple[Callable[[Fleet], Outcome], Sequence[Job]]] = {
        "prefix": (lambda fleet: closed_loop(fleet, documents, 64 * count), documents),
        "chat_sessions": (lambda fleet: sessions(fleet, chats), [job for turns in chats for job in turns]),
        "skewed": (lambda fleet: closed_loop(fleet, skew, 64 * count), skew),
    }
    rows = []
    print(printed(["load", "policy", *HEADS]))
    for load_name, (load, jobs) in loads.items():
        best = infinite_hit_rate(jobs)
        base = None
        for name in POLICIES:
            outcome = play(name, load, count)
            base = base or outcome.seconds
            row = row_of(load_name, name, outcome, best, base)
            rows.append(row)
            print(printed(list(row.values())), flush=True)
    if arguments.output:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        result = {"command": "bench_policies.py", "commit": commit, "replicas": count, "rows": rows}
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
