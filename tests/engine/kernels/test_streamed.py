"""How weights are shared out, and who may read what a streamed product leaves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from footplate.engine.kernels.streamed_linear.parts import (
    MAX_ROWS,
    ROW_BUCKETS,
    STEP,
    Cut,
    PendingNorm,
    choose,
    readable,
    row_bucket,
)
from footplate.engine.kernels.streamed_linear.reference import streamed_linear as reference

pytest.importorskip("triton")
from footplate.engine.kernels.gated_activation.kernel import gated_activation
from footplate.engine.kernels.rms_norm.kernel import rms_norm
from footplate.engine.kernels.streamed_block.launch import _chunk, _width
from footplate.engine.kernels.streamed_linear.kernel import streamed_linear

SHAPES = [(8, 16), (576, 1536), (6144, 4096), (28672, 4096), (4096, 14336), (1000, 200)]


@pytest.mark.parametrize("bucket", ROW_BUCKETS)
@pytest.mark.parametrize("shape", SHAPES)
def test_shares_are_equal_and_fill_a_ring(shape: tuple[int, int], bucket: int) -> None:
    cut = choose(*shape, bucket, num_sms=132)
    assert cut.tile * -(-shape[0] // cut.tile) >= shape[0] and cut.steps * STEP >= shape[1]
    assert cut.num_programs <= 132 and (cut.num_programs - 1) * cut.share < cut.total <= 132 * cut.share
    assert 2 <= cut.num_stages and cut.num_stages * 2 * STEP * (cut.tile + bucket) <= 227 << 10


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("share", [1, 3, 17, 64, 10_000])
def test_a_tile_has_as_many_parts_as_programs_that_read_it(shape: tuple[int, int], share: int) -> None:
    cut = Cut(*shape, tile=64, share=share, num_stages=2)
    owners: dict[int, set[int]] = {}
    for unit in range(cut.total):
        owners.setdefault(unit // cut.steps, set()).add(unit // share)
    assert cut.most_parts == max(map(len, owners.values()))


def test_rows_go_to_the_smallest_bucket() -> None:
    assert [row_bucket(n) for n in (1, 8, 9, 33, MAX_ROWS)] == [8, 8, 16, 64, 64]
    for count in (0, MAX_ROWS + 1):
        with pytest.raises(ValueError, match=f"1 to {MAX_ROWS} rows"):
            row_bucket(count)


def test_rows_of_another_type_or_width_are_refused() -> None:
    weight = torch.ones(32, 64)
    for x in (torch.ones(1, 64, dtype=torch.bfloat16), torch.ones(1, 48)):
        with pytest.raises(ValueError, match="don't fit"):
            streamed_linear(x, weight)
    with pytest.raises(ValueError, match="contiguous"):
        streamed_linear(torch.ones(1, 64), torch.ones(64, 32).T)


def test_only_ops_that_apply_a_pending_norm_read_rows_that_lack_it() -> None:
    product = reference(torch.ones(2, 64), torch.ones(128, 64), Cut(128, 64, 64, 1, 2))
    lacking = replace(product, norm=PendingNorm(torch.ones(2, 1), 64, 1e-5))
    assert readable(lacking, applies_norm=True)[0] is lacking.values
    for op in (lambda x: rms_norm(x, torch.ones(128), 1e-5), lambda x: gated_activation(x, "silu")):
        op(product)
        with pytest.raises(ValueError, match="lack their norm"):
            op(lacking)


@pytest.mark.parametrize("bucket", [8, 16, 32])
@pytest.mark.parametrize("size", [640, 2048, 4096, 5120, 14336])
def test_each_program_has_one_piece_of_the_rows_at_most(size: int, bucket: int) -> None:
    chunk, width = _chunk(size, bucket, 132), _width(size, bucket, 132)
    assert width % 128 == 0 and (bucket * -(-size // width) <= 132 or width == 4096)
    if chunk:
        assert size % chunk == 0 and bucket * (size // chunk) <= 132
