"""Layers of a Llama-family model for decode steps of one row on a CUDA device, as few kernels.

Such a step is bound by reading every weight once. Five launches a layer (six when keys are split): norm,
product, rotation and KV write are one; attention; product added to the residual; norm, product and activation
are one; product added to the residual. From two rows on the library's products are faster.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from footplate.engine.kernels.linear.dense import DenseLinear
from footplate.engine.kernels.ops import AttentionBatch, AttentionSpec
from footplate.engine.kernels.skinny_linear.kernel import linear_add, norm_gate_up, norm_qkv_rope_cache
from footplate.engine.kernels.skinny_linear.reference import QkvLayer
from footplate.engine.kernels.triton_ops import TritonOps
from footplate.engine.layers.attention import KvPair
from footplate.engine.layers.layer_stack import LastTokens, LayerStack

if TYPE_CHECKING:
    from footplate.engine.models.decoder import DecoderLayer

MAX_TOKENS = 1
# On Hopper the streamed blocks of larger layers are faster: on an H200 one row of Llama-3.2-1B takes 0.79 ms
# here and 0.93 there, one of Llama-3.1-8B 4.30 and 3.98, as measured in runs apart.
SMALL_LAYER_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """Weights of one layer without norms on the outputs of its halves; all in one 16-bit or 32-bit type."""

    qkv: QkvLayer
    out: torch.Tensor  # [hidden, H D]
    mlp_norm: torch.Tensor  # [hidden] float32
    gate_up: torch.Tensor  # [2 F, hidden]
    down: torch.Tensor  # [hidden, F]
    eps: float
    activation: str
    spec: AttentionSpec


class FusedDecoder:
    """Runs fused layers up to MAX_TOKENS tokens, and `general` above."""

    def __init__(
        self,
        ops: TritonOps,
        layers: list[FusedLayer],
        caches: list[KvPair],
        general: LayerStack,
        max_tokens: int = MAX_TOKENS,
    ) -> None:
        self._ops = ops
        self._layers = layers
        self._caches = caches
        self._general = general
        self._max_tokens = max_tokens
        self._pdl = ops.use_pdl

    def __call__(
        self, residual: torch.Tensor, batch: AttentionBatch, last: LastTokens | None
    ) -> torch.Tensor:
        """As a `LayerStack`; so few rows are made as a whole, and last tokens picked from them."""
        if residual.shape[0] > self._max_tokens:
            return self._general(residual, batch, last)
        for layer, kv in zip(self._layers, self._caches, strict=True):
            q = norm_qkv_rope_cache(residual, layer.qkv, batch, kv, use_pdl=self._pdl)
            attended = self._ops.attention(q, layer.spec, batch, kv)
            linear_add(attended, layer.out, residual, use_pdl=self._pdl)
            gated = norm_gate_up(
                residual, layer.mlp_norm, layer.eps, layer.gate_up, layer.activation, use_pdl=self._pdl
            )
            linear_add(gated, layer.down, residual, use_pdl=self._pdl)
        return residual if last is None else residual[last.rows]


def fuse(
    ops: TritonOps,
    layers: list[DecoderLayer],
    caches: list[KvPair],
    general: LayerStack,
    max_tokens: int = MAX_TOKENS,
) -> FusedDecoder | None:
    """The layers fused; None when they are of a kind that has no fused form."""
    fused = [_fused(layer) for layer in layers]
    kept = [layer for layer in fused if layer is not None]
    return FusedDecoder(ops, kept, caches, general, max_tokens) if len(kept) == len(layers) else None


def is_small(layer: DecoderLayer) -> bool:
    """Whether one row is fastest here even where streamed blocks exist."""
    fused = _fused(layer)
    if fused is None:
        return False
    weights = (fused.qkv.weight, fused.out, fused.gate_up, fused.down)
    return sum(w.numel() * w.element_size() for w in weights) < SMALL_LAYER_BYTES


def _fused(layer: DecoderLayer) -> FusedLayer | None:
    attention, mlp = layer.attention, layer.mlp
    matrices = [
        m for m in (attention.qkv, attention.out, mlp.gate_up, mlp.down) if isinstance(m, DenseLinear)
    ]
    if len(matrices) < 4 or layer.post_attn_norm is not None or layer.post_mlp_norm is not None:
        return None
    qkv, out, gate_up, down = (m.weight for m in matrices)
    return FusedLayer(
        QkvLayer(qkv, layer.attn_norm, layer.eps, attention.spec, attention.cos_sin, attention.qk_norm),
        out,
        layer.mlp_norm,
        gate_up,
        down,
        layer.eps,
        mlp.activation,
        attention.spec,
    )
