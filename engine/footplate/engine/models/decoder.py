"""A pre-norm decoder of the Llama family, and Gemma 3, which differs by the flags of its config.

Gemma 3 (arXiv:2503.19786) adds norms on the outputs of attention and MLP, per-head norms of q and k, sliding
windows with their own rotary base, and scaled embeddings. Everything else is Llama.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from footplate.engine.kernels.cpu_decoder import CpuDecoder, LayerWeights
from footplate.engine.kernels.cpu_ops import CpuOps
from footplate.engine.kernels.linear.dense import DenseLinear
from footplate.engine.kernels.linear.packed import PackedLinear
from footplate.engine.kernels.ops import AttentionBatch, AttentionSpec, Embedding, Linear, Ops, Product
from footplate.engine.layers.attention import Attention, KvPair
from footplate.engine.layers.layer_stack import LastTokens, LayerStack, last_tokens
from footplate.engine.layers.mlp import GatedMlp
from footplate.engine.layers.rope import cos_sin_table
from footplate.engine.weights.model_config import ModelConfig
from footplate.engine.weights.weight_source import WeightSource


@dataclass(frozen=True, slots=True)
class Placement:
    """Where and in what type a model computes. `packed` keeps quantised weights as integer codes.

    With `deterministic` a row's bits do not depend on its batch; dense weights on CUDA pay for it with time.
    """

    dtype: torch.dtype
    device: torch.device
    packed: bool
    deterministic: bool = False

    @property
    def is_invariant(self) -> bool:
        """Whether products need the slower kernels whose rows are independent."""
        return self.deterministic and self.device.type == "cuda"

    @property
    def streams(self) -> bool:
        """Whether products of few rows have a kernel that reads weights faster than the library's."""
        if self.device.type != "cuda" or self.dtype.itemsize != 2:
            return False
        return torch.cuda.get_device_capability(self.device)[0] == 9


@dataclass(slots=True)
class DecoderLayer:
    """One block; the residual stream is the caller's and is changed in place."""

    ops: Ops
    eps: float
    attention: Attention
    mlp: GatedMlp
    attn_norm: torch.Tensor
    mlp_norm: torch.Tensor
    post_attn_norm: torch.Tensor | None
    post_mlp_norm: torch.Tensor | None

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        batch: AttentionBatch,
        kv: KvPair,
        last: LastTokens | None = None,
    ) -> Product:
        """Takes the normed input [T, hidden]; gives what the next norm adds to the residual.

        With last tokens the residual, and what is given, has their rows only.
        """
        out = self.attention(x, batch, kv, last)
        if self.post_attn_norm is not None:
            out = self.ops.rms_norm(out, self.post_attn_norm, self.eps)
        out = self.mlp(self.ops.add_rms_norm(out, residual, self.mlp_norm, self.eps))
        if self.post_mlp_norm is not None:
            out = self.ops.rms_norm(out, self.post_mlp_norm, self.eps)
        return out


class Decoder:
    """Embedding, layers, final norm and head. Holds weights only; caches come with each call."""

    def __init__(
        self, config: ModelConfig, weights: WeightSource, ops: Ops, place: Placement, max_len: int
    ) -> None:
        """Takes every tensor out of `weights` and closes it.

        Raises:
            LoadError: a tensor is missing, has the wrong shape, or was not used.
        """
        self.config = config
        self._ops = ops
        self.dtype = place.dtype
        self._place = place
        builder = _Builder(config, weights, ops, place, max_len)
        self._embed: Embedding = weights.embedding(place.dtype, place.device, place.packed)
        self.layers = [builder.layer(index) for index in range(config.num_layers)]
        self._final_norm = builder.norm("final_norm")
        self._head: Linear = builder.linear("", "head")
        weights.finish()

    @property
    def embedding(self) -> Embedding:
        return self._embed

    @property
    def head(self) -> Linear:
        return self._head

    def bind(self, caches: list[KvPair]) -> LayerStack:
        """All layers over one set of caches, as few calls as their backend has a form for."""
        packed = [w for w in map(_packed_weights, self.layers) if w is not None]
        if isinstance(self._ops, CpuOps) and len(packed) == len(self.layers):
            native = CpuDecoder(self._ops, packed, caches, self.config.norm_eps, self.config.activation)
            return lambda x, batch, last: native(x, batch, None if last is None else last.batch)

        def one_by_one(
            residual: torch.Tensor, batch: AttentionBatch, last: LastTokens | None
        ) -> torch.Tensor:
            return self._run_layers(residual, batch, last, caches)

        if self._place.device.type == "cuda" and not self._place.is_invariant:
            return self._on_cuda(caches, one_by_one)
        return one_by_one

    def _on_cuda(self, caches: list[KvPair], general: LayerStack) -> LayerStack:
        """Steps of few rows have forms of their own, each in front of the next."""
        from footplate.engine.kernels.triton_ops import TritonOps
        from footplate.engine.models import fused_decoder, streamed_decoder

        ops = self._ops
        if not isinstance(ops, TritonOps):
            return general
        if self._place.streams:
            general = streamed_decoder.stream(ops, self.layers, self._final_norm, caches, general) or general
        if not self._place.streams or fused_decoder.is_small(self.layers[0]):
            general = fused_decoder.fuse(ops, self.layers, caches, general) or general
        return general

    def hidden(
        self, token_ids: torch.Tensor, batch: AttentionBatch, layers: LayerStack, *, last_only: bool = False
    ) -> torch.Tensor:
        """token_ids [T] -> hidden states before the final norm, [T, hidden]; `layers` is from `bind`.

        With `last_only` those of each sequence's last token, [S, hidden], for less work.
        """
        residual = self._embed(token_ids).to(self.dtype)
        if self.config.embed_scale != 1.0:
            # The scale is rounded to the compute type, as the models were trained.
            residual = residual * torch.tensor(self.config.embed_scale, dtype=residual.dtype)
        has_more = len(token_ids) > len(batch.context_lens)
        return layers(residual, batch, last_tokens(batch) if last_only and has_more else None)

    def _run_layers(
        self, residual: torch.Tensor, batch: AttentionBatch, last: LastTokens | None, caches: list[KvPair]
    ) -> torch.Tensor:
        x = self._ops.rms_norm(residual, self.layers[0].attn_norm, self.config.norm_eps)
        # The last norm here is made anew by `scores`, for the rows that draw; its kernel also adds.
        norms = [layer.attn_norm for layer in self.layers[1:]] + [self._final_norm]
        for layer, kv, norm in zip(self.layers, caches, norms, strict=True):
            picked = last if layer is self.layers[-1] else None
            if picked is not None:
                residual = residual[picked.rows]
            x = self._ops.add_rms_norm(layer(x, residual, batch, kv, picked), residual, norm, layer.eps)
        return residual

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, hidden] -> [R, vocab] float32, which the caller may change; valid until the next call."""
        if isinstance(self._head, PackedLinear):
            return self._capped(self._head.normed(hidden, self._final_norm, self.config.norm_eps))
        return self.scores(hidden).float()

    def scores(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The logits of dense weights in the compute type, written to `out` [R, vocab] if given."""
        assert isinstance(self._head, DenseLinear), "packed heads are for the CPU runner"
        normed = self._ops.rms_norm(hidden, self._final_norm, self.config.norm_eps)
        return self._capped(self._head(normed, out=out))

    def _capped(self, logits: torch.Tensor) -> torch.Tensor:
        cap = self.config.final_soft_cap
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits


def _packed_weights(layer: DecoderLayer) -> LayerWeights | None:
    """The layer as the native stack takes it, if all its matrices are packed."""
    attention, mlp = layer.attention, layer.mlp
    matrices = (attention.qkv, attention.out, mlp.gate_up, mlp.down)
    qkv, out, gate_up, down = (m if isinstance(m, PackedLinear) else None for m in matrices)
    if qkv is None or out is None or gate_up is None or down is None:
        return None
    q_norm, k_norm = attention.qk_norm[:2] if attention.qk_norm else (None, None)
    return LayerWeights(
        qkv,
        out,
        gate_up,
        down,
        layer.attn_norm,
        layer.mlp_norm,
        attention.spec,
        attention.cos_sin,
        post_attn_norm=layer.post_attn_norm,
        post_mlp_norm=layer.post_mlp_norm,
        q_norm=q_norm,
        k_norm=k_norm,
    )


class _Builder:
    """Takes a layer's tensors by name and puts them together."""

    def __init__(
        self, config: ModelConfig, weights: WeightSource, ops: Ops, place: Placement, max_len: int
    ) -> None:
        self._config, self._weights, self._ops, self._place = config, weights, ops, place
        self._tables = {
            local: cos_sin_table(config, max_len, place.device, local=local)
            for local in {not config.is_global(i) for i in range(config.num_layers)}
        }

    def norm(self, name: str) -> torch.Tensor:
        return self._weights.tensor(name, torch.float32, self._place.device)

    def linear(self, prefix: str, *names: str) -> Linear:
        place = self._place
        made = self._weights.linear([prefix + n for n in names], place.dtype, place.device, place.packed)
        if place.is_invariant and isinstance(made, DenseLinear):
            from footplate.engine.kernels.linear.invariant import InvariantLinear

            return InvariantLinear(made.weight)
        if prefix and isinstance(made, DenseLinear) and place.streams:
            from footplate.engine.kernels.linear.streamed import StreamedLinear

            return StreamedLinear(made.weight, use_pdl=getattr(self._ops, "use_pdl", False))
        return made

    def layer(self, index: int) -> DecoderLayer:
        config, prefix = self._config, f"layers.{index}."
        post = config.post_norms
        return DecoderLayer(
            ops=self._ops,
            eps=config.norm_eps,
            attention=self._attention(index, prefix),
            mlp=GatedMlp(
                self._ops,
                self.linear(prefix, "gate", "up"),
                self.linear(prefix, "down"),
                config.activation,
            ),
            attn_norm=self.norm(prefix + "attn_norm"),
            mlp_norm=self.norm(prefix + "mlp_norm"),
            post_attn_norm=self.norm(prefix + "post_attn_norm") if post else None,
            post_mlp_norm=self.norm(prefix + "post_mlp_norm") if post else None,
        )

    def _attention(self, index: int, prefix: str) -> Attention:
        config = self._config
        spec = AttentionSpec(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.attention_scale,
            window=config.layer_windows[index],
            soft_cap=config.attention_soft_cap,
        )
        norms = None
        if config.qk_norm:
            norms = (self.norm(prefix + "q_norm"), self.norm(prefix + "k_norm"), config.norm_eps)
        return Attention(
            self._ops,
            spec,
            self.linear(prefix, "q", "k", "v"),
            self.linear(prefix, "o"),
            self._tables[not config.is_global(index)],
            norms,
        )
