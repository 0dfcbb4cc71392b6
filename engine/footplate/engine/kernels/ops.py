"""The ops a model is made of, as one protocol: models call these and know no backend.

Shapes: T tokens of this step over all sequences, H query heads, KH key/value heads, D head size, B blocks of
the pool, S sequences. The KV cache of a layer is two tensors [B, KH, block_size, D]; a token's slot is
`block * block_size + offset`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

# What a backend's Linear gives, and its other ops take: a tensor, or on a GPU parts of one that are not
# summed yet.
Product = Any


@dataclass(slots=True)
class PrefixGroups:
    """Decode rows whose first blocks are physically the same; group g owns rows[starts[g] : starts[g + 1]].

    A row is in one group at most, and computes at least one token past its prefix by itself.
    """

    rows: torch.Tensor  # [R] int32, sequences among the batch's decodes
    starts: torch.Tensor  # [G + 1] int32
    lens: torch.Tensor  # [G] int32, tokens all members share: whole blocks
    row_lens: torch.Tensor  # [num_decodes] int32, the length of each row's group, 0 without one


@dataclass(slots=True)
class AttentionBatch:
    """Where this step's tokens stand: sequence s owns rows query_starts[s] : query_starts[s + 1].

    The last two fields are hints: a backend may use them, and answers the same if it doesn't.
    """

    positions: torch.Tensor  # [T] int32, position of each token in its sequence
    slots: torch.Tensor  # [T] int64, where each token's key and value go
    query_starts: torch.Tensor  # [S + 1] int32
    context_lens: torch.Tensor  # [S] int32, tokens in the KV cache after this step's writes
    block_tables: torch.Tensor  # [S, max_blocks] int32, padded with 0
    max_query_len: int
    max_context_len: int
    num_decodes: int = 0  # leading sequences known to have one query each
    prefix_groups: PrefixGroups | None = None


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What never changes for one attention layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int = 0  # tokens a query sees, itself included; 0: all before it
    soft_cap: float = 0.0  # 0: none


class Linear(Protocol):
    """A weight [N, K] that multiplies rows: [T, K] -> [T, N]. How the bytes lie is its own business."""

    out_features: int
    in_features: int

    def __call__(self, x: torch.Tensor, add_to: torch.Tensor | None = None) -> Product:
        """The product; or, with `add_to` [T, N], the product added to it in place, and `add_to` returned."""
        ...


class Embedding(Protocol):
    """A token table [vocabulary, K]: ids [T] -> rows [T, K]."""

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor: ...


class Ops(Protocol):
    """One backend's kernels.

    Outputs are new tensors, or scratch that stays valid until the next call of the same op with the same
    shape; a caller that keeps a result longer copies it.
    """

    def rms_norm(self, x: Product, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Root-mean-square norm of the last dimension (arXiv:1910.07467), float32 inside. [T, K]."""
        ...

    def add_rms_norm(
        self, x: Product, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """`residual += x` in place, then the norm of the sum."""
        ...

    def rope_and_cache(
        self,
        qkv: Product,
        spec: AttentionSpec,
        batch: AttentionBatch,
        cos_sin: torch.Tensor,
        kv: tuple[torch.Tensor, torch.Tensor],
        qk_norm: tuple[torch.Tensor, torch.Tensor, float] | None,
    ) -> torch.Tensor:
        """Split qkv [T, (H + 2 KH) D], norm q and k per head if asked, rotate halves, write k and v to slots.

        cos_sin is [max_position, D] float32: D/2 cosines, then D/2 sines. Returns q [T, H, D].
        """
        ...

    def attention(
        self,
        q: torch.Tensor,
        spec: AttentionSpec,
        batch: AttentionBatch,
        kv: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Causal attention of each row over its sequence's cached keys and values. [T, H, D] -> [T, H * D].

        Slots past a sequence's context may hold anything, NaN too, and never matter.
        """
        ...

    def gated_activation(self, gate_up: Product, kind: str) -> torch.Tensor:
        """act(gate) * up for gate_up [T, 2 F]; kind is `silu` or `gelu_tanh`. [T, F]."""
        ...
