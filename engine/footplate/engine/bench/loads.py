"""The engine's loads as one vocabulary for every engine: prompts from a seed, and how many tokens each gives.

Needs numpy only, so that a peer's environment can import it. Shapes are those of `workloads`; token ids
are drawn by numpy, since a run needs millions of fresh ones. Output lengths are exact (no EOS), sampling is
greedy.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from footplate.engine.bench.workloads import HIGH, LOW, mixed_lengths

if TYPE_CHECKING:
    import numpy as np

Prompts = list[list[int]]


def fresh(count: int, length: int, seed: int, high: int = HIGH) -> Prompts:
    """`count` prompts of `length` ids below `high`; the lowest ids, often control tokens, are left out."""
    ids: Prompts = _generator(seed).integers(_low(high), high, size=(count, length)).tolist()
    return ids


def build(load: dict[str, Any], seed: int) -> tuple[Prompts, list[int]]:
    """Prompts and output lengths of a load.

    `kind` is single, decode, prefill, mixed or prefix. Sizes left out are those of a GPU: `length` of a
    prompt, `batch` or `count` of them, `out` tokens each; `scale` of mixed lengths; `groups`, `per_group`,
    `shared` and `fresh` tokens, and `shared_seed` of prefixes that are to be met again; `high` above all ids.

    Raises:
        ValueError: another kind.
    """
    kind, high = load["kind"], load.get("high", HIGH)
    if kind in ("single", "decode"):
        count = 1 if kind == "single" else load["batch"]
        length = load.get("length", 128 if kind == "single" else 512)
        return fresh(count, length, seed, high), [load["out"]] * count
    if kind == "prefill":
        return fresh(1, load["length"], seed, high), [1]
    if kind == "mixed":
        return _mixed(load, seed, high)
    if kind == "prefix":
        return _prefix(load, seed, high)
    raise ValueError(f"unknown load {kind!r}; known are single, decode, prefill, mixed, prefix")


def _generator(seed: int) -> np.random.Generator:
    # Loaded here: every command of `footplate` would else start a quarter of a second later.
    import numpy as np

    return np.random.default_rng(seed)


def _low(high: int) -> int:
    return min(LOW, high // 2)


def _mixed(load: dict[str, Any], seed: int, high: int) -> tuple[Prompts, list[int]]:
    scale = load.get("scale", 1.0)
    lengths = mixed_lengths(load.get("count", 1000))
    rng = _generator(seed)
    prompts = [rng.integers(_low(high), high, size=max(4, int(n * scale))).tolist() for n, _ in lengths]
    return prompts, [max(4, int(out * scale)) for _, out in lengths]


def _prefix(load: dict[str, Any], seed: int, high: int) -> tuple[Prompts, list[int]]:
    groups, per_group = load.get("groups", 64), load.get("per_group", 16)
    order = [(g, i) for g in range(groups) for i in range(per_group)]
    random.Random(7).shuffle(order)
    shared = fresh(groups, load.get("shared", 2048), load.get("shared_seed", seed), high)
    own = fresh(len(order), load.get("fresh", 128), seed + 1, high)
    prompts = [shared[g] + own[g * per_group + i] for g, i in order]
    return prompts, [load.get("out", 64)] * len(order)
