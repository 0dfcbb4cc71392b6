"""How much of the held KV memory is no token's state: the `mixed` load at full lengths, scheduler alone.

    python engine/benchmarks/bench_kv_memory.py

The runner is a stub that draws a constant, so that policy is measured and nothing else. Waste is what the
last, partly filled block of each sequence leaves empty; blocks shared by a prefix count once.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent))
from engine.benchmarks.record import environment, write
from footplate.engine.bench.workloads import mixed
from footplate.engine.config import EngineConfig
from footplate.engine.core import EngineCore
from footplate.engine.plan import SchedulerOutput, StepResult
from footplate.engine.scheduler import Scheduler
from footplate.engine.types import EngineRequest, SamplingParams

TO_REACH_PERCENT = 4.0
VOCAB = 128_256


class ConstantRunner:
    """Draws token 5 for every row."""

    def run(self, output: SchedulerOutput) -> StepResult:
        return StepResult(output.step, {r.sequence_id: 5 for r in output.rows if r.samples})


def make_core(num_blocks: int) -> EngineCore:
    config = EngineConfig(policy="fcfs", max_num_seqs=256)
    scheduler = Scheduler(
        config, num_blocks=num_blocks, max_model_len=8192, vocab_size=VOCAB, prefix_key=b"bench"
    )
    return EngineCore(scheduler, ConstantRunner(), ahead=False)


def waste_percent(num_blocks: int = 20_000) -> tuple[float, float]:
    """(mean over the steps, worst step with 32 or more sequences), percent of held block memory."""
    core = make_core(num_blocks)
    for i, job in enumerate(mixed()):
        params = SamplingParams(max_tokens=job.output_len, temperature=0.0, ignore_eos=True)
        core.add(EngineRequest(f"m{i}", job.prompt_token_ids, params))
    held_slots = wasted_slots = 0
    worst = 0.0
    while core.has_work:
        core.step()
        running = core.scheduler.live_sequences()
        slots = core.scheduler.pool.num_held * core.scheduler.pool.block_size
        used = sum(s.num_computed for s in running)
        held_slots, wasted_slots = held_slots + slots, wasted_slots + slots - used
        if len(running) >= 32:
            worst = max(worst, 100 * (slots - used) / slots)
    core.scheduler.check()
    return 100 * wasted_slots / held_slots, worst


def leaked_blocks(requests: int = 500) -> int:
    """Blocks neither free nor cached after random requests with aborts in a pool too small for them all."""
    rng, core = random.Random(3), make_core(600)
    for i in range(requests):
        ids = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 900))]
        params = SamplingParams(max_tokens=rng.randrange(1, 300), temperature=0.0, ignore_eos=True)
        core.add(EngineRequest(f"r{i}", ids, params))
        for _ in range(rng.randrange(4)):
            core.step()
        if rng.random() < 0.4:
            core.abort(f"r{rng.randrange(i + 1)}")
    while core.has_work:
        core.step()
    core.scheduler.check()
    return core.scheduler.pool.num_held


def main() -> None:
    mean, worst = waste_percent()
    leaked = leaked_blocks()
    row = {
        "workload": "mixed, 1000 requests at full lengths, block size 16",
        "waste_percent_mean": round(mean, 2),
        "waste_percent_worst_step": round(worst, 2),
        "to_reach_percent": TO_REACH_PERCENT,
        "blocks_leaked_after_500_requests_with_aborts": leaked,
    }
    print(row)
    print(write("kv_memory", environment() | {"command": "bench_kv_memory.py", "rows": [row]}))


if __name__ == "__main__":
    main()
