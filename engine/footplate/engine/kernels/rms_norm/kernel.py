"""Root-mean-square norm in Triton, with or without adding to the residual stream first."""

import torch
import triton
import triton.language as tl

from footplate.engine.kernels.streamed_linear.kernel import load_sums
from footplate.engine.kernels.streamed_linear.parts import Parts, readable

ELEMENTS_PER_PROGRAM = 4096  # short rows share a program
ELEMENTS_PER_WARP = 512  # 16 a lane: two 16-byte loads of a 16-bit type


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x,
    residual,
    weight,
    output,
    num_rows,
    x_stride,
    residual_stride,
    size,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    MOST: tl.constexpr,
    TILE: tl.constexpr,
    STEPS: tl.constexpr,
    SHARE: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    is_column = column < size
    inside = (row < num_rows)[:, None] & is_column[None, :]
    # Weights come from no earlier kernel, so they may be fetched before that one has ended.
    w = tl.load(weight + column, mask=is_column, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        # Nor does the residual stream: the last kernel that wrote to it is at least three before this one.
        at = residual + row[:, None] * residual_stride + column[None, :]
        before = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    values = load_sums(x, row[:, None], column[None, :], inside, x_stride, num_rows, MOST, TILE, STEPS, SHARE)
    if HAS_RESIDUAL:
        total = before + values
        stored = total.to(residual.dtype.element_ty)
        tl.store(at, stored, mask=inside)
        values = stored.to(tl.float32)
    mean_square = tl.sum(values * values, axis=1) / size
    normed = values * tl.rsqrt(mean_square + eps)[:, None] * w[None, :]
    tl.store(output + row[:, None] * size + column[None, :], normed.to(output.dtype.element_ty), mask=inside)


def _launch(
    x: torch.Tensor | Parts, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, use_pdl: bool
) -> torch.Tensor:
    num_rows, size = x.shape
    first, stride, constants = readable(x)
    streams = (first,) if residual is None else (first, residual)
    if any(t.stride(-1) != 1 or t.shape[-2:] != x.shape for t in streams) or not weight.is_contiguous():
        raise ValueError("rms_norm needs rows of one shape whose elements lie side by side")
    dtype = x.dtype if residual is None else residual.dtype
    output = torch.empty((num_rows, size), dtype=dtype, device=x.device)
    columns = triton.next_power_of_2(size)
    rows = max(1, min(ELEMENTS_PER_PROGRAM // columns, 16))
    if num_rows:
        _rms_norm_kernel[(triton.cdiv(num_rows, rows),)](
            first,
            residual,
            weight,
            output,
            num_rows,
            stride,
            0 if residual is None else residual.stride(0),
            size,
            eps,
            HAS_RESIDUAL=residual is not None,
            ROWS=rows,
            COLUMNS=columns,
            USE_PDL=use_pdl,
            num_warps=max(1, min(rows * columns // ELEMENTS_PER_WARP, 16)),
            **constants,
            **({"launch_pdl": True} if use_pdl else {}),
        )
    return output


def rms_norm(
    x: torch.Tensor | Parts, weight: torch.Tensor, eps: float, *, use_pdl: bool = False
) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) * weight over the last dimension of [T, K], in x's type.

    Rows of x may lie apart; elements of a row may not.
    """
    return _launch(x, None, weight, eps, use_pdl)


def add_rms_norm(
    x: torch.Tensor | Parts,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    use_pdl: bool = False,
) -> torch.Tensor:
    """Add x to residual in place, then norm the stored sum; the result has residual's type."""
    return _launch(x, residual, weight, eps, use_pdl)
