"""Weights as torch tensors: any type, any device."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def _is_emulated(weight: torch.Tensor) -> bool:
    """Whether torch multiplies this type on CPU by a plain loop, hundreds of times slower than float32."""
    if weight.device.type != "cpu" or weight.dtype not in (torch.bfloat16, torch.float16):
        return False
    native = torch.ops.mkldnn
    if weight.dtype is torch.bfloat16:
        return not native._is_mkldnn_bf16_supported()
    return not native._is_mkldnn_fp16_supported()


class DenseLinear:
    """A weight [N, K] held by torch. Rows come in the weight's type.

    On a CPU without instructions for a 16-bit type the product is made in float32 from the same rounded
    values, and rounded once at the end, which is what those instructions do; it takes twice the memory.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self.dtype = weight.dtype
        self.weight = weight.float() if _is_emulated(weight) else weight
        self.out_features, self.in_features = weight.shape

    def __call__(self, x: torch.Tensor, add_to: torch.Tensor | None = None) -> torch.Tensor:
        """[T, K] -> [T, N], a new tensor; or added in place to `add_to` [T, N], which is returned."""
        product = F.linear(x.to(self.weight.dtype), self.weight).to(self.dtype)
        return product if add_to is None else add_to.add_(product)


class DenseEmbedding:
    """A token table [vocabulary, K] held by torch."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Rows of the table, [T] integer -> [T, K] in the table's type."""
        return F.embedding(token_ids, self.weight)
