"""Packed weights hold exactly the file's numbers, and say no to what they can't do."""

from __future__ import annotations

import pytest
import torch

from footplate.engine.kernels import cases
from footplate.engine.kernels.cpu.library import load_library
from footplate.engine.kernels.linear.packed import PackedEmbedding, PackedLinear, PackedMatrix
from footplate.engine.kernels.registry import cpu_ops
from footplate.engine.weights.gguf_tensors import dequantise


@pytest.mark.parametrize("type_name", cases.QUANTISED_TYPES)
def test_embedding_rows_are_the_dequantised_rows_to_the_bit(type_name: str) -> None:
    stored = cases.stored_rows(type_name, 27, 512)
    table = PackedEmbedding(PackedMatrix(cpu_ops().library, [stored]))
    ids = torch.tensor([0, 26, 8, 7, 8], dtype=torch.int32)
    assert torch.equal(table(ids), torch.from_numpy(dequantise(type_name, stored.raw))[ids.long()])
    torch.testing.assert_close(table(ids, 3.0), table(ids) * 3.0)


def test_embedding_refuses_ids_outside_the_table() -> None:
    table = PackedEmbedding(PackedMatrix(cpu_ops().library, [cases.stored_rows("Q8_0", 27, 32)]))
    for wrong in (-1, 27):
        with pytest.raises(IndexError):
            table(torch.tensor([wrong]))


def test_adding_to_a_residual_is_the_sum() -> None:
    linear = PackedLinear(PackedMatrix(cpu_ops().library, [cases.stored_rows("Q4_1", 21, 64)]))
    x, residual = torch.randn(3, 64), torch.randn(3, 21)
    wanted = residual + linear(x)
    found = linear(x, add_to=residual)
    assert found is residual and torch.equal(found, wanted)


def test_norm_and_gate_before_a_matrix_are_the_ops_before_it() -> None:
    ops = cpu_ops()
    linear = PackedLinear(PackedMatrix(ops.library, [cases.stored_rows("Q4_1", 24, 64)]))
    x, weight, gate_up = torch.randn(3, 64), torch.rand(64), torch.randn(3, 128)
    x[1] *= cases.TINY  # so that eps decides
    assert torch.equal(linear.normed(x, weight, 1e-6).clone(), linear(ops.rms_norm(x, weight, 1e-6)))
    assert torch.equal(linear.gated(gate_up, "silu").clone(), linear(ops.gated_activation(gate_up, "silu")))


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_what_int8_can_not_hold_spoils_its_row_and_no_other(poison: float) -> None:
    linear = PackedLinear(PackedMatrix(cpu_ops().library, [cases.stored_rows("Q4_1", 24, 64)]))
    x = torch.randn(3, 64)
    clean = linear(x).clone()
    x[1, 40] = poison
    spoilt = linear(x)
    assert spoilt[1].isnan().all()
    assert torch.equal(spoilt[[0, 2]], clean[[0, 2]])


def test_stacks_of_different_widths_are_refused() -> None:
    parts = [cases.stored_rows("Q4_1", 8, 64), cases.stored_rows("Q4_1", 8, 96)]
    with pytest.raises(ValueError, match="stacked"):
        PackedMatrix(cpu_ops().library, parts)


def test_portable_code_gives_the_bits_of_this_processors_code() -> None:
    portable = load_library(num_threads=2, defines=("FOOTPLATE_PORTABLE",))
    x = torch.randn(7, 512)
    for type_name in cases.QUANTISED_TYPES:
        stored = [cases.stored_rows(type_name, 21, 512, 1), cases.stored_rows(type_name, 8, 512, 2)]
        plain, native = (PackedLinear(PackedMatrix(each, stored)) for each in (portable, cpu_ops().library))
        assert torch.equal(plain(x), native(x))
