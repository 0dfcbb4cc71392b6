"""Footplate's engine as a worker of the GPU comparison.

    footplate_worker.py CONFIG_FOLDER MEMORY_SHARE [OPTIONS]

OPTIONS is a JSON object of engine options. Speaks the protocol of `gpu_loads.serve`.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent.parent))
from engine.benchmarks.gpu_loads import Prompts, serve

STARTED = time.perf_counter()


def _count_compilations() -> list[str]:
    """Names of kernels compiled from now on: serving should need none."""
    names: list[str] = []
    try:
        import triton

        triton.knobs.runtime.jit_post_compile_hook = lambda **facts: names.append(str(facts.get("key"))[:80])
    except (ImportError, AttributeError):
        pass  # no GPU backend, or another release
    return names


def main() -> None:
    from footplate.engine import loader
    from footplate.engine.config import EngineConfig
    from footplate.engine.types import EngineRequest, SamplingParams

    imported = time.perf_counter() - STARTED
    options: dict[str, Any] = {
        "gpu_memory_utilization": float(sys.argv[2]),
        "max_num_seqs": 1024,
        "max_num_batched_tokens": 16384,  # as vLLM takes it on such a GPU
        "max_waiting": 1 << 30,
        "policy": "fcfs",
    }
    options |= json.loads(sys.argv[3]) if len(sys.argv) > 3 else {}
    core = loader.load_engine(f"dummy:{sys.argv[1]}/config.json", EngineConfig(**options)).core
    numbers = iter(range(1 << 60))
    runner: Any = core.runner

    def generate(prompts: Prompts, lengths: list[int]) -> dict[str, float]:
        gc.collect()
        gc.freeze()
        steps, waited = core.stats().steps, getattr(runner, "waited_s", 0.0)
        start = time.perf_counter()
        for prompt, length in zip(prompts, lengths, strict=True):
            params = SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True)
            core.add(EngineRequest(str(next(numbers)), prompt, params))
        count = 0
        while core.has_work:
            count += sum(len(delta.token_ids) for delta in core.step())
        wall = time.perf_counter() - start
        assert count == sum(lengths), (count, sum(lengths))
        steps = core.stats().steps - steps
        host = wall - (getattr(runner, "waited_s", 0.0) - waited)
        return {
            "wall": wall,
            "steps": steps,
            "host_ms_a_step": 1000 * host / max(steps, 1),
            "compiled": len(compiled),
        }

    compiled = _count_compilations()
    first = time.perf_counter()
    generate([[5, 6, 7]], [2])
    facts = {
        "engine": "footplate",
        "import_s": imported,
        "start_s": time.perf_counter() - STARTED,
        "first_token_s": time.perf_counter() - first,
        "kv_tokens": core.scheduler.kv_tokens,
    }
    serve(generate, facts)
    core.shutdown()


if __name__ == "__main__":
    main()
