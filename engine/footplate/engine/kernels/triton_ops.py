"""The Triton kernels as a backend for NVIDIA GPUs. Importing this imports triton."""

from __future__ import annotations

import torch

from footplate.engine.kernels.attention.launch import AttentionOptions, Workspace, attention
from footplate.engine.kernels.embedding.kernel import embedding
from footplate.engine.kernels.gated_activation.kernel import gated_activation
from footplate.engine.kernels.ops import AttentionBatch, AttentionSpec, Product
from footplate.engine.kernels.rms_norm.kernel import add_rms_norm, rms_norm
from footplate.engine.kernels.rope_and_cache.kernel import rope_and_cache


class TritonOps:
    """Implements `Ops`, and the ops around a model that are worth a kernel on a GPU.

    Every output is a new tensor. No call reads the device or waits for it, so steps may be captured in
    CUDA graphs; a kernel is compiled at its first call, which must come before the capture.
    """

    def __init__(self, options: AttentionOptions | None = None) -> None:
        self._options = options or AttentionOptions()
        self._use_pdl = self._options.use_pdl
        self._workspace = Workspace()

    @property
    def use_pdl(self) -> bool:
        """Whether kernels are launched while the one before them ends."""
        return self._use_pdl

    def rms_norm(self, x: Product, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return rms_norm(x, weight, eps, use_pdl=self._use_pdl)

    def add_rms_norm(
        self, x: Product, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        return add_rms_norm(x, residual, weight, eps, use_pdl=self._use_pdl)

    def rope_and_cache(
        self,
        qkv: Product,
        spec: AttentionSpec,
        batch: AttentionBatch,
        cos_sin: torch.Tensor,
        kv: tuple[torch.Tensor, torch.Tensor],
        qk_norm: tuple[torch.Tensor, torch.Tensor, float] | None,
    ) -> torch.Tensor:
        return rope_and_cache(qkv, spec, batch, cos_sin, kv, qk_norm, use_pdl=self._use_pdl)

    def attention(
        self,
        q: torch.Tensor,
        spec: AttentionSpec,
        batch: AttentionBatch,
        kv: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Leading `batch.num_decodes` rows by splits of their keys, the others by tiles of queries."""
        return attention(q, spec, batch, kv, self._options, self._workspace)

    def gated_activation(self, gate_up: Product, kind: str) -> torch.Tensor:
        return gated_activation(gate_up, kind, use_pdl=self._use_pdl)

    def embedding(self, token_ids: torch.Tensor, table: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Rows of the table [vocabulary, K], times the scale in the table's type: ids [T] -> [T, K]."""
        return embedding(token_ids, table, scale, use_pdl=self._use_pdl)
