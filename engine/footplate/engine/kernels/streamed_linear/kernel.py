"""Streamed products in Triton, and how kernels read what they leave."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from footplate.engine.kernels.streamed_linear.parts import STEP, Cut, Parts, choose, row_bucket

# Triton's interpreter multiplies the bits of bfloat16; products of 16-bit values are exact in float32.
_WIDENS = tl.constexpr(triton.knobs.runtime.interpret)
_INTERPRETED_SMS = 5  # few, so that shares begin and end within tiles


@triton.jit
def load_sums(
    x,
    row,
    column,
    inside,
    row_stride,
    num_rows,
    MOST: tl.constexpr,
    TILE: tl.constexpr,
    STEPS: tl.constexpr,
    SHARE: tl.constexpr,
):
    """x[row, column] in float32: of a tensor where MOST is 0, else the sum of a column's parts, in order."""
    at = x + row * row_stride + column
    total = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if MOST > 1:
        tile = column // TILE
        count = ((tile + 1) * STEPS - 1) // SHARE - tile * STEPS // SHARE + 1
        for part in tl.static_range(1, MOST):
            total += tl.load(at + part * num_rows * row_stride, mask=inside & (part < count), other=0.0)
    return total


@triton.jit(do_not_specialize=["num_rows"])
def _streamed_kernel(
    x,
    weight,
    parts,
    num_rows,
    N: tl.constexpr,
    K: tl.constexpr,
    STEPS: tl.constexpr,
    SHARE: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
):
    TOTAL: tl.constexpr = (N + TILE - 1) // TILE * STEPS
    program = tl.program_id(0)
    m = tl.arange(0, ROWS).to(tl.int64)
    n = tl.arange(0, TILE)
    k = tl.arange(0, STEP)
    is_row = m < num_rows
    end = tl.minimum((program + 1) * SHARE, TOTAL)
    unit = program * SHARE
    while unit < end:
        tile = unit // STEPS
        stop = tl.minimum((tile + 1) * STEPS, end)
        is_output = tile * TILE + n < N
        total = tl.zeros((TILE, ROWS), dtype=tl.float32)
        for at in range(unit - tile * STEPS, stop - tile * STEPS):
            column = at * STEP + k
            is_column = column < K
            w_at = weight + (tile * TILE + n).to(tl.int64)[:, None] * K + column[None, :]
            w = tl.load(w_at, mask=is_output[:, None] & is_column[None, :], other=0.0)
            x_at = x + m[None, :] * K + column[:, None]
            values = tl.load(x_at, mask=is_row[None, :] & is_column[:, None], other=0.0)
            if _WIDENS:
                w, values = w.to(tl.float32), values.to(tl.float32)
            total = tl.dot(w, values, total, input_precision="ieee")
        part = program - tile * STEPS // SHARE
        kept = parts + (part * num_rows + m)[None, :] * N + (tile * TILE + n)[:, None]
        tl.store(kept, total, mask=is_row[None, :] & is_output[:, None])
        unit = stop


@functools.cache
def _num_sms(device: torch.device) -> int:
    if _WIDENS.value:
        return _INTERPRETED_SMS
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _cut(num_outputs: int, num_inputs: int, bucket: int, device: torch.device) -> Cut:
    return choose(num_outputs, num_inputs, bucket, _num_sms(device))


def _has_tma(x: torch.Tensor) -> bool:
    return not _WIDENS.value and x.element_size() == 2 and torch.cuda.get_device_capability(x.device)[0] == 9


def streamed_linear(
    x: torch.Tensor, weight: torch.Tensor, cut: Cut | None = None, *, use_pdl: bool = False
) -> Parts:
    """x weightᵀ for x [M, K], M up to MAX_ROWS, and weight [N, K], both contiguous: parts of [M, N].

    Raises:
        ValueError: rows that do not fit the weight, or too many of them.
    """
    if not (x.is_contiguous() and weight.is_contiguous()):
        raise ValueError("a streamed product needs contiguous rows and weights")
    if x.dtype is not weight.dtype or x.shape[1] != weight.shape[1]:
        raise ValueError(f"rows {x.dtype} {tuple(x.shape)} don't fit {weight.dtype} {tuple(weight.shape)}")
    num_rows, bucket = x.shape[0], row_bucket(x.shape[0])
    num_outputs, num_inputs = weight.shape
    cut = cut or _cut(num_outputs, num_inputs, bucket, x.device)
    values = torch.empty((cut.most_parts, num_rows, num_outputs), dtype=torch.float32, device=x.device)
    constants = {"N": num_outputs, "STEPS": cut.steps, "SHARE": cut.share}
    if _has_tma(x) and num_inputs % 8 == 0:
        from triton.experimental.gluon.language import NVMMASharedLayout
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        from footplate.engine.kernels.streamed_linear.hopper.kernel import streamed_kernel

        lines = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
        streamed_kernel[(cut.num_programs,)](
            TensorDescriptor.from_tensor(x, [bucket, STEP], lines),
            TensorDescriptor.from_tensor(weight, [cut.tile, STEP], lines),
            values,
            num_rows,
            STAGES=cut.num_stages,
            USE_PDL=use_pdl,
            num_warps=4,
            **constants,
            **({"launch_pdl": True} if use_pdl else {}),
        )
    else:
        _streamed_kernel[(cut.num_programs,)](
            x,
            weight,
            values,
            num_rows,
            K=num_inputs,
            TILE=cut.tile,
            STEP=STEP,
            ROWS=max(bucket, 16),
            **constants,
        )
    return Parts(values, cut, x.dtype)
