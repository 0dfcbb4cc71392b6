"""However a skinny product is cut, it is the same product; and what does not fit is refused."""

from __future__ import annotations

import pytest
import torch

from footplate.engine.kernels.skinny_linear import reference
from footplate.engine.kernels.skinny_linear.tiling import MAX_ROWS, ROW_BUCKETS, Tiling, by_rule, row_bucket

kernel = pytest.importorskip("footplate.engine.kernels.skinny_linear.kernel")


@pytest.mark.parametrize("num_rows", [1, 5])
@pytest.mark.parametrize(
    "tiling", [Tiling(64, 32, 8, 1), Tiling(2, 1024, 4, 2, 2), Tiling(16, 128, 1, 5, 8), Tiling(32, 64, 2, 3)]
)
def test_a_tiling_changes_no_result(num_rows: int, tiling: Tiling) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    x, weight = (torch.randn(n, 200, generator=generator) for n in (num_rows, 90))
    norm = torch.rand(200, generator=generator)
    ours = kernel.norm_gate_up(x, norm, 1e-6, weight, "silu", tiling=tiling)
    torch.testing.assert_close(
        ours, reference.norm_gate_up(x, norm, 1e-6, weight, "silu"), atol=1e-3, rtol=1e-4
    )


@pytest.mark.parametrize("bucket", ROW_BUCKETS)
@pytest.mark.parametrize(
    "shape", [(8, 16), (576, 1536), (6144, 4096), (28672, 4096), (4096, 14336), (262144, 640)]
)
def test_the_rule_gives_whole_tiles(shape: tuple[int, int], bucket: int) -> None:
    tiling = by_rule(*shape, bucket)
    sizes = (tiling.block_n, tiling.block_k, tiling.num_warps)
    assert all(size & (size - 1) == 0 for size in sizes)
    assert tiling.prefetch % 2 == 0 and 0 < tiling.prefetch <= tiling.block_n
    assert (tiling.block_n + bucket) * tiling.block_k * 2 * tiling.num_stages < 200 << 10


def test_rows_go_to_the_smallest_bucket() -> None:
    assert [row_bucket(n) for n in (1, 2, 8, 9, 33, MAX_ROWS)] == [1, 8, 8, 16, 64, 64]


@pytest.mark.parametrize("num_rows", [0, MAX_ROWS + 1])
def test_too_many_rows_are_refused(num_rows: int) -> None:
    with pytest.raises(ValueError, match=f"1 to {MAX_ROWS} rows"):
        kernel.linear(torch.ones(num_rows, 64), torch.ones(32, 64))


def test_rows_of_another_type_or_width_are_refused() -> None:
    weight = torch.ones(32, 64)
    for x in (torch.ones(1, 64, dtype=torch.bfloat16), torch.ones(1, 48)):
        with pytest.raises(ValueError, match="don't fit"):
            kernel.linear(x, weight)
    with pytest.raises(ValueError, match="contiguous"):
        kernel.linear(torch.ones(1, 64), torch.ones(64, 32).T)
    with pytest.raises(ValueError, match="can't add"):
        kernel.linear_add(torch.ones(1, 64), weight, torch.ones(1, 33))


def test_another_activation_is_refused() -> None:
    with pytest.raises(ValueError, match="silu or gelu_tanh"):
        kernel.norm_gate_up(torch.ones(1, 64), torch.ones(64), 1e-6, torch.ones(32, 64), "relu")


def test_a_bare_product_may_be_wider_than_its_rows() -> None:
    x, weight = torch.randn(3, 72).bfloat16(), torch.randn(40, 72).bfloat16()
    ours = kernel.linear(x, weight, torch.float32)
    torch.testing.assert_close(ours, reference.linear(x, weight, torch.float32), atol=1e-3, rtol=1e-4)
