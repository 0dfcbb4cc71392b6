"""Each kernel agrees with the reference that defines it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import footplate.engine.kernels as kernels
from footplate.engine.kernels.ops import AttentionBatch
from footplate.engine.kernels.registry import PAIRS, KernelPair
from footplate.engine.kernels.streamed_pairs import HOPPER_PAIRS

CASES = [pytest.param(pair, case, id=f"{pair.name}-{case.id}") for pair in PAIRS for case in pair.cases]


@pytest.fixture(autouse=True)
def outputs_start_as_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane that a kernel forgets to write then fails instead of passing by luck."""
    plain = torch.empty

    def poisoned(*size: Any, **options: Any) -> torch.Tensor:
        made = plain(*size, **options)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.mark.parametrize(("pair", "case"), CASES)
def test_kernel_agrees_with_its_reference(pair: KernelPair, case: Any) -> None:
    arguments = case.build()
    theirs, ours = copy.deepcopy(arguments), copy.deepcopy(arguments)
    expected, found = pair.reference(*theirs), pair.kernel(*ours)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, atol=pair.atol, rtol=pair.rtol)
    for changed, wanted in zip(_tensors(ours), _tensors(theirs), strict=True):
        torch.testing.assert_close(changed, wanted, atol=pair.atol, rtol=pair.rtol, equal_nan=True)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, AttentionBatch):
        yield from (value.positions, value.slots, value.block_tables)


def test_every_op_has_a_reference_and_a_pair() -> None:
    root = Path(kernels.__file__).parent
    folders = {path.parent.name for path in root.glob("*/reference.py")}
    assert {pair.op for pair in (*PAIRS, *HOPPER_PAIRS)} == folders


def test_every_pair_says_why_its_tolerance_is_what_it_is() -> None:
    assert all(pair.reason and pair.cases for pair in PAIRS)
