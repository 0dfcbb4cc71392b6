"""A whole stack of packed decoder layers as one native call: the CPU's fast path around `CpuOps`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from footplate.engine.kernels.cpu.library import DecoderLayer, Sequences
from footplate.engine.kernels.cpu_ops import CpuOps, describe_sequences
from footplate.engine.kernels.linear.packed import PROLOGUE_ACTIVATIONS, PackedLinear
from footplate.engine.kernels.ops import AttentionBatch, AttentionSpec

_REUSED_ROWS = 64  # scratch for up to this many rows is kept between steps


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer: x += o(attention(rope(qkv(norm(x))))); x += down(act(gate) * up of
    gate_up(norm(x))).

    With post norms, an output is normed before it is added. Norm weights and cos_sin are contiguous float32.
    """

    qkv: PackedLinear
    o: PackedLinear
    gate_up: PackedLinear
    down: PackedLinear
    attn_norm: torch.Tensor
    mlp_norm: torch.Tensor
    spec: AttentionSpec
    cos_sin: torch.Tensor
    post_attn_norm: torch.Tensor | None = None
    post_mlp_norm: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None


class CpuDecoder:
    """Runs hidden states through all layers in place; the same bits as the same ops called one by one.

    Holds the weights and KV tensors it was given. Not for use by two threads at once.
    """

    def __init__(
        self,
        ops: CpuOps,
        layers: Sequence[LayerWeights],
        kv: Sequence[tuple[torch.Tensor, torch.Tensor]],
        eps: float,
        activation: str,
    ) -> None:
        self._ops = ops
        self._kept = (list(layers), list(kv))
        self._layers = (DecoderLayer * len(layers))()
        for into, weights, cache in zip(self._layers, layers, kv, strict=True):
            _describe(into, weights)
            into.cache = ops.cache_layer(weights.spec, cache)
            into.eps, into.prologue = eps, PROLOGUE_ACTIVATIONS[activation]
        self._run = ops.library.fp_run_layers
        self._width = int(ops.library.fp_decoder_scratch(self._layers, len(layers)))
        self._scratch = torch.empty(_REUSED_ROWS * self._width)
        self._last = Sequences()

    def __call__(
        self, x: torch.Tensor, batch: AttentionBatch, last: AttentionBatch | None = None
    ) -> torch.Tensor:
        """x [T, hidden] float32, contiguous, changed in place and returned; writes keys and values.

        With `last` (the same S sequences, one query each: their last tokens) x comes back as their rows only.
        """
        num_rows, picked = x.shape[0], None
        if last is not None:
            describe_sequences(last, self._last)
            picked = self._last
        assert x.is_contiguous() and x.dtype is torch.float32
        scratch = self._scratch if num_rows <= _REUSED_ROWS else torch.empty(num_rows * self._width)
        status = self._run(
            self._layers,
            len(self._layers),
            x.data_ptr(),
            self._ops.sequences_of(batch),
            picked,
            scratch.data_ptr(),
        )
        if status:
            raise MemoryError(f"decoder layers: no memory for {num_rows} rows (status {status})")
        return x if last is None else x[: last.positions.shape[0]]


def _describe(into: DecoderLayer, weights: LayerWeights) -> None:
    for name in ("qkv", "o", "gate_up", "down"):
        setattr(into, name, ctypes.pointer(getattr(weights, name).matrix.struct))
    for name in ("attn_norm", "mlp_norm", "post_attn_norm", "post_mlp_norm", "q_norm", "k_norm", "cos_sin"):
        tensor = getattr(weights, name)
        assert tensor is None or (tensor.is_contiguous() and tensor.dtype is torch.float32)
        setattr(into, name, None if tensor is None else tensor.data_ptr())
