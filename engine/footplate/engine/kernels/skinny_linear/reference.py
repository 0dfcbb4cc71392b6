"""The four products of a decoder layer with what stands around them, in plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from footplate.engine.kernels.gated_activation.reference import gated_activation
from footplate.engine.kernels.ops import AttentionBatch, AttentionSpec
from footplate.engine.kernels.rms_norm.reference import rms_norm
from footplate.engine.kernels.rope_and_cache.reference import rotate_halves


@dataclass(frozen=True, slots=True)
class QkvLayer:
    """What never changes between the residual stream and the attention of one layer."""

    weight: torch.Tensor  # [(H + 2 KH) D, K]: rows of q, of k, of v
    norm_weight: torch.Tensor  # [K]
    eps: float
    spec: AttentionSpec
    cos_sin: torch.Tensor  # [P, D] float32: D/2 cosines, then D/2 sines
    qk_norm: tuple[torch.Tensor, torch.Tensor, float] | None = None


def linear(x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """x weightᵀ for x [M, K] and weight [N, K], float32 inside, rounded once. [M, N]."""
    return (x.float() @ weight.float().T).to(out_dtype or x.dtype)


def norm_linear(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """rms_norm(x) weightᵀ, float32 inside, rounded once. [M, K] -> [M, N]."""
    return linear(rms_norm(x.float(), norm_weight, eps), weight, out_dtype or x.dtype)


def norm_gate_up(
    x: torch.Tensor, norm_weight: torch.Tensor, eps: float, weight: torch.Tensor, kind: str
) -> torch.Tensor:
    """act(gate) * up of rms_norm(x) weightᵀ for weight [2 F, K], gate first. [M, K] -> [M, F].

    Raises:
        ValueError: kind is neither `silu` nor `gelu_tanh`.
    """
    gate_up = norm_linear(x, norm_weight, eps, weight, torch.float32)
    return gated_activation(gate_up, kind).to(x.dtype)


def linear_add(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """residual [M, N] += x weightᵀ in place, float32 inside, rounded once. Returns residual."""
    return residual.copy_(residual.float() + linear(x, weight, torch.float32))


def norm_qkv_rope_cache(
    x: torch.Tensor, layer: QkvLayer, batch: AttentionBatch, kv: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """Norm, product, per-head norm, rotation and KV write of one layer. [M, K] -> q [M, H, D] in x's type.

    Row m has position batch.positions[m] and writes to batch.slots[m]; slot -1 writes nothing.
    """
    spec = layer.spec
    qkv = norm_linear(x, layer.norm_weight, layer.eps, layer.weight, torch.float32)
    heads = qkv.view(x.shape[0], spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)
    q, k, v = torch.split(heads, [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
    if layer.qk_norm is not None:
        q_weight, k_weight, eps = layer.qk_norm
        q, k = rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)
    angles = layer.cos_sin[batch.positions.long()]
    q, k = rotate_halves(q, angles), rotate_halves(k, angles)
    is_stored = batch.slots >= 0
    slots, block_size = batch.slots[is_stored], kv[0].shape[2]
    for cache, rows in zip(kv, (k, v), strict=True):
        cache[slots // block_size, :, slots % block_size] = rows[is_stored].to(cache.dtype)
    return q.to(x.dtype)
