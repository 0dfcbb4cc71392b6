"""The gate of a gated MLP in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def gated_activation(gate_up: torch.Tensor, kind: str) -> torch.Tensor:
    """act(gate) * up for [T, 2 F], gate first; `silu` or `gelu_tanh`, float32 inside. Returns [T, F].

    Source: GLU variants (arXiv:2002.05202); the tanh form of GELU is from arXiv:1606.08415.

    Raises:
        ValueError: another kind.
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    if kind == "silu":
        return (F.silu(gate) * up).to(gate_up.dtype)
    if kind == "gelu_tanh":
        return (F.gelu(gate, approximate="tanh") * up).to(gate_up.dtype)
    raise ValueError(f"activation {kind!r} is unknown; it must be silu or gelu_tanh")
