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

    def __call__(
        self, x: torch.Tensor, add_to: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[T, K] -> [T, N]: a new tensor, or added in place to `add_to`, or written to `out`."""
        x = x.to(self.weight.dtype)
        if self.weight.dtype is not self.dtype:  # emulated
            product = F.linear(x, self.weight).to(self.dtype)
            return _take(product, add_to, out)
        if add_to is not None:
            return torch.addmm(add_to, x, self.weight.T, out=add_to)
        if out is not None:
            return torch.mm(x, self.weight.T, out=out)
        return F.linear(x, self.weight)


def _take(product: torch.Tensor, add_to: torch.Tensor | None, out: torch.Tensor | None) -> torch.Tensor:
    if add_to is not None:
        return add_to.add_(product)
    return product if out is None else out.copy_(product)


class DenseEmbedding:
    """A token table [vocabulary, K] held by torch."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Rows of the table, [T] integer -> [T, K] in the table's type."""
        return F.embedding(token_ids, self.weight)
