"""Hugging Face generate as a peer, for the record: an environment of its own, jobs as JSON lines."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig


def load(path: Path, dtype: torch.dtype):
    return AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=dtype).eval()


def prompts(streams: int, length: int) -> torch.Tensor:
    return torch.tensor([[1000 + (i * 7 + s) % 40000 for i in range(length)] for s in range(streams)])


@torch.inference_mode()
def generate_s(model, ids: torch.Tensor, tokens: int) -> float:
    config = GenerationConfig(
        max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=2
    )
    start = time.perf_counter()
    model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    return time.perf_counter() - start


def main() -> None:
    path = Path(sys.argv[1])
    models = {"bf16": load(path, torch.bfloat16), "fp32": load(path, torch.float32)}
    print(json.dumps({"ready": f"transformers, torch {torch.__version__}"}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        torch.set_num_threads(job["threads"])
        model = models[job["model"]]
        if job["kind"] == "prompt":
            rate = job["length"] / generate_s(model, prompts(1, job["length"]), 1)
        else:
            ids, steps = prompts(job["streams"], job["prompt"]), job["steps"]
            decode_s = generate_s(model, ids, steps + 1) - generate_s(model, ids, 1)
            rate = job["streams"] * steps / decode_s
        print(json.dumps({"rate": rate}), flush=True)


if __name__ == "__main__":
    main()
