"""Splitting qkv, per-head norm, rotary positions and the KV write in plain PyTorch."""

from __future__ import annotations

import torch

from footplate.engine.kernels.ops import AttentionBatch, AttentionSpec
from footplate.engine.kernels.rms_norm.reference import rms_norm


def rotate_halves(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotate (x[i], x[i + D/2]) by the angle of pair i. x [T, heads, D], cos_sin [T, D] float32; x's type.

    Source: RoFormer (arXiv:2104.09864), with pairs laid out as in GPT-NeoX.
    """
    cosine, sine = cos_sin[:, None, :].chunk(2, dim=-1)
    first, second = x.float().chunk(2, dim=-1)
    rotated = torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
    return rotated.to(x.dtype)


def rope_and_cache(
    qkv: torch.Tensor,
    spec: AttentionSpec,
    batch: AttentionBatch,
    cos_sin: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    qk_norm: tuple[torch.Tensor, torch.Tensor, float] | None,
) -> torch.Tensor:
    """The contract of `Ops.rope_and_cache`: writes k and v to their slots, returns q [T, H, D].

    A token whose slot is -1 only fills a batch and writes nothing.
    """
    num_tokens = qkv.shape[0]
    heads = qkv.view(num_tokens, spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)
    q, k, v = torch.split(heads, [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
    if qk_norm is not None:
        q_weight, k_weight, eps = qk_norm
        q, k = rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)
    angles = cos_sin[batch.positions.long()]
    q, k = rotate_halves(q, angles), rotate_halves(k, angles)
    k_cache, v_cache = kv
    block_size = k_cache.shape[2]
    is_kept = batch.slots >= 0
    slots = batch.slots[is_kept]
    block, offset = slots // block_size, slots % block_size
    k_cache[block, :, offset] = k[is_kept].to(k_cache.dtype)
    v_cache[block, :, offset] = v[is_kept].to(v_cache.dtype)
    return q
