"""The native CPU backend: float32 rows, a float32 or bfloat16 KV cache, packed or dense weights."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from footplate.engine.errors import LoadError
from footplate.engine.kernels.cpu.library import CacheLayer, Sequences, load_library
from footplate.engine.kernels.ops import AttentionBatch, AttentionSpec

MAX_HEAD_DIM = 256
_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}


class CpuOps:
    """Implements `Ops` with the native library. Tensors are contiguous; every output is a new tensor.

    A row's result depends on its own sequence alone: the same bits in any batch, for any cut of a prompt into
    steps, and with any number of threads. Not for use by two threads at once.

    Raises:
        LoadError: the library can't be built or loaded.
    """

    def __init__(self, cache_dir: str | Path | None = None, num_threads: int | None = None) -> None:
        self.library = load_library(cache_dir, num_threads)
        self._layers: dict[int, tuple[AttentionSpec, tuple[torch.Tensor, torch.Tensor], CacheLayer]] = {}
        self._batch: AttentionBatch | None = None
        self._sequences = Sequences()
        self._sequences_pointer = ctypes.pointer(self._sequences)

    def set_threads(self, num_threads: int) -> None:
        """Threads that share each op from now on; results do not depend on it."""
        self.library.fp_set_threads(num_threads)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        num_rows, size = x.shape
        out = torch.empty((num_rows, size))
        self.library.fp_rms_norm(x.data_ptr(), None, weight.data_ptr(), num_rows, size, eps, out.data_ptr())
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        num_rows, size = x.shape
        out = torch.empty((num_rows, size))
        self.library.fp_rms_norm(
            x.data_ptr(), residual.data_ptr(), weight.data_ptr(), num_rows, size, eps, out.data_ptr()
        )
        return out

    def norm_add(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """`residual += rms_norm(x)` in place: a post norm and its sum in one call. Returns residual."""
        num_rows, size = x.shape
        self.library.fp_norm_add(x.data_ptr(), residual.data_ptr(), weight.data_ptr(), num_rows, size, eps)
        return residual

    def rope_and_cache(
        self,
        qkv: torch.Tensor,
        spec: AttentionSpec,
        batch: AttentionBatch,
        cos_sin: torch.Tensor,
        kv: tuple[torch.Tensor, torch.Tensor],
        qk_norm: tuple[torch.Tensor, torch.Tensor, float] | None,
    ) -> torch.Tensor:
        q = torch.empty((qkv.shape[0], spec.num_heads, spec.head_dim))
        q_norm, k_norm, eps = (0, 0, 0.0)
        if qk_norm is not None:
            q_norm, k_norm, eps = qk_norm[0].data_ptr(), qk_norm[1].data_ptr(), qk_norm[2]
        self.library.fp_rope_and_cache(
            qkv.data_ptr(),
            self.cache_layer(spec, kv),
            self.sequences_of(batch),
            cos_sin.data_ptr(),
            q_norm,
            k_norm,
            eps,
            q.data_ptr(),
        )
        return q

    def attention(
        self,
        q: torch.Tensor,
        spec: AttentionSpec,
        batch: AttentionBatch,
        kv: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        out = torch.empty((q.shape[0], spec.num_heads * spec.head_dim))
        status = self.library.fp_attention(
            q.data_ptr(), self.cache_layer(spec, kv), self.sequences_of(batch), out.data_ptr()
        )
        if status:
            raise MemoryError(f"attention: no memory for {q.shape[0]} rows (status {status})")
        return out

    def gated_activation(self, gate_up: torch.Tensor, kind: str) -> torch.Tensor:
        num_rows, size = gate_up.shape
        out = torch.empty((num_rows, size // 2))
        self.library.fp_gated_activation(
            gate_up.data_ptr(), num_rows, size // 2, _ACTIVATIONS[kind], out.data_ptr()
        )
        return out

    def cache_layer(self, spec: AttentionSpec, kv: tuple[torch.Tensor, torch.Tensor]) -> CacheLayer:
        """The layer's description for C, made once: a key tensor stands for one layer of one pool."""
        known = self._layers.get(id(kv[0]))
        if known is not None and known[0] is spec and known[1][0] is kv[0] and known[1][1] is kv[1]:
            return known[2]
        if spec.head_dim % 8 or spec.head_dim > MAX_HEAD_DIM:
            raise LoadError(f"head size {spec.head_dim} has no CPU kernel; multiples of 8 up to 256 have")
        keys, values = kv
        if keys.dtype not in (torch.float32, torch.bfloat16) or values.dtype != keys.dtype:
            raise LoadError(f"KV cache of {keys.dtype} has no CPU kernel; use float32 or bfloat16")
        if not (keys.is_contiguous() and values.is_contiguous()):
            raise LoadError("the KV cache of a layer must be contiguous")
        layer = CacheLayer(
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            block_size=keys.shape[2],
            is_bf16=keys.dtype == torch.bfloat16,
            window=spec.window,
            scale=spec.scale,
            soft_cap=spec.soft_cap,
        )
        self._layers[id(keys)] = (spec, kv, layer)
        return layer

    def sequences_of(self, batch: AttentionBatch) -> ctypes._Pointer[Sequences]:
        """The batch's description for C, made once a step: the batch object stands for one step."""
        if self._batch is not batch:
            self._batch = batch
            describe_sequences(batch, self._sequences)
        return self._sequences_pointer


def describe_sequences(batch: AttentionBatch, into: Sequences) -> None:
    """The batch for C: pointers into its tensors, which must outlive the description."""
    into.positions, into.slots = batch.positions.data_ptr(), batch.slots.data_ptr()
    into.query_starts, into.context_lens = batch.query_starts.data_ptr(), batch.context_lens.data_ptr()
    into.block_tables = batch.block_tables.data_ptr()
    into.num_tokens, into.num_sequences = batch.positions.shape[0], batch.context_lens.shape[0]
    into.table_width, into.max_query_len = batch.block_tables.shape[1], batch.max_query_len
