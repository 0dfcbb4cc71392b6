"""Streamed products and the kernels that read their parts, beside the references that define them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from footplate.engine.kernels import cases
from footplate.engine.kernels.cases import Case
from footplate.engine.kernels.gated_activation.reference import gated_activation
from footplate.engine.kernels.pair import KernelPair
from footplate.engine.kernels.rms_norm.reference import add_rms_norm
from footplate.engine.kernels.rope_and_cache.reference import rope_and_cache
from footplate.engine.kernels.streamed_block.block import Block
from footplate.engine.kernels.streamed_block.reference import streamed_block
from footplate.engine.kernels.streamed_linear.parts import Cut, Parts, PendingNorm
from footplate.engine.kernels.streamed_linear.reference import streamed_linear, summed

# Rows, weight rows, columns, tile, share: shares that end within tiles, on their edges, and past several.
_PRODUCTS = (
    (1, 100, 200, 64, 3),
    (3, 576, 576, 64, 17),
    (8, 130, 72, 128, 1),
    (17, 320, 1536, 128, 15),
    (64, 64, 640, 64, 100),
)


def _rows(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _weight(seed: int, num_rows: int, num_columns: int) -> torch.Tensor:
    """Rows of length one, so that products are as large as what they multiply."""
    return _rows(seed, num_rows, num_columns) / math.sqrt(num_columns)


def _parts(seed: int, rows: int, outputs: int, dtype: torch.dtype = torch.float32) -> Parts:
    """A product in parts, as its reference leaves it: NaN where nothing is written."""
    cut = Cut(outputs, 256, tile=64, share=3, num_stages=2)
    x, weight = _rows(seed, rows, 256).to(dtype), _weight(seed + 1, outputs, 256).to(dtype)
    return streamed_linear(x, weight, cut)


def _products(dtypes: Sequence[torch.dtype]) -> Sequence[Case]:
    def build(
        rows: int, outputs: int, inputs: int, tile: int, share: int, dtype: torch.dtype
    ) -> tuple[Any, ...]:
        cut = Cut(outputs, inputs, tile, share, num_stages=4)
        return _rows(1, rows, inputs).to(dtype), _weight(2, outputs, inputs).to(dtype), cut

    return [
        Case(
            "x".join(map(str, shape)) + "-" + str(dtype).removeprefix("torch."), partial(build, *shape, dtype)
        )
        for shape in _PRODUCTS
        for dtype in dtypes
    ]


def _triton(path: str, function: str) -> Callable[..., Any]:
    """A kernel by name; triton is imported when first called, as CPU installs have none."""

    def call(*arguments: Any) -> Any:
        import importlib

        return getattr(importlib.import_module(f"footplate.engine.kernels.{path}"), function)(*arguments)

    return call


def _summed(function: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    return lambda *arguments: summed(function(*arguments))


def _of_sums(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A reference over what the parts in its first argument amount to."""

    def call(product: Parts, *arguments: Any) -> torch.Tensor:
        total = summed(replace(product, dtype=torch.float32))
        if product.norm is not None:
            mean = product.norm.squares.sum(dim=1, keepdim=True) / product.norm.size
            total = total * torch.rsqrt(mean + product.norm.eps)
        return function(total.to(product.dtype), *arguments)

    return call


def _times(product: Parts, scale: float) -> Parts:
    return replace(product, values=product.values * scale)


def _norms() -> Sequence[Case]:
    def build(rows: int, size: int, scale: float) -> tuple[Any, ...]:
        residual = _rows(3, rows, size) * scale
        return _times(_parts(1, rows, size), scale), residual, _rows(4, size), 1e-6

    return [
        Case(f"{rows}x{size}" + "-tiny" * (scale < 1), partial(build, rows, size, scale))
        for rows, size, scale in ((1, 576, 1.0), (5, 200, 1.0), (33, 64, 1.0), (5, 200, cases.TINY))
    ]


def _gates() -> Sequence[Case]:
    def build(rows: int, size: int, kind: str) -> tuple[Any, ...]:
        return _parts(1, rows, 2 * size), kind

    return [
        Case(f"{kind}-{rows}x{size}", partial(build, rows, size, kind))
        for kind, rows, size in (("silu", 1, 1100), ("gelu_tanh", 7, 200), ("silu", 33, 64))
    ]


_DECODES = {
    "some": cases.AttentionShape(((1, 1), (1, 17), (1, 300), (1, 64)), (4, 2), 64),
    "odd-heads": cases.AttentionShape(((1, 33), (1, 130), (1, 16)), (3, 3), 80),
    "bf16": cases.AttentionShape(((1, 20), (1, 129)), (6, 2), 96, kv_dtype=torch.bfloat16),
    "size-256": cases.AttentionShape(((1, 65),), (2, 1), 256),
}


def _decodes(normed: bool, pending: bool) -> Sequence[Case]:
    """Rows of one token whose q, k and v are in parts; the last row only pads a graph's batch.

    Where a case is tiny, what is left of the rows' norm is, or the heads' where there is no such rest.
    """

    def build(shape: cases.AttentionShape, scale: float) -> tuple[Any, ...]:
        batch, spec = cases.attention_batch(shape), cases.attention_spec(shape)
        cache = cases.filled_cache(shape, batch)
        num_rows = len(shape.sequences)
        if num_rows > 1:
            batch.slots[-1], batch.positions[-1], batch.context_lens[-1] = -1, 0, 0
        angles = _rows(8, batch.max_context_len, shape.head_dim // 2)
        cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1)
        qkv = _times(_parts(5, num_rows, (shape.heads[0] + 2 * shape.heads[1]) * shape.head_dim), scale)
        if pending:
            squares = _rows(9, num_rows, 5).square() * 50 * scale**2
            qkv = replace(qkv, norm=PendingNorm(squares, 200, 1e-6))
        norm = (_rows(6, shape.head_dim), _rows(7, shape.head_dim), 1e-6) if normed else None
        return qkv, spec, batch, cos_sin, cache, norm

    suffix = "-norm" * normed + "-pending" * pending
    found = [Case(name + suffix, partial(build, shape, 1.0)) for name, shape in _DECODES.items()]
    if normed or pending:
        found.append(Case("tiny" + suffix, partial(build, _DECODES["some"], cases.TINY)))
    return found


def _blocks() -> Sequence[Case]:
    """Shapes of Llama-3.1-8B and Llama-3.2-1B, and small ones that no tile divides.

    Where a case is tiny, rows are until the block's first norm in the last block, until its second elsewhere.
    """

    def build(
        rows: int, size: int, inner: int, heads: int, activation: str, last: bool, tiny: bool = False
    ) -> tuple[Any, ...]:
        half = torch.bfloat16
        # Gains of the last block make up for what else would be too little to be held against anything.
        scale, down, gain = (3e-3, 1.0 if last else 1e-2, 4.0 if last else 1.0) if tiny else (1.0, 1.0, 1.0)
        block = Block(
            out=_weight(1, size, heads).to(half),
            mlp_gain=gain * (1 + _rows(2, size) / 4),
            gate_up=_weight(3, 2 * inner, size).to(half),
            down=(_weight(4, size, inner) * down).to(half),
            next_gain=1 + _rows(5, size) / 4,
            next_qkv=None if last else _weight(6, heads + 200, size).to(half),
            eps=1e-5,
            activation=activation,
        )
        return (_rows(7, rows, heads) * scale).to(half), block, (_rows(8, rows, size) * scale).to(half)

    shapes = [
        *((rows, 4096, 14336, 4096, "silu", rows == 5) for rows in (1, 5, 8, 16, 29, 32)),
        *((rows, 2048, 8192, 2048, "gelu_tanh", rows == 2) for rows in (1, 2, 17)),
        *((rows, 640, 1000, 520, "silu", rows == 3) for rows in (1, 3, 13)),
    ]
    return [
        Case(f"{rows}x{size}x{inner}" + "-last" * last, partial(build, rows, size, inner, heads, kind, last))
        for rows, size, inner, heads, kind, last in shapes
    ] + [
        Case("tiny" + "-last" * last, partial(build, 5, 2048, 8192, 2048, "silu", last, tiny=True))
        for last in (False, True)
    ]


def _block_kernel(attended: torch.Tensor, block: Block, residual: torch.Tensor) -> torch.Tensor:
    from footplate.engine.kernels.streamed_block import launch

    counters = launch.new_counters(2, attended.device)
    result = launch.streamed_block(attended, block, residual, *counters)
    if result is None:
        return residual
    return _of_sums(lambda total: total)(result)


_ROUNDING = "float32 on both sides; sums are taken in another order"
_HALF = "16-bit products summed in float32, in another order, and rounded once (the interpreter truncates)"
_WIDE_TYPES, _HALF_TYPES = (torch.float32,), (torch.bfloat16, torch.float16)
_STREAMED = _summed(_triton("streamed_linear.kernel", "streamed_linear"))

STREAMED_PAIRS: tuple[KernelPair, ...] = (
    KernelPair(
        "streamed_linear/triton",
        _summed(streamed_linear),
        _STREAMED,
        _products(_WIDE_TYPES),
        2e-5,
        2e-5,
        _ROUNDING,
    ),
    KernelPair(
        "streamed_linear/triton-16",
        _summed(streamed_linear),
        _STREAMED,
        _products(_HALF_TYPES),
        4e-3,
        2**-7,
        _HALF,
    ),
    KernelPair(
        "rms_norm/triton-parts",
        _of_sums(add_rms_norm),
        _triton("rms_norm.kernel", "add_rms_norm"),
        _norms(),
        2e-6,
        1e-5,
        _ROUNDING,
    ),
    KernelPair(
        "gated_activation/triton-parts",
        _of_sums(gated_activation),
        _triton("gated_activation.kernel", "gated_activation"),
        _gates(),
        2e-5,
        2e-5,
        _ROUNDING,
    ),
    KernelPair(
        "rope_and_cache/triton-parts",
        _of_sums(rope_and_cache),
        _triton("rope_and_cache.kernel", "rope_and_cache"),
        [case for norm in (False, True) for pending in (False, True) for case in _decodes(norm, pending)],
        2e-5,
        1e-2,
        "a last-place difference may round a bfloat16 cache entry the other way: one part in 128",
    ),
)

# Programs of these kernels wait for each other, so no interpreter runs them: on Hopper only.
HOPPER_PAIRS: tuple[KernelPair, ...] = (
    KernelPair(
        "streamed_block/hopper",
        streamed_block,
        _block_kernel,
        _blocks(),
        8e-2,
        2e-2,
        "rows are rounded to bfloat16 before their norm's factor, the reference's are not rounded",
    ),
)
