"""Inputs for the kernels of a decode step: skinny products, table look-ups and draws."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from footplate.engine.kernels import cases
from footplate.engine.kernels.cases import Case
from footplate.engine.kernels.ops import AttentionBatch, AttentionSpec
from footplate.engine.kernels.skinny_linear.reference import QkvLayer

# Rows, weight rows, columns: every bucket of rows and its edges, and sizes that no tile divides.
_PRODUCTS = (
    (1, 576, 1536),
    (1, 33, 640),
    (2, 100, 576),
    (3, 64, 2048),
    (8, 48, 72),
    (17, 96, 640),
    (64, 130, 576),
)
_HEAD = ((1, 1000, 576), (5, 1000, 576))
# One row, and several: of those float16 is normed before the product, all else behind it.
_TINY = ((1, 96, 640), (5, 96, 576))


def _rows(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _weight(seed: int, num_rows: int, num_columns: int) -> torch.Tensor:
    """Rows of length one, so that products are as large as what they multiply."""
    return _rows(seed, num_rows, num_columns) / math.sqrt(num_columns)


def _name(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> str:
    return f"{rows}x{outputs}x{inputs}-{str(dtype).removeprefix('torch.')}"


def norm_linear(dtypes: Sequence[torch.dtype]) -> Sequence[Case]:
    def build(
        rows: int, outputs: int, inputs: int, dtype: torch.dtype, wide: bool, scale: float = 3.0
    ) -> tuple[Any, ...]:
        x, weight = _rows(1, rows, inputs) * scale, _weight(2, outputs, inputs)
        return x.to(dtype), _rows(3, inputs), 1e-6, weight.to(dtype), torch.float32 if wide else None

    return [
        Case(_name(*shape, dtype) + "-float32" * wide, partial(build, *shape, dtype, wide))
        for shape, wide in [*((s, False) for s in _PRODUCTS), *((s, True) for s in _HEAD)]
        for dtype in dtypes
    ] + [
        Case(_name(*shape, dtype) + "-tiny", partial(build, *shape, dtype, False, cases.TINY))
        for shape in _TINY
        for dtype in dtypes
    ]


def norm_gate_up(dtypes: Sequence[torch.dtype]) -> Sequence[Case]:
    def build(
        rows: int, outputs: int, inputs: int, dtype: torch.dtype, kind: str, scale: float = 1.0
    ) -> tuple[Any, ...]:
        x, weight = _rows(1, rows, inputs) * scale, _weight(2, outputs, inputs)
        return x.to(dtype), _rows(3, inputs), 1e-6, weight.to(dtype), kind

    return [
        Case(f"{kind}-{_name(*shape, dtype)}", partial(build, *shape, dtype, kind))
        for shape in ((1, 576, 1536), (1, 62, 640), (5, 96, 576), (16, 200, 640), (64, 64, 136))
        for kind in (("silu", "gelu_tanh") if shape[0] < 16 else ("silu",))
        for dtype in dtypes
    ] + [
        Case(f"silu-{_name(*shape, dtype)}-tiny", partial(build, *shape, dtype, "silu", cases.TINY))
        for shape in _TINY
        for dtype in dtypes
    ]


def linear_add(dtypes: Sequence[torch.dtype]) -> Sequence[Case]:
    def build(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> tuple[Any, ...]:
        x, weight = _rows(1, rows, inputs), _weight(2, outputs, inputs)
        return x.to(dtype), weight.to(dtype), _rows(3, rows, outputs).to(dtype)

    return [
        Case(_name(*shape, dtype), partial(build, *shape, dtype)) for shape in _PRODUCTS for dtype in dtypes
    ]


def norm_qkv_rope_cache(dtypes: Sequence[torch.dtype]) -> Sequence[Case]:
    """Rows of one token each; every third is padding, which must leave the cache alone.

    Where a case is tiny, the norm of the rows is, or that of the heads where there is one.
    """

    def build(
        rows: int,
        heads: tuple[int, int],
        size: int,
        inputs: int,
        dtype: torch.dtype,
        normed: bool,
        scale: float = 1.0,
    ) -> tuple[Any, ...]:
        shape = cases.AttentionShape(
            tuple((1, 3 + 7 * row) for row in range(rows)), heads, size, kv_dtype=dtype
        )
        batch = cases.attention_batch(shape)
        batch.slots[2::3] = -1
        angles = _rows(8, batch.max_context_len, size // 2)
        layer = QkvLayer(
            weight=(_weight(2, (heads[0] + 2 * heads[1]) * size, inputs) * (scale if normed else 1)).to(
                dtype
            ),
            norm_weight=_rows(3, inputs),
            eps=1e-6,
            spec=AttentionSpec(*heads, size, size**-0.5),
            cos_sin=torch.cat((angles.cos(), angles.sin()), dim=-1),
            qk_norm=(_rows(6, size), _rows(7, size), 1e-6) if normed else None,
        )
        x = _rows(1, rows, inputs) * (1 if normed else scale)
        return x.to(dtype), layer, batch, cases.empty_cache(shape)

    plain = ((1, (4, 2), 64, 576), (3, (2, 1), 80, 640), (17, (3, 3), 128, 136), (64, (2, 1), 96, 72))
    return [
        Case(
            f"{rows}-heads{heads[0]}/{heads[1]}x{size}{'-norm' * normed}{'-tiny' * (scale < 1)}"
            f"-{str(dtype).removeprefix('torch.')}",
            partial(build, rows, heads, size, inputs, dtype, normed, scale),
        )
        for scale, shapes in ((1.0, plain), (cases.TINY, plain[:2]))
        for rows, heads, size, inputs in shapes
        for normed in (False, True)
        for dtype in dtypes
    ]


class Tables(NamedTuple):
    """Row tables of a small persistent batch."""

    tokens: torch.Tensor
    lengths: torch.Tensor
    blocks: torch.Tensor


def _tables() -> Tables:
    generator = torch.Generator().manual_seed(11)
    lengths = torch.tensor([1, 16, 17, 2500, 33, 0, 4000], dtype=torch.int32)
    tokens = torch.randint(0, 50000, (7, 4001), generator=generator, dtype=torch.int32)
    return Tables(tokens, lengths, torch.randint(0, 999, (7, 251), generator=generator, dtype=torch.int32))


_ROW_LISTS = ([3], [0, 1, -1, 2], [6, 4, 3, -1, -1], [-1])


def decode_inputs() -> Sequence[Case]:
    def build(rows: list[int]) -> tuple[Any, ...]:
        count = len(rows)
        blank = partial(torch.full, fill_value=-7)
        batch = AttentionBatch(
            positions=blank((count,), dtype=torch.int32),
            slots=blank((count,), dtype=torch.int64),
            query_starts=torch.arange(count + 1, dtype=torch.int32),
            context_lens=blank((count,), dtype=torch.int32),
            block_tables=blank((count, 260), dtype=torch.int32),
            max_query_len=1,
            max_context_len=4000,
        )
        new_blocks = torch.tensor([-1, 500, 501, 502, -1][:count], dtype=torch.int32)
        token_ids = blank((count,), dtype=torch.int32)
        return (
            torch.tensor(rows, dtype=torch.int32),
            new_blocks,
            _tables(),
            cases.BLOCK_SIZE,
            token_ids,
            batch,
        )

    return [Case("rows" + "_".join(map(str, rows)), partial(build, rows)) for rows in _ROW_LISTS]


class DrawTables(NamedTuple):
    """Row tables that a draw reads."""

    tokens: torch.Tensor
    lengths: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seeds: torch.Tensor


# temperature, top_k, top_p, min_p of each row of the table.
_PLAIN = ((0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.3, 0, 1.0, 0.0), (2.5, 0, 1.0, 0.0), (1e-6, 5, 0.5, 0.0))


def _draw_tables(settings: Sequence[tuple[float, int, float, float]]) -> DrawTables:
    temperature, top_k, top_p, min_p = (torch.tensor(column) for column in zip(*settings, strict=True))
    count = len(settings)
    seeds = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 123456789])[torch.arange(count) % 6]
    return DrawTables(
        tokens=torch.zeros((count, 40), dtype=torch.int32),
        lengths=(torch.arange(count) * 7 % 39).int(),
        temperature=temperature,
        top_k=top_k.int(),
        top_p=top_p,
        min_p=min_p,
        seeds=seeds,
    )


def _draws(
    rows: Sequence[int],
    settings: Sequence[tuple[float, int, float, float]],
    vocab_size: int,
    dtype: torch.dtype,
    spread: float,
) -> tuple[Any, ...]:
    """Rows of logits stand one element further apart than they are long."""
    logits = (_rows(21 + vocab_size, len(rows), vocab_size + 1) * spread).to(dtype)[:, :vocab_size]
    if vocab_size > 10:
        logits[0, 3:10] = logits[0].max()  # ties
        logits[-1, 5:] = float("-inf")  # as a mask of allowed ids leaves it
    return logits, torch.tensor(rows, dtype=torch.int32), _draw_tables(settings)


def sample_plain() -> Sequence[Case]:
    return [
        Case(
            f"{len(rows)}x{vocab_size}-{str(dtype).removeprefix('torch.')}",
            partial(_draws, rows, _PLAIN, vocab_size, dtype, 4.0),
        )
        for rows, vocab_size in (
            ([0], 1),
            ([1], 9000),
            ([4, 2, -1, 0, 3, 1], 5000),
            ([3, 0], 4096),
            ([-1], 50),
        )
        for dtype in (torch.float32, torch.bfloat16)
    ]


_TRUNCATED = (
    (1.0, 5, 1.0, 0.0),
    (0.8, 0, 0.9, 0.0),
    (1.2, 0, 1.0, 0.05),
    (0.7, 20, 0.8, 0.02),
    (1.0, 1, 1.0, 0.0),
    (0.0, 3, 0.5, 0.5),
    (1.0, 100000, 0.7, 0.0),
)


def sample_truncated() -> Sequence[Case]:
    """Few candidates over more than one chunk, and more than the kernel lists of one (flat logits)."""
    return [
        Case(
            f"{len(rows)}x{vocab_size}-spread{spread}-{str(dtype).removeprefix('torch.')}",
            partial(_draws, rows, _TRUNCATED, vocab_size, dtype, spread),
        )
        for rows, vocab_size, spread in (
            ([0, 1, 2, 3, -1, 4, 5], 5000, 8.0),
            ([6, 1, 2, 0], 700, 1.0),
            ([3, 0, 1], 8, 4.0),
        )
        for dtype in (torch.float32, torch.bfloat16)
    ]
