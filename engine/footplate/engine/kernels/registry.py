"""Every kernel beside the reference that defines it, with the cases both must agree on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from footplate.engine.kernels import cases
from footplate.engine.kernels.attention.reference import attention
from footplate.engine.kernels.block_copy.reference import block_copy
from footplate.engine.kernels.cpu_ops import CpuOps
from footplate.engine.kernels.embedding.reference import embedding
from footplate.engine.kernels.gated_activation.reference import gated_activation
from footplate.engine.kernels.linear.packed import PackedLinear, PackedMatrix
from footplate.engine.kernels.linear.reference import linear
from footplate.engine.kernels.pair import KernelPair
from footplate.engine.kernels.rms_norm.reference import add_rms_norm, norm_add, rms_norm
from footplate.engine.kernels.rope_and_cache.reference import rope_and_cache
from footplate.engine.kernels.step_pairs import STEP_PAIRS
from footplate.engine.kernels.streamed_pairs import STREAMED_PAIRS
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


@functools.cache
def triton_ops() -> Any:
    """The Triton backend; triton is imported when first asked for, as CPU installs have none."""
    from footplate.engine.kernels.triton_ops import TritonOps

    return TritonOps()


def _triton(method: str) -> Callable[..., torch.Tensor]:
    def call(*arguments: Any) -> torch.Tensor:
        result: torch.Tensor = getattr(triton_ops(), method)(*arguments)
        return result

    return call


def _in_place(copy: Callable[..., None]) -> Callable[..., torch.Tensor]:
    def call(caches: Sequence[torch.Tensor], copies: torch.Tensor) -> torch.Tensor:
        copy(caches, copies)
        return copies

    return call


def _packed_reference(x: torch.Tensor, segments: Sequence[StoredRows]) -> torch.Tensor:
    weight = torch.cat([torch.from_numpy(dequantise(rows.type_name, rows.raw)) for rows in segments])
    return linear(x, weight)


def _packed_kernel(x: torch.Tensor, segments: Sequence[StoredRows]) -> torch.Tensor:
    return PackedLinear(PackedMatrix(cpu_ops().library, segments))(x)


def _triton_block_copy(*arguments: Any) -> None:
    from footplate.engine.kernels.block_copy.kernel import block_copy as kernel

    kernel(*arguments)


_ROUNDING = "float32 on both sides; sums are taken in another order"
_HALF = "16-bit results: two last places of bfloat16 (the interpreter truncates where hardware rounds)"
_HALF_TOLERANCE = (2e-3, 2**-6)
_WEIGHTS = "16-bit weights of values, as tensor cores take them, rounded once more at the end"
_TRITON_PAIRS: tuple[KernelPair, ...] = (
    KernelPair("rms_norm/triton", rms_norm, _triton("rms_norm"), cases.rms_norm(), 1e-6, 1e-5, _ROUNDING),
    KernelPair(
        "rms_norm/triton-16",
        rms_norm,
        _triton("rms_norm"),
        cases.in_16_bits(cases.rms_norm(), [0]),
        *_HALF_TOLERANCE,
        _HALF,
    ),
    KernelPair(
        "rms_norm/triton-add",
        add_rms_norm,
        _triton("add_rms_norm"),
        cases.add_rms_norm(),
        1e-6,
        1e-5,
        _ROUNDING,
    ),
    KernelPair(
        "rms_norm/triton-add-16",
        add_rms_norm,
        _triton("add_rms_norm"),
        cases.in_16_bits(cases.add_rms_norm(), [0, 1]),
        8e-3,
        2**-6,
        _HALF,
    ),
    KernelPair(
        "gated_activation/triton",
        gated_activation,
        _triton("gated_activation"),
        cases.gated_activation(),
        2e-5,
        2e-5,
        "the reference itself loses digits in 1 + tanh(x) for negative x; gate * up reaches 100 here",
    ),
    KernelPair(
        "gated_activation/triton-16",
        gated_activation,
        _triton("gated_activation"),
        cases.in_16_bits(cases.gated_activation(), [0]),
        *_HALF_TOLERANCE,
        _HALF,
    ),
    KernelPair(
        "embedding/triton",
        embedding,
        _triton("embedding"),
        cases.embedding(),
        0,
        2**-6,
        _HALF,
    ),
    KernelPair(
        "block_copy/triton",
        _in_place(block_copy),
        _in_place(_triton_block_copy),
        cases.block_copy(),
        0,
        0,
        "copies are exact",
    ),
    KernelPair(
        "rope_and_cache/triton",
        rope_and_cache,
        _triton("rope_and_cache"),
        [*cases.rope_and_cache(), *cases.padded_rows()],
        2e-6,
        1e-2,
        "a last-place difference may round a bfloat16 cache entry the other way: one part in 128",
    ),
    KernelPair(
        "rope_and_cache/triton-16",
        rope_and_cache,
        _triton("rope_and_cache"),
        cases.in_16_bits(cases.rope_and_cache()[:6], [0, 4]),
        2e-2,
        2**-6,
        _HALF + "; a norm and a turn round one after the other",
    ),
    KernelPair(
        "attention/triton",
        attention,
        _triton("attention"),
        cases.attention(cases.BLOCK_SIZE),
        5e-6,
        1e-4,
        _ROUNDING,
    ),
    KernelPair(
        "attention/triton-16",
        attention,
        _triton("attention"),
        cases.in_16_bits(cases.attention(cases.BLOCK_SIZE), [0, 3]),
        1e-2,
        2**-6,
        _WEIGHTS,
    ),
    KernelPair(
        "attention/triton-decode", attention, _triton("attention"), cases.decodes(), 5e-6, 1e-4, _ROUNDING
    ),
    KernelPair(
        "attention/triton-prefix",
        attention,
        _triton("attention"),
        cases.shared_prefix(),
        5e-6,
        1e-4,
        _ROUNDING,
    ),
)
PAIRS: tuple[KernelPair, ...] = (
    KernelPair("rms_norm/cpu", rms_norm, _cpu("rms_norm"), cases.rms_norm(), 1e-6, 1e-5, _ROUNDING),
    KernelPair(
        "rms_norm/cpu-add", add_rms_norm, _cpu("add_rms_norm"), cases.add_rms_norm(), 1e-6, 1e-5, _ROUNDING
    ),
    KernelPair(
        "rms_norm/cpu-norm-add", norm_add, _cpu("norm_add"), cases.add_rms_norm(), 1e-6, 1e-5, _ROUNDING
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
    *_TRITON_PAIRS,
    *STEP_PAIRS,
    *STREAMED_PAIRS,
    KernelPair("linear/cpu", _packed_reference, _packed_kernel, cases.linear(), 2e-4, 1e-4, _ROUNDING),
)
