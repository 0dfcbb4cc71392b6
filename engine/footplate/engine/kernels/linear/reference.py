"""Multiplying rows, rounded to int8 per group, by a weight: the packed kernel's definition."""

from __future__ import annotations

import torch

ACTIVATION_GROUP = 32
ACTIVATION_MAX = 127


def quantise_rows(x: torch.Tensor) -> torch.Tensor:
    """x [T, K] rounded to 8 bits in groups of 32 of a row, back in float32; scale max|x| / 127, ties to even.

    No row knows another, so a result never depends on what else is in the batch.
    """
    groups = x.float().reshape(x.shape[0], x.shape[1] // ACTIVATION_GROUP, ACTIVATION_GROUP)
    largest = groups.abs().amax(dim=-1, keepdim=True)
    scale = largest / ACTIVATION_MAX
    inverse = torch.where(largest > 0, ACTIVATION_MAX / largest, torch.zeros_like(largest))
    return (torch.round(groups * inverse) * scale).reshape(x.shape)


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """quantise_rows(x) weightᵀ for a dequantised weight [N, K] float32. [T, K] -> [T, N] float32."""
    return quantise_rows(x) @ weight.float().T
