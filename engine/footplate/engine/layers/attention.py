"""Grouped-query attention over the paged cache: projections around the attention kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from footplate.engine.kernels.ops import AttentionBatch, AttentionSpec, Linear, Ops, Product
from footplate.engine.layers.layer_stack import LastTokens

KvPair = tuple[torch.Tensor, torch.Tensor]  # keys and values, each [B, KH, block_size, D]


@dataclass(slots=True)
class Attention:
    """One layer's attention. `cos_sin` is shared by all layers of the same kind."""

    ops: Ops
    spec: AttentionSpec
    qkv: Linear
    out: Linear
    cos_sin: torch.Tensor
    qk_norm: tuple[torch.Tensor, torch.Tensor, float] | None

    def __call__(
        self, x: torch.Tensor, batch: AttentionBatch, kv: KvPair, last: LastTokens | None = None
    ) -> Product:
        """[T, hidden] -> [T, hidden], or [S, hidden] of last tokens; writes all T keys and values first."""
        q = self.ops.rope_and_cache(self.qkv(x), self.spec, batch, self.cos_sin, kv, self.qk_norm)
        if last is not None:
            q, batch = q[last.rows], last.batch
        return self.out(self.ops.attention(q, self.spec, batch, kv))
