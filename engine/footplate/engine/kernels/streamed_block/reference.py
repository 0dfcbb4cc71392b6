"""What lies between two attentions in plain PyTorch, float32 inside."""

from __future__ import annotations

import torch

from footplate.engine.kernels.gated_activation.reference import gated_activation
from footplate.engine.kernels.rms_norm.reference import rms_norm
from footplate.engine.kernels.streamed_block.block import Block


def streamed_block(attended: torch.Tensor, block: Block, residual: torch.Tensor) -> torch.Tensor:
    """attended [M, H D] -> the next layer's q, k and v [M, (H + 2 KH) D]; residual [M, K] behind the last
    layer.

    residual is changed in place, rounded after each half of the block.
    """
    residual.copy_(residual.float() + attended.float() @ block.out.float().T)
    x = rms_norm(residual.float(), block.mlp_gain, block.eps)
    inner = gated_activation(x @ block.gate_up.float().T, block.activation)
    residual.copy_(residual.float() + inner @ block.down.float().T)
    if block.next_qkv is None:
        return residual
    x = rms_norm(residual.float(), block.next_gain, block.eps)
    return (x @ block.next_qkv.float().T).to(attended.dtype)
