"""Causal attention over a paged KV cache in plain PyTorch, one sequence after the other."""

from __future__ import annotations

import torch

from footplate.engine.kernels.ops import AttentionBatch, AttentionSpec


def attention(
    q: torch.Tensor,
    spec: AttentionSpec,
    batch: AttentionBatch,
    kv: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """softmax(scale * q kᵀ, soft-capped and masked) v for every row. [T, H, D] -> [T, H * D] in q's type.

    A row at position p of its sequence sees positions p - window + 1 .. p (all up to p without a window).
    """
    output = torch.empty_like(q)
    starts = batch.query_starts.tolist()
    for index, context_len in enumerate(batch.context_lens.tolist()):
        begin, end = starts[index], starts[index + 1]
        if begin == end:
            continue
        keys, values = (_gather(cache, batch.block_tables[index], context_len) for cache in kv)
        output[begin:end] = _one_sequence(q[begin:end], keys, values, spec).to(q.dtype)
    return output.flatten(1)


def _gather(cache: torch.Tensor, block_table: torch.Tensor, context_len: int) -> torch.Tensor:
    """The first context_len cached rows of one sequence, [KH, context_len, D] float32."""
    block_size = cache.shape[2]
    num_blocks = -(-context_len // block_size)
    blocks = cache[block_table[:num_blocks].long()]
    return blocks.transpose(0, 1).flatten(1, 2)[:, :context_len].float()


def _one_sequence(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spec: AttentionSpec
) -> torch.Tensor:
    """q [Q, H, D] are the last Q positions of the context. Returns [Q, H, D] float32."""
    group = spec.num_heads // spec.num_kv_heads
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    scores = torch.einsum("qhd,hkd->hqk", q.float(), keys) * spec.scale
    if spec.soft_cap:
        scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
    num_queries, context_len = q.shape[0], keys.shape[1]
    key_at = torch.arange(context_len, device=q.device)
    query_at = torch.arange(context_len - num_queries, context_len, device=q.device)[:, None]
    hidden = key_at > query_at
    if spec.window:
        hidden |= key_at <= query_at - spec.window
    scores = scores.masked_fill(hidden, float("-inf"))
    return torch.einsum("hqk,hkd->qhd", scores.softmax(dim=-1), values)
