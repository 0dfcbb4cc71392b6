"""vLLM as a worker of the GPU comparison, in its own environment: `vllm_worker.py CONFIG_FOLDER SHARE`."""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent))
from engine.benchmarks.gpu_loads import Prompts, serve

STARTED = time.perf_counter()


def main() -> None:
    from vllm import LLM, SamplingParams

    imported = time.perf_counter() - STARTED
    llm = LLM(
        model=sys.argv[1],
        load_format="dummy",
        dtype="bfloat16",
        skip_tokenizer_init=True,
        gpu_memory_utilization=float(sys.argv[2]),
    )

    def generate(prompts: Prompts, lengths: list[int]) -> float:
        inputs = [{"prompt_token_ids": p} for p in prompts]
        params = [
            SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False) for n in lengths
        ]
        start = time.perf_counter()
        outputs = llm.generate(inputs, params, use_tqdm=False)
        wall = time.perf_counter() - start
        assert sum(len(o.outputs[0].token_ids) for o in outputs) == sum(lengths)
        return wall

    generate([[5, 6, 7]], [2])
    config = llm.llm_engine.vllm_config
    facts = {
        "engine": "vllm",
        "import_s": imported,
        "start_s": time.perf_counter() - STARTED,
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "num_gpu_blocks": config.cache_config.num_gpu_blocks,
    }
    serve(generate, facts)


if __name__ == "__main__":
    main()
