"""Layers of a Llama-family model for decode steps of few rows on Hopper: two or three kernels a layer.

Such a step is bound by reading every weight once. Rotation and KV write, attention, and everything from
there to the next layer's q, k and v (`kernels/streamed_block`). Above some rows the library's products are
as fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from footplate.engine.kernels.linear.dense import DenseLinear
from footplate.engine.kernels.ops import AttentionBatch
from footplate.engine.kernels.streamed_block.block import Block
from footplate.engine.kernels.streamed_block.launch import most_rows, new_counters, streamed_block, suits
from footplate.engine.kernels.streamed_linear.kernel import streamed_linear
from footplate.engine.kernels.streamed_linear.parts import Parts
from footplate.engine.kernels.triton_ops import TritonOps
from footplate.engine.layers.attention import KvPair
from footplate.engine.layers.layer_stack import LastTokens, LayerStack

if TYPE_CHECKING:
    from footplate.engine.models.decoder import DecoderLayer


class StreamedDecoder:
    """Runs steps of single tokens in blocks up to `max_rows` rows, and `general` for all others.

    Its counters allow one step at a time on the device.
    """

    def __init__(
        self,
        ops: TritonOps,
        layers: list[DecoderLayer],
        blocks: list[Block],
        caches: list[KvPair],
        general: LayerStack,
    ) -> None:
        self._ops = ops
        self._layers = layers
        self._blocks = blocks
        self._caches = caches
        self._general = general
        self._max_rows = min(map(most_rows, blocks))
        self._counters = new_counters(len(blocks), blocks[0].out.device)

    def __call__(
        self, residual: torch.Tensor, batch: AttentionBatch, last: LastTokens | None
    ) -> torch.Tensor:
        """As a `LayerStack`; so few rows are made as a whole, and last tokens picked from them."""
        if residual.shape[0] > self._max_rows:
            return self._general(residual, batch, last)
        ops, first = self._ops, self._layers[0]
        x = ops.rms_norm(residual, first.attn_norm, first.eps)
        qkv: Parts | None = streamed_linear(x, _weight(first.attention.qkv), use_pdl=ops.use_pdl)
        for i, (layer, block) in enumerate(zip(self._layers, self._blocks, strict=True)):
            attention, kv = layer.attention, self._caches[i]
            q = ops.rope_and_cache(qkv, attention.spec, batch, attention.cos_sin, kv, attention.qk_norm)
            attended = ops.attention(q, attention.spec, batch, kv)
            following = self._counters[(i + 1) % len(self._counters)]
            qkv = streamed_block(attended, block, residual, self._counters[i], following, use_pdl=ops.use_pdl)
        return residual if last is None else residual[last.rows]


def stream(
    ops: TritonOps,
    layers: list[DecoderLayer],
    final_norm: torch.Tensor,
    caches: list[KvPair],
    general: LayerStack,
) -> StreamedDecoder | None:
    """The layers as blocks; None when they are of a kind that has no such form."""
    is_dense = all(
        isinstance(m, DenseLinear)
        for layer in layers
        for m in (layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down)
    )
    has_post_norms = any(layer.post_attn_norm is not None for layer in layers)
    if len(layers) < 2 or not is_dense or has_post_norms:
        return None
    blocks = []
    for i, layer in enumerate(layers):
        following = layers[i + 1] if i + 1 < len(layers) else None
        blocks.append(
            Block(
                _weight(layer.attention.out),
                layer.mlp_norm,
                _weight(layer.mlp.gate_up),
                _weight(layer.mlp.down),
                final_norm if following is None else following.attn_norm,
                None if following is None else _weight(following.attention.qkv),
                layer.eps,
                layer.mlp.activation,
            )
        )
    if not all(map(suits, blocks)) or min(map(most_rows, blocks)) == 0:
        return None
    return StreamedDecoder(ops, layers, blocks, caches, general)


def _weight(linear: object) -> torch.Tensor:
    assert isinstance(linear, DenseLinear)
    return linear.weight
