"""Root-mean-square norm in plain PyTorch: the specification of every backend's kernel."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) * weight over the last dimension, float32 inside, in x's type.

    Source: arXiv:1910.07467.
    """
    wide = x.float()
    inverse = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * inverse * weight.float()).to(x.dtype)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Add x to residual in place, then norm the stored sum (so rounding to residual's type comes first)."""
    residual.add_(x)
    return rms_norm(residual, weight, eps)


def norm_add(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Add the norm of x to residual in place. Returns residual."""
    return residual.add_(rms_norm(x, weight, eps))
