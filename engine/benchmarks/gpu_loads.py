"""The GPU loads as one vocabulary for every engine: prompts from a seed, and what is measured on them.

Needs numpy only, so that a peer's environment can import it. Shapes are those of `workloads.py`; token ids
are drawn by numpy, since a run needs millions of fresh ones. Output lengths are exact (no EOS), sampling is
greedy.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from engine.benchmarks.workloads import HIGH, LOW, mixed_lengths

Prompts = list[list[int]]
# (prompts, output length of each) -> seconds until the last token of the last one
Generate = Callable[[Prompts, list[int]], float]


def fresh(count: int, length: int, seed: int) -> Prompts:
    return np.random.default_rng(seed).integers(LOW, HIGH, size=(count, length)).tolist()


def build(load: dict[str, Any], seed: int) -> tuple[Prompts, list[int]]:
    """Prompts and output lengths of a load: {"kind", "batch" or "length" or "count", "out"}."""
    kind = load["kind"]
    if kind in ("single", "decode"):
        count, length = (1, 128) if kind == "single" else (load["batch"], load.get("length", 512))
        return fresh(count, length, seed), [load["out"]] * count
    if kind == "prefill":
        return fresh(1, load["length"], seed), [1]
    if kind == "mixed":
        lengths = mixed_lengths(load.get("count", 1000))
        rng = np.random.default_rng(seed)
        return [rng.integers(LOW, HIGH, size=n).tolist() for n, _ in lengths], [o for _, o in lengths]
    if kind == "prefix":
        groups, per_group = load.get("groups", 64), load.get("per_group", 16)
        order = [(g, i) for g in range(groups) for i in range(per_group)]
        random.Random(7).shuffle(order)
        shared = fresh(groups, 2048, load.get("shared_seed", seed))
        own = fresh(len(order), 128, seed + 1)
        return [shared[g] + own[g * per_group + i] for g, i in order], [64] * len(order)
    raise ValueError(f"unknown load {kind!r}")


def serve(generate: Generate, facts: dict[str, Any]) -> None:
    """Answer loads from standard input, a JSON line each; the end of input ends it."""
    answers = sys.stdout
    sys.stdout = sys.stderr  # engines print; only answers go to the pipe
    print(json.dumps({"ready": True, **facts}), file=answers, flush=True)
    for line in sys.stdin:
        load = json.loads(line)
        try:
            prompts, lengths = build(load, load["seed"])
            extra = generate(prompts, lengths)
            answer = {"out_tokens": sum(lengths)} | (extra if isinstance(extra, dict) else {"wall": extra})
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"[:500]}
        print(json.dumps(answer), file=answers, flush=True)
