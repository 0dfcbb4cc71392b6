"""What a decision costs and what an index weighs, at 64 replicas and a million entries and beyond.

    python routing/benchmarks/bench_index.py [--output FILE] [--plot FILE.png]

Prompts have 8 to 480 full blocks; half of them begin with a prefix that some replicas hold. A decision is a
whole `Router.decide`: the match, every replica's cost, and the order; the hashing of the prompt's blocks is
given beside it. Memory is what `tracemalloc` counts while the index is filled.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import random
import subprocess
import time
import tracemalloc
from pathlib import Path

from footplate.engine.prefix import PrefixHasher
from footplate.routing.prefix_index import PrefixIndex
from footplate.routing.router import Router
from footplate.routing.types import BlockEvents, ReplicaId, ReplicaLoad

CHAIN = 480
NUM_DECISIONS = 4_000


def filled(num_replicas: int, num_entries: int, rng: random.Random) -> tuple[PrefixIndex, list[list[bytes]]]:
    """An index in which each chain of blocks is held by one to three replicas, each as far as it likes."""
    index = PrefixIndex(max_entries=num_entries)
    sequence = [0] * num_replicas
    chains, count = [], 0
    while count < num_entries:
        chain = [rng.randbytes(16) for _ in range(rng.randrange(8, CHAIN))]
        chains.append(chain)
        for number in rng.sample(range(num_replicas), min(rng.choice((1, 1, 2, 3)), num_replicas)):
            held = chain[: rng.randrange(4, len(chain) + 1)][: num_entries - count]
            events = BlockEvents(sequence[number], held, is_reset=sequence[number] == 0)
            assert index.apply(ReplicaId(str(number)), events)
            sequence[number] += 1
            count += len(held)
    return index, chains


def measured(num_replicas: int, num_entries: int, seed: int = 1) -> dict[str, float]:
    rng = random.Random(seed)
    gc.collect()
    tracemalloc.start()
    index, chains = filled(num_replicas, num_entries, rng)
    num_bytes, _ = tracemalloc.get_traced_memory()
    # The chains are the benchmark's own; their keys are the index's.
    own = sum(72 + 8 * len(chain) for chain in chains)
    tracemalloc.stop()
    router = Router(16, index=index, rng=random.Random(2))
    for number in range(num_replicas):
        load = ReplicaLoad(rng.randrange(60), rng.randrange(4), rng.randrange(9_000), rng.random())
        router.report(ReplicaId(str(number)), load, 0.0)
    prompts = [
        chain[: rng.randrange(4, len(chain) + 1)] + [rng.randbytes(16) for _ in range(rng.randrange(4, 40))]
        if rng.random() < 0.5
        else [rng.randbytes(16) for _ in range(rng.randrange(8, CHAIN))]
        for chain in rng.choices(chains, k=NUM_DECISIONS)
    ]
    gc.collect()
    gc.freeze()
    times = []
    for prompt in prompts:
        began = time.perf_counter_ns()
        router.decide(prompt, len(prompt) * 16 + 7, 1.0)
        times.append((time.perf_counter_ns() - began) / 1e3)
    gc.unfreeze()
    times.sort()
    return {
        "replicas": num_replicas,
        "entries": num_entries,
        "bytes_an_entry": round((num_bytes - own) / num_entries, 1),
        "decision_us_p50": round(times[len(times) // 2], 1),
        "decision_us_p99": round(times[int(len(times) * 0.99)], 1),
    }


def hashing_us(num_tokens: int) -> float:
    hasher, ids = PrefixHasher(b"k" * 32, 16), list(range(num_tokens))
    took = []
    for _ in range(50):
        began = time.perf_counter_ns()
        hasher.chain(ids, b"scope")
        took.append((time.perf_counter_ns() - began) / 1e3)
    return round(sorted(took)[25], 1)


def plot(rows: list[dict[str, float]], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4))
    counts = [row["replicas"] for row in rows]
    left.plot(counts, [row["decision_us_p50"] for row in rows], "o-", label="p50")
    left.plot(counts, [row["decision_us_p99"] for row in rows], "o-", label="p99")
    left.set(xlabel="replicas", ylabel="µs a decision", ylim=(0, None))
    left.legend()
    right.plot(
        [row["entries"] / 1e6 for row in rows],
        [row["bytes_an_entry"] * row["entries"] / 1e6 for row in rows],
        "o-",
    )
    right.set(xlabel="million (block, replica) entries", ylabel="MB", ylim=(0, None))
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    rows = [measured(64, 1_000_000)]
    print(rows[0])
    growth = []
    for count in (8, 64, 250, 500, 1_000):
        growth.append(measured(count, 2_000 * count))
        print(growth[-1])
    hashing = {str(n): hashing_us(n) for n in (512, 2_048, 7_680)}
    print("hashing, µs by tokens:", hashing)
    if arguments.plot:
        plot(growth, arguments.plot)
    if arguments.output:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        result = {
            "command": "bench_index.py",
            "commit": commit,
            "hardware": platform.processor() or platform.machine(),
            "rows": rows,
            "growth": growth,
            "hashing_us": hashing,
        }
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
