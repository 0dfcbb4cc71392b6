"""Replays of captured decode steps alone, without scheduler or host work: what the device takes for a step.

    python engine/benchmarks/bench_decode_graphs.py CONFIG_FOLDER [--batches 1,8,32,128,256] [--context 620]
           [--out FILE]

Rows stand on blocks of their own, scattered over the pool. Prints milliseconds a step, the best and the
median of some rounds, and the rate at which weights, keys and values then come out of memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent.parent))
from engine.benchmarks.record import environment

REPLAYS, ROUNDS = 10, 5


def place_rows(runner: Any, batch: int, context: int, num_blocks: int) -> None:
    """Rows 0 .. batch - 1 with `context` tokens each, in random blocks; as many entries of the graph's
    inputs."""
    import torch

    state = runner._state
    width = -(-(context + ROUNDS * REPLAYS + 20) // state.block_size)
    if batch * width > num_blocks:
        raise ValueError(
            f"{batch} rows of {context} tokens take {batch * width} blocks; the pool has {num_blocks}"
        )
    blocks = torch.randperm(num_blocks, device=state.device)[: batch * width].int()
    state.blocks[:batch, :width] = blocks.view(batch, width)
    state.lengths[:batch] = context
    state.tokens[:batch, context - 1] = torch.randint(10, 1000, (batch,), device=state.device).int()
    size = runner._graphs.size_for(batch)
    inputs = runner._graphs.inputs(size)
    inputs.fill_(-1)
    inputs[0, :batch] = torch.arange(batch, device=state.device).int()


def measure(runner: Any, batch: int, context: int, num_blocks: int) -> list[float]:
    """Milliseconds of a step, a round each."""
    import torch

    size = runner._graphs.size_for(batch)
    found = []
    with torch.inference_mode():
        for _ in range(ROUNDS):
            place_rows(runner, batch, context, num_blocks)
            for _ in range(3):
                runner._graphs.run(size)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            begin.record()
            for _ in range(REPLAYS):
                runner._graphs.run(size)
            end.record()
            torch.cuda.synchronize()
            found.append(begin.elapsed_time(end) / REPLAYS)
    return found


def step_bytes(shape: Any, batch: int, context: int) -> int:
    """Bytes of 16-bit weights, keys and values that a step reads."""
    heads = shape.num_heads + 2 * shape.num_kv_heads
    layer = shape.hidden_size * (heads * shape.head_dim + shape.num_heads * shape.head_dim)
    layer += 3 * shape.hidden_size * shape.intermediate_size
    keys = 2 * shape.num_kv_heads * shape.head_dim * batch * context
    return 2 * (shape.num_layers * (layer + keys) + shape.hidden_size * shape.vocab_size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--batches", default="1,8,16,32,64,128,256")
    parser.add_argument("--context", type=int, default=620)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    from footplate.engine import loader
    from footplate.engine.config import EngineConfig

    batches = [int(b) for b in options.batches.split(",")]
    config = EngineConfig(max_num_batched_tokens=2048, max_num_seqs=max(batches), gpu_memory_utilization=0.6)
    engine = loader.load_engine(f"dummy:{options.folder}/config.json", config)
    num_blocks = engine.core.scheduler.kv_tokens // config.block_size
    rows = []
    for batch in batches:
        found = measure(engine.core.runner, batch, options.context, num_blocks)
        rate = step_bytes(engine.model_config, batch, options.context) / min(found) / 1e9
        rows.append({"batch": batch, "best_ms": min(found), "median_ms": statistics.median(found)})
        rows[-1]["tb_a_s"] = round(rate, 3)
        print(
            f"{batch:5d} rows  {min(found):.3f} ms (median {rows[-1]['median_ms']:.3f})  {rate:.2f} TB/s",
            flush=True,
        )
    if options.out:
        command = f"bench_decode_graphs.py {options.folder.name}"
        facts = environment() | {"command": command}
        options.out.write_text(
            json.dumps(facts | {"context": options.context, "steps": rows}, indent=1) + "\n"
        )
    engine.core.shutdown()


if __name__ == "__main__":
    main()
