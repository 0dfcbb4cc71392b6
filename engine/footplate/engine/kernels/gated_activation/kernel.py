"""The gate of a gated MLP in Triton."""

import torch
import triton
import triton.language as tl

COLUMNS = 1024
NUM_WARPS = 4


@triton.jit
def _sigmoid(x):
    # Of -|x|, so that no exponential overflows.
    small = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, small) / (1.0 + small)


@triton.jit
def _gated_activation_kernel(
    gate_up,
    output,
    row_stride,
    size,
    IS_SILU: tl.constexpr,
    COLUMNS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < size
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    gate = tl.load(gate_up + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * row_stride + size + column, mask=inside, other=0.0).to(tl.float32)
    if IS_SILU:
        activated = gate * _sigmoid(gate)
    else:
        # (1 + tanh(u)) / 2 = sigmoid(2 u), with u = sqrt(2 / pi) (x + 0.044715 x³).
        activated = gate * _sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    tl.store(output + row * size + column, (activated * up).to(output.dtype.element_ty), mask=inside)


def gated_activation(gate_up: torch.Tensor, kind: str, *, use_pdl: bool = False) -> torch.Tensor:
    """act(gate) * up for [T, 2 F], gate first; `silu` or `gelu_tanh`, float32 inside. Returns [T, F].

    Raises:
        ValueError: another kind, or elements of a row that lie apart.
    """
    if kind not in ("silu", "gelu_tanh"):
        raise ValueError(f"activation {kind!r} is unknown; it must be silu or gelu_tanh")
    if gate_up.stride(-1) != 1:
        raise ValueError("gated_activation needs rows whose elements lie side by side")
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    output = torch.empty((num_rows, size), dtype=gate_up.dtype, device=gate_up.device)
    if num_rows:
        _gated_activation_kernel[(num_rows, triton.cdiv(size, COLUMNS))](
            gate_up,
            output,
            gate_up.stride(0),
            size,
            IS_SILU=kind == "silu",
            COLUMNS=COLUMNS,
            USE_PDL=use_pdl,
            num_warps=NUM_WARPS,
            **({"launch_pdl": True} if use_pdl else {}),
        )
    return output
