"""Time the CPU kernels beside torch's best alternative, in turn in one run; one row a shape.

    python engine/benchmarks/bench_kernels.py [--threads 2] [--rounds 15] [--only linear|attention]

The pair tests must be green for these figures to mean anything. On a shared machine read the ratio, which
compares calls that ran in turn, rather than either column.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from footplate.engine.kernels import cases
from footplate.engine.kernels.cpu_ops import CpuOps
from footplate.engine.kernels.linear.packed import PackedLinear, PackedMatrix
from footplate.engine.weights.gguf_tensors import dequantise

# SmolLM2-135M's gate_up and head, Gemma-3-270M's q and down: type, rows, columns.
MATRICES = (("Q4_1", 3072, 576), ("Q8_0", 49152, 576), ("Q5_0", 1024, 640), ("Q6_K", 640, 2048))
ROW_COUNTS = (1, 8, 32, 512)
# Sequences, new tokens each, context, query heads, KV heads, head size.
ATTENTIONS = (
    (1, 1, 130, 9, 3, 64),
    (8, 1, 130, 9, 3, 64),
    (32, 1, 130, 9, 3, 64),
    (32, 1, 1024, 9, 3, 64),
    (1, 512, 512, 9, 3, 64),
    (1, 1, 512, 4, 1, 256),
    (1, 512, 512, 4, 1, 256),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table; times are medians of interleaved calls."""

    op: str
    shape: str
    ours_ms: float
    torch_ms: float
    rate: str

    def __str__(self) -> str:
        ratio = self.torch_ms / self.ours_ms
        times = f"{self.ours_ms:>10.3f}{self.torch_ms:>10.3f}{ratio:>8.2f}"
        return f"{self.op:<12}{self.shape:<32}{times}  {self.rate}"


def interleaved_ms(rounds: int, *calls: Callable[[], object]) -> list[float]:
    """Median milliseconds of each call; every round runs all of them once, in turn."""
    times: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
    for _ in range(rounds):
        for index, call in enumerate(calls):
            begin = time.perf_counter()
            call()
            times[index].append((time.perf_counter() - begin) * 1e3)
    return [statistics.median(taken) for taken in times]


def linear_row(packed: PackedLinear, wide: torch.Tensor, name: str, count: int, rounds: int) -> Row:
    """A packed linear beside torch's float32 and bfloat16 ones; the faster of the two counts."""
    half = wide.bfloat16()
    x = torch.randn(count, packed.in_features)
    ours, float_ms, half_ms = interleaved_ms(
        rounds, lambda: packed(x), lambda: F.linear(x, wide), lambda: F.linear(x.bfloat16(), half)
    )
    work = 2 * packed.out_features * packed.in_features * count / ours / 1e6
    rate = f"{work:.0f} GOP/s, {packed.matrix.num_bytes / ours / 1e6:.1f} GB/s of weights"
    shape = f"{name} {packed.out_features}x{packed.in_features} M={count}"
    return Row("linear", shape, ours, min(float_ms, half_ms), rate)


def linear_rows(ops: CpuOps, rounds: int) -> Iterator[Row]:
    for type_name, num_rows, num_columns in MATRICES:
        stored = cases.stored_rows(type_name, num_rows, num_columns)
        packed = PackedLinear(PackedMatrix(ops.library, [stored]))
        wide = torch.from_numpy(dequantise(type_name, stored.raw))
        for count in ROW_COUNTS:
            if num_rows * num_columns * count < 1 << 31:  # a head never multiplies a whole prompt
                yield linear_row(packed, wide, type_name, count, rounds)


def attention_row(ops: CpuOps, shape: cases.AttentionShape, rounds: int) -> Row:
    """Paged attention beside scaled_dot_product_attention over contiguous keys and values of one length."""
    (new, context), count = shape.sequences[0], len(shape.sequences)
    heads, kv_heads = shape.heads
    size = shape.head_dim
    batch, spec = cases.attention_batch(shape), cases.attention_spec(shape)
    kv = cases.filled_cache(shape, batch)
    q = torch.randn(count * new, heads, size)
    dense_q = torch.randn(count, heads, new, size)
    keys, values = torch.randn(2, count, kv_heads, context, size)
    ours, theirs = interleaved_ms(
        rounds,
        lambda: ops.attention(q, spec, batch, kv),
        lambda: F.scaled_dot_product_attention(dense_q, keys, values, is_causal=new > 1, enable_gqa=True),
    )
    seen = new * context - new * (new - 1) // 2
    work = 4 * count * heads * size * seen / ours / 1e6
    name = f"{count}x{new}@{context} {heads}/{kv_heads}x{size} {str(shape.kv_dtype)[6:]}"
    return Row("attention", name, ours, theirs, f"{work:.1f} GFLOP/s")


def attention_rows(ops: CpuOps, rounds: int) -> Iterator[Row]:
    for count, new, context, heads, kv_heads, size in ATTENTIONS:
        for kv_dtype in (torch.float32, torch.bfloat16):
            sequences = ((new, context),) * count
            shape = cases.AttentionShape(sequences, (heads, kv_heads), head_dim=size, kv_dtype=kv_dtype)
            yield attention_row(ops, shape, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", choices=("linear", "attention"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    ops = CpuOps(num_threads=options.threads)
    print(
        f"{'op':<12}{'shape':<32}{'ours ms':>10}{'torch ms':>10}{'ratio':>8}  rate, {options.threads} threads"
    )
    with torch.inference_mode():
        for name, rows in (("linear", linear_rows), ("attention", attention_rows)):
            if options.only in (None, name):
                for row in rows(ops, options.rounds):
                    print(row, flush=True)


if __name__ == "__main__":
    main()
