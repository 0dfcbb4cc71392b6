"""The weights of one block."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Block:
    """Weights from one attention's output to the next one's q, k and v. All in bfloat16, gains in float32."""

    out: torch.Tensor  # [K, H D]
    mlp_gain: torch.Tensor  # [K]
    gate_up: torch.Tensor  # [2 F, K]
    down: torch.Tensor  # [K, F]
    next_gain: torch.Tensor  # [K]; of the final norm behind the last layer
    next_qkv: torch.Tensor | None  # [(H + 2 KH) D, K]
    eps: float
    activation: str

    @property
    def size(self) -> int:
        """K: the residual stream's width."""
        return self.out.shape[0]
