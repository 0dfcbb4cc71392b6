"""Where the time of a decode step goes on a GPU: kernels, gaps between them, and host work beside them.

    python engine/benchmarks/profile_step.py CONFIG_FOLDER [--batches 1,128] [--out FILE]

Prints one line a kernel (launches and microseconds a step) and the step's busy and idle time on the device.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent.parent))
from engine.benchmarks.gpu_loads import fresh
from engine.benchmarks.record import environment

STEPS = 32
# Written into each result: without it the figures seem to contradict one another.
NOTES = [
    "A kernel that was launched ahead of its turn (programmatic dependent launch) counts as running while it"
    " waits for the one before it. So us_a_step of all kernels add up to more than busy_ms, in which time is"
    " counted once, and a long one may be a kernel that waits rather than one that works.",
    "step_ms is measured without the profiler, busy_ms and idle_ms under it and 32 steps later, with as many"
    " tokens more of context: up to 6 % longer. So step_ms may be below busy_ms.",
    "host_ms_a_step is a step's time less what the host waited for the device: work hidden behind it.",
    "To see what a kernel costs, compare busy_ms of two runs, one without it or with another in its place.",
]


def profile(core: Any, batch: int, length: int) -> dict[str, Any]:
    """Profile STEPS decode steps of `batch` rows with `length` tokens before them."""
    import torch
    from torch.profiler import ProfilerActivity

    from footplate.engine.types import EngineRequest, SamplingParams

    params = SamplingParams(max_tokens=3 * STEPS, temperature=0.0, ignore_eos=True)
    for i, prompt in enumerate(fresh(batch, length, batch)):
        core.add(EngineRequest(f"p{batch}-{i}", prompt, params))
    while core.stats().generation_tokens == 0 or core.scheduler.num_waiting:
        core.step()
    for _ in range(12):
        core.step()
    torch.cuda.synchronize()
    waited, start = core.runner.waited_s, time.perf_counter()
    for _ in range(STEPS):
        core.step()
    wall = time.perf_counter() - start
    waited = core.runner.waited_s - waited
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(STEPS):
            core.step()
        torch.cuda.synchronize()
    while core.has_work:
        core.step()
    found = _kernels(profiler, STEPS)
    return found | {
        "batch": batch,
        "context": length,
        "step_ms": round(1000 * wall / STEPS, 4),
        "host_ms_a_step": round(1000 * (wall - waited) / STEPS, 4),
    }


def _kernels(profiler: Any, steps: int) -> dict[str, Any]:
    spans, totals, counts = [], defaultdict(float), defaultdict(int)
    for event in profiler.events():
        if str(event.device_type).endswith("CUDA") and event.time_range.elapsed_us() > 0:
            spans.append((event.time_range.start, event.time_range.end))
            totals[event.name[:70]] += event.time_range.elapsed_us()
            counts[event.name[:70]] += 1
    spans.sort()
    busy, reached = 0.0, spans[0][0] if spans else 0.0
    for begin, end in spans:  # kernels may overlap: time is counted once
        busy += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    whole = spans[-1][1] - spans[0][0] if spans else 0.0
    rows = sorted(totals.items(), key=lambda item: -item[1])
    return {
        "busy_ms": round(busy / steps / 1000, 4),
        "idle_ms": round((whole - busy) / steps / 1000, 4),
        "launches": round(sum(counts.values()) / steps, 1),
        "kernels": [
            {"kernel": name, "us_a_step": round(us / steps, 2), "launches": round(counts[name] / steps, 1)}
            for name, us in rows[:20]
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--batches", default="1,128")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    from footplate.engine.config import EngineConfig
    from footplate.engine.loader import load_engine

    config = EngineConfig(max_num_batched_tokens=8192, gpu_memory_utilization=0.5, policy="fcfs")
    start = time.perf_counter()
    core = load_engine(f"dummy:{options.folder}/config.json", config).core
    ready_s = round(time.perf_counter() - start, 2)
    print(f"ready after {ready_s} s, imports left out", flush=True)
    result = environment() | {
        "command": f"profile_step.py {options.folder.name} --batches {options.batches}"
        f" --length {options.length}",
        "ready_s": ready_s,
        "notes": NOTES,
        "steps": [],
    }
    for batch in map(int, options.batches.split(",")):
        found = profile(core, batch, options.length)
        result["steps"].append(found)
        shown = {k: v for k, v in found.items() if k != "kernels"}
        print(json.dumps(shown))
        for row in found["kernels"][:14]:
            print(f"   {row['us_a_step']:9.1f} us {row['launches']:6.1f} x  {row['kernel']}")
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    core.shutdown()


if __name__ == "__main__":
    main()
