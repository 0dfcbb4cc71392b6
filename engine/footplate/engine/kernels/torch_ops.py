"""The references as a backend, for any type and torch device: the fallback, and the parity path of tests."""

from __future__ import annotations

import torch

from footplate.engine.kernels.attention.reference import attention
from footplate.engine.kernels.gated_activation.reference import gated_activation
from footplate.engine.kernels.ops import AttentionBatch, AttentionSpec
from footplate.engine.kernels.rms_norm.reference import add_rms_norm, rms_norm
from footplate.engine.kernels.rope_and_cache.reference import rope_and_cache


class TorchOps:
    """Implements `Ops`; holds no state, every output is a new tensor."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        return add_rms_norm(x, residual, weight, eps)

    def rope_and_cache(
        self,
        qkv: torch.Tensor,
        spec: AttentionSpec,
        batch: AttentionBatch,
        cos_sin: torch.Tensor,
        kv: tuple[torch.Tensor, torch.Tensor],
        qk_norm: tuple[torch.Tensor, torch.Tensor, float] | None,
    ) -> torch.Tensor:
        return rope_and_cache(qkv, spec, batch, cos_sin, kv, qk_norm)

    def attention(
        self,
        q: torch.Tensor,
        spec: AttentionSpec,
        batch: AttentionBatch,
        kv: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        return attention(q, spec, batch, kv)

    def gated_activation(self, gate_up: torch.Tensor, kind: str) -> torch.Tensor:
        return gated_activation(gate_up, kind)
