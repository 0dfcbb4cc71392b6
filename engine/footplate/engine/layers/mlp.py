"""The gated MLP (arXiv:2002.05202)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from footplate.engine.kernels.ops import Linear, Ops, Product


@dataclass(slots=True)
class GatedMlp:
    """down(act(gate(x)) * up(x)), gate and up as one stacked product."""

    ops: Ops
    gate_up: Linear
    down: Linear
    activation: str

    def __call__(self, x: torch.Tensor) -> Product:
        return self.down(self.ops.gated_activation(self.gate_up(x), self.activation))
