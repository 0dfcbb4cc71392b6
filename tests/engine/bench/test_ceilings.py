"""Ceilings are of work that was really done."""

from __future__ import annotations

import pytest
import torch

from footplate.engine.bench import ceilings
from footplate.engine.bench.ceilings import Ceilings, measure_ceilings

MIB = 1 << 20


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no GPU")
def test_the_reading_kernel_reads_what_it_says() -> None:
    from footplate.engine.bench import read_kernel

    memory = torch.arange(3 * 2 * 256 + 100, dtype=torch.float32)
    sums = torch.empty(2)
    read_kernel._read_kernel[(2,)](memory, sums, 3, BLOCK=256, num_warps=8)
    assert sums.sum() == memory[: 3 * 2 * 256].sum()
    read, num_bytes = read_kernel.make_reader(memory, num_programs=2, block=256)
    read()
    assert num_bytes == 4 * 3 * 2 * 256


@pytest.mark.parametrize(("asked", "size"), [(1, 2), (3 * MIB + 5, 4), (99 * MIB, 8)])
def test_what_is_read_has_the_size_of_a_steps_weights_within_bounds(
    monkeypatch: pytest.MonkeyPatch, asked: int, size: int
) -> None:
    monkeypatch.setattr(ceilings, "MIN_READ_BYTES", 2 * MIB)
    monkeypatch.setattr(ceilings, "MAX_READ_BYTES", {"cpu": 8 * MIB})
    monkeypatch.setattr(ceilings, "MATMUL_SIZE", {"cpu": 256})
    found = measure_ceilings(torch.device("cpu"), asked)
    assert abs(found.num_bytes - size * MIB) <= MIB
    assert found.read_bytes_s > 0 and found.copy_bytes_s > 0 and found.flops_s > 0
    assert found.flops_dtype in ("float32", "bfloat16", "int8")


def test_the_better_of_reading_and_copying_is_the_ceiling() -> None:
    assert Ceilings(3.0, 4.0, 1.0, "float32", 1).bytes_s == 4.0
    assert Ceilings(5.0, 4.0, 1.0, "float32", 1).bytes_s == 5.0
