"""How a skinny product is cut into programs: measured choices, and a rule for all other shapes.

The weight has to leave memory once, at the card's full rate. That takes many bytes in flight on every
multiprocessor (rate times latency: 24 KiB at the least, twice that to be safe), and programs enough that
none of them idles for long at the end.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_ROWS = 64  # beyond this many rows the product is no longer a matter of reading weights
ROW_BUCKETS = (1, 8, 16, 32, 64)


@dataclass(frozen=True, slots=True)
class Tiling:
    """One way to launch. Pairs (gate and up, or a head's two halves) count as two weight rows."""

    block_n: int  # weight rows of a program; a power of two
    block_k: int  # columns of a step; a power of two
    num_warps: int
    num_stages: int  # steps whose loads are in flight; 1: loads go straight to registers
    prefetch: int = 0  # even number of weight rows asked into L2 before the earlier kernel has ended


def row_bucket(num_rows: int) -> int:
    """The padded number of rows that a product of `num_rows` is compiled for.

    Raises:
        ValueError: more rows than MAX_ROWS, or none.
    """
    for bucket in ROW_BUCKETS:
        if 0 < num_rows <= bucket:
            return bucket
    raise ValueError(f"a skinny product takes 1 to {MAX_ROWS} rows, not {num_rows}")


# (op, N, K, row bucket) -> what a sweep on an H200 found. Ops are those of `kernel`.
MEASURED: dict[tuple[str, int, int, int], Tiling] = {
    # Llama-3.1-8B
    ("norm_qkv_rope_cache", 6144, 4096, 1): Tiling(16, 1024, 4, 1, 2),
    ("linear_add", 4096, 4096, 1): Tiling(8, 1024, 4, 4, 2),
    ("norm_gate_up", 28672, 4096, 1): Tiling(16, 1024, 4, 1, 2),
    ("linear_add", 4096, 14336, 1): Tiling(16, 512, 2, 3, 0),
    # Llama-3.2-1B
    ("norm_qkv_rope_cache", 3072, 2048, 1): Tiling(8, 2048, 8, 2, 2),
    ("linear_add", 2048, 2048, 1): Tiling(4, 2048, 8, 1, 2),
    ("norm_gate_up", 16384, 2048, 1): Tiling(8, 2048, 8, 2, 0),
    ("linear_add", 2048, 8192, 1): Tiling(4, 2048, 8, 1, 2),
}

_PROGRAMS = 128  # about one for each of the 132 multiprocessors of an H100 or H200
_BYTES_IN_FLIGHT = 48 << 10  # of a multiprocessor
_SHARED_BYTES = 190 << 10  # of a multiprocessor, with some left over
_PREFETCH_BYTES = 16384  # of a program: with all programs that fit on the card at once, some 16 MB of L2


def choose(op: str, num_outputs: int, num_inputs: int, bucket: int) -> Tiling:
    """The measured tiling of a shape, or one by rule."""
    measured = MEASURED.get((op, num_outputs, num_inputs, bucket))
    return measured or by_rule(num_outputs, num_inputs, bucket)


def by_rule(num_outputs: int, num_inputs: int, bucket: int) -> Tiling:
    """A tiling with enough programs and bytes in flight for any shape of a 16-bit type."""
    prefetch = max(2, min(8, _PREFETCH_BYTES // (2 * num_inputs) // 2 * 2))
    if bucket == 1:
        # 1,024 columns are 16 bytes for each thread: a thread then adds what it has loaded, without exchange.
        block_k = min(1024, 1 << (num_inputs - 1).bit_length())
        block_n, num_stages = (8, 3) if num_outputs < 16384 else (16, 2)
        return Tiling(block_n, max(block_k, 64), 4, num_stages, prefetch)
    if bucket == 64 and num_outputs >= 256 * _PROGRAMS:
        return Tiling(128, 128, 8, 3, prefetch)  # every program reads all of x: fewer programs, less of that
    # 64 weight rows are one tile of Hopper's matrix unit; fewer only where programs would be too few.
    block_n = next((n for n in (64, 32) if num_outputs // n >= _PROGRAMS), 16)
    if block_n == 64:
        return Tiling(64, 256 if bucket == 8 else 128, 4, 3, prefetch)
    block_k = 256 if bucket <= 16 else 128
    room = _SHARED_BYTES if num_outputs // block_n <= _PROGRAMS else _SHARED_BYTES // 2
    stage_bytes, weight_bytes = 2 * (block_n + bucket) * block_k, 2 * block_n * block_k
    num_stages = min(_BYTES_IN_FLIGHT // weight_bytes + 1, room // stage_bytes, 8)
    return Tiling(block_n, block_k, 4, num_stages, prefetch)
