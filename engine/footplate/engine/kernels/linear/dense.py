"""Weights as torch tensors: any type, any device."""

from __future__ import annotations

import torch
import torch.nn.functional as F


class DenseLinear:
    """A weight [N, K] held by torch. Rows come in the weight's type."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight
        self.out_features, self.in_features = weight.shape

    def __call__(self, x: torch.Tensor, add_to: torch.Tensor | None = None) -> torch.Tensor:
        """[T, K] -> [T, N], a new tensor; or added in place to `add_to` [T, N], which is returned."""
        product = F.linear(x, self.weight)
        return product if add_to is None else add_to.add_(product)


class DenseEmbedding:
    """A token table [vocabulary, K] held by torch."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Rows of the table, [T] integer -> [T, K] in the table's type."""
        return F.embedding(token_ids, self.weight)
