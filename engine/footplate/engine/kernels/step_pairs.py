"""The kernels of a decode step beside the references that define them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from footplate.engine.kernels import step_cases
from footplate.engine.kernels.decode_step import reference as decode_step
from footplate.engine.kernels.pair import KernelPair
from footplate.engine.kernels.sample import reference as sample
from footplate.engine.kernels.skinny_linear import reference as skinny_linear

WIDE = (torch.float32,)
HALF = (torch.bfloat16, torch.float16)


def _kernel(op: str, function: str) -> Callable[..., torch.Tensor]:
    """A Triton kernel by name; triton is imported when first called, as CPU installs have none."""

    def call(*arguments: Any) -> torch.Tensor:
        module = importlib.import_module(f"footplate.engine.kernels.{op}.kernel")
        result: torch.Tensor = getattr(module, function)(*arguments)
        return result

    return call


_ROUNDING = "float32 on both sides; sums are taken in another order"
_HALF = (
    "x times the norm's weight is rounded to 16 bits before the product, where the reference rounds nothing "
    "(the interpreter truncates where hardware rounds), and the result once more"
)
_EXACT = "ids and table entries are integers"


def _products(suffix: str, function: str, cases: Callable[..., Any]) -> tuple[KernelPair, KernelPair]:
    name = "skinny_linear/triton" + suffix
    reference, kernel = getattr(skinny_linear, function), _kernel("skinny_linear", function)
    return (
        KernelPair(name, reference, kernel, cases(WIDE), 2e-5, 2e-5, _ROUNDING),
        KernelPair(name + "-16", reference, kernel, cases(HALF), 6e-2, 2e-2, _HALF),
    )


STEP_PAIRS: tuple[KernelPair, ...] = (
    *_products("", "norm_linear", step_cases.norm_linear),
    *_products("-gate-up", "norm_gate_up", step_cases.norm_gate_up),
    *_products("-add", "linear_add", step_cases.linear_add),
    *_products("-qkv", "norm_qkv_rope_cache", step_cases.norm_qkv_rope_cache),
    KernelPair(
        "decode_step/triton",
        decode_step.decode_inputs,
        _kernel("decode_step", "decode_inputs"),
        step_cases.decode_inputs(),
        0,
        0,
        _EXACT,
    ),
    KernelPair(
        "sample/triton",
        sample.sample,
        _kernel("sample", "sample"),
        [*step_cases.sample_plain(), *step_cases.sample_truncated()],
        0,
        0,
        _EXACT,
    ),
)
