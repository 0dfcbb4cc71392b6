"""The gate of a gated MLP in Triton."""

import torch
import triton
import triton.language as tl

from footplate.engine.kernels.streamed_linear.kernel import load_sums
from footplate.engine.kernels.streamed_linear.parts import Parts, readable

COLUMNS = 1024
NUM_WARPS = 4


@triton.jit
def _sigmoid(x):
    # Of -|x|, so that no exponential overflows.
    small = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, small) / (1.0 + small)


@triton.jit(do_not_specialize=["num_rows"])
def _gated_activation_kernel(
    gate_up,
    output,
    num_rows,
    row_stride,
    size,
    IS_SILU: tl.constexpr,
    COLUMNS: tl.constexpr,
    MOST: tl.constexpr,
    TILE: tl.constexpr,
    STEPS: tl.constexpr,
    SHARE: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < size
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    gate = load_sums(gate_up, row, column, inside, row_stride, num_rows, MOST, TILE, STEPS, SHARE)
    up = load_sums(gate_up, row, size + column, inside, row_stride, num_rows, MOST, TILE, STEPS, SHARE)
    if IS_SILU:
        activated = gate * _sigmoid(gate)
    else:
        # (1 + tanh(u)) / 2 = sigmoid(2 u), with u = sqrt(2 / pi) (x + 0.044715 x³).
        activated = gate * _sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    tl.store(output + row * size + column, (activated * up).to(output.dtype.element_ty), mask=inside)


def gated_activation(gate_up: torch.Tensor | Parts, kind: str, *, use_pdl: bool = False) -> torch.Tensor:
    """act(gate) * up for [T, 2 F], gate first; `silu` or `gelu_tanh`, float32 inside. Returns [T, F].

    Raises:
        ValueError: another kind, or elements of a row that lie apart.
    """
    if kind not in ("silu", "gelu_tanh"):
        raise ValueError(f"activation {kind!r} is unknown; it must be silu or gelu_tanh")
    first, stride, constants = readable(gate_up)
    if first.stride(-1) != 1:
        raise ValueError("gated_activation needs rows whose elements lie side by side")
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    output = torch.empty((num_rows, size), dtype=gate_up.dtype, device=gate_up.device)
    if num_rows:
        _gated_activation_kernel[(num_rows, triton.cdiv(size, COLUMNS))](
            first,
            output,
            num_rows,
            stride,
            size,
            IS_SILU=kind == "silu",
            COLUMNS=COLUMNS,
            USE_PDL=use_pdl,
            num_warps=NUM_WARPS,
            **constants,
            **({"launch_pdl": True} if use_pdl else {}),
        )
    return output
