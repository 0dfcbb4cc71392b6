"""Root-mean-square norm in Triton, with or without adding to the residual stream first."""

import torch
import triton
import triton.language as tl

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
    USE_PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    is_column = column < size
    inside = (row < num_rows)[:, None] & is_column[None, :]
    # Weights come from no earlier kernel, so they may be fetched before that one has ended.
    w = tl.load(weight + column, mask=is_column, other=0.0).to(tl.float32)
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    values = tl.load(x + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        at = residual + row[:, None] * residual_stride + column[None, :]
        total = tl.load(at, mask=inside, other=0.0).to(tl.float32) + values
        stored = total.to(residual.dtype.element_ty)
        tl.store(at, stored, mask=inside)
        values = stored.to(tl.float32)
    mean_square = tl.sum(values * values, axis=1) / size
    normed = values * tl.rsqrt(mean_square + eps)[:, None] * w[None, :]
    tl.store(output + row[:, None] * size + column[None, :], normed.to(output.dtype.element_ty), mask=inside)


def _launch(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, use_pdl: bool
) -> torch.Tensor:
    num_rows, size = x.shape
    streams = (x,) if residual is None else (x, residual)
    if any(t.stride(-1) != 1 or t.shape != x.shape for t in streams) or not weight.is_contiguous():
        raise ValueError("rms_norm needs rows of one shape whose elements lie side by side")
    output = torch.empty((num_rows, size), dtype=streams[-1].dtype, device=x.device)
    columns = triton.next_power_of_2(size)
    rows = max(1, min(ELEMENTS_PER_PROGRAM // columns, 16))
    if num_rows:
        _rms_norm_kernel[(triton.cdiv(num_rows, rows),)](
            x,
            residual,
            weight,
            output,
            num_rows,
            x.stride(0),
            0 if residual is None else residual.stride(0),
            size,
            eps,
            HAS_RESIDUAL=residual is not None,
            ROWS=rows,
            COLUMNS=columns,
            USE_PDL=use_pdl,
            num_warps=max(1, min(rows * columns // ELEMENTS_PER_WARP, 16)),
            **({"launch_pdl": True} if use_pdl else {}),
        )
    return output


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, use_pdl: bool = False) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) * weight over the last dimension of [T, K], in x's type.

    Rows of x may lie apart; elements of a row may not.
    """
    return _launch(x, None, weight, eps, use_pdl)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, use_pdl: bool = False
) -> torch.Tensor:
    """Add x to residual in place, then norm the stored sum; the result has residual's type."""
    return _launch(x, residual, weight, eps, use_pdl)
