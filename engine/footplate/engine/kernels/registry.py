"""Every kernel beside the reference that defines it, with the cases both must agree on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from footplate.engine.kernels import cases
from footplate.engine.kernels.attention.reference import attention
from footplate.engine.kernels.cpu_ops import CpuOps
from footplate.engine.kernels.gated_activation.reference import gated_activation
from footplate.engine.kernels.linear.packed import PackedLinear, PackedMatrix
from footplate.engine.kernels.linear.reference import linear
from footplate.engine.kernels.pair import KernelPair
from footplate.engine.kernels.rms_norm.reference import add_rms_norm, rms_norm
from footplate.engine.kernels.rope_and_cache.reference import rope_and_cache
from footplate.engine.kernels.step_pairs import STEP_PAIRS
from footplate.engine.weights.gguf_tensors import StoredRows, dequantise


@functools.cache
def cpu_ops() -> CpuOps:
    """The native backend that the pairs below share."""
    return CpuOps()


def _cpu(method: str) -> Callable[..., torch.Tensor]:
    def call(*arguments: Any) -> torch.Tensor:
        result: torch.Tensor = getattr(cpu_ops(), method)(*arguments)
        return result

    return call


def _packed_reference(x: torch.Tensor, segments: Sequence[StoredRows]) -> torch.Tensor:
    weight = torch.cat([torch.from_numpy(dequantise(rows.type_name, rows.raw)) for rows in segments])
    return linear(x, weight)


def _packed_kernel(x: torch.Tensor, segments: Sequence[StoredRows]) -> torch.Tensor:
    return PackedLinear(PackedMatrix(cpu_ops().library, segments))(x)


_ROUNDING = "float32 on both sides; sums are taken in another order"
PAIRS: tuple[KernelPair, ...] = (
    KernelPair("rms_norm/cpu", rms_norm, _cpu("rms_norm"), cases.rms_norm(), 1e-6, 1e-5, _ROUNDING),
    KernelPair(
        "rms_norm/cpu-add", add_rms_norm, _cpu("add_rms_norm"), cases.add_rms_norm(), 1e-6, 1e-5, _ROUNDING
    ),
    KernelPair(
        "gated_activation/cpu",
        gated_activation,
        _cpu("gated_activation"),
        cases.gated_activation(),
        2e-5,
        2e-5,
        "the reference itself loses digits in 1 + tanh(x) for negative x; gate * up reaches 100 here",
    ),
    KernelPair(
        "rope_and_cache/cpu",
        rope_and_cache,
        _cpu("rope_and_cache"),
        cases.rope_and_cache(),
        2e-6,
        1e-2,
        "a last-place difference may round a bfloat16 cache entry the other way: one part in 128",
    ),
    KernelPair("attention/cpu", attention, _cpu("attention"), cases.attention(), 5e-6, 1e-4, _ROUNDING),
    *STEP_PAIRS,
    KernelPair("linear/cpu", _packed_reference, _packed_kernel, cases.linear(), 2e-4, 1e-4, _ROUNDING),
)
