"""Triton attention: what a row's bits may depend on, and calls that it refuses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from footplate.engine.kernels import cases
from footplate.engine.kernels.attention.launch import AttentionOptions, Workspace, attention, decode_plan
from footplate.engine.kernels.attention.reference import attention as reference
from footplate.engine.kernels.attention.tiles import (
    MAX_SPLITS,
    Splits,
    attention_tiles,
    decode_splits,
)
from footplate.engine.kernels.ops import AttentionBatch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has these on CUDA tensors")
DETERMINISTIC = AttentionOptions(deterministic=True)
CONTEXTS = (1, 15, 16, 17, 257, 513, 80)


def alone(batch: AttentionBatch, sequence: int, new: int, context: int) -> AttentionBatch:
    """The sequence's first `context` tokens, the last `new` of which are queries, as a batch of its own."""
    return AttentionBatch(
        positions=torch.arange(context - new, context, dtype=torch.int32),
        slots=torch.zeros(new, dtype=torch.int64),
        query_starts=torch.tensor([0, new], dtype=torch.int32),
        context_lens=torch.tensor([context], dtype=torch.int32),
        block_tables=batch.block_tables[sequence : sequence + 1].contiguous(),
        max_query_len=new,
        max_context_len=context,
        num_decodes=int(new == 1),
    )


@pytest.mark.parametrize("window", [0, 100])
def test_a_deterministic_decode_row_is_the_same_bits_in_every_batch(window: int) -> None:
    shape = cases.AttentionShape(tuple((1, n) for n in CONTEXTS), (6, 2), 32, window=window)
    batch, spec = cases.attention_batch(shape), cases.attention_spec(shape)
    kv = cases.filled_cache(shape, batch)
    q = torch.randn(len(CONTEXTS), 6, 32)
    together = attention(q, spec, batch, kv, DETERMINISTIC)
    for row, context in enumerate(CONTEXTS):
        own = attention(q[row : row + 1], spec, alone(batch, row, 1, context), kv, DETERMINISTIC)
        assert torch.equal(own[0], together[row])


@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.parametrize("cut", [[20], [33, 64], [2, 70]])
def test_prompt_rows_are_the_same_bits_however_the_prompt_is_cut(window: int, cut: Sequence[int]) -> None:
    shape = cases.AttentionShape(((31, 31), (100, 100), (9, 80)), (6, 2), 32, window=window)
    batch, spec = cases.attention_batch(shape), cases.attention_spec(shape)
    kv = cases.filled_cache(shape, batch)
    q = torch.randn(140, 6, 32)
    together = attention(q, spec, batch, kv)[31:131]
    for begin, end in cases.cuts(100, cut):
        own = attention(q[31 + begin : 31 + end], spec, alone(batch, 1, end - begin, end), kv)
        assert torch.equal(own, together[begin:end])


# Chunks of 16 end within a tile of keys.
@pytest.mark.parametrize(
    "splits", [Splits(1, 64), Splits(2, 64), Splits(8, 32), Splits(64, 64), Splits(8, 16)]
)
@pytest.mark.parametrize("window", [0, 60])
def test_any_number_of_splits_gives_the_same_attention(splits: Splits, window: int) -> None:
    shape = cases.AttentionShape(tuple((1, n) for n in CONTEXTS), (4, 2), 32, window=window)
    batch, spec = cases.attention_batch(shape), cases.attention_spec(shape)
    kv = cases.filled_cache(shape, batch)
    q = torch.randn(len(CONTEXTS), 4, 32)
    found = attention(q, spec, batch, kv, AttentionOptions(splits=splits))
    torch.testing.assert_close(found, reference(q, spec, batch, kv), atol=5e-6, rtol=1e-4)


def test_rows_that_only_fill_a_batch_are_zero() -> None:
    shape = cases.AttentionShape(((1, 70), (1, 90)), (4, 2), 32)
    batch, spec = cases.attention_batch(shape), cases.attention_spec(shape)
    kv = cases.filled_cache(shape, batch)
    batch.context_lens[1] = 0
    for splits in (Splits(1, 64), Splits(4, 64)):
        found = attention(torch.randn(2, 4, 32), spec, batch, kv, AttentionOptions(splits=splits))
        assert found[0].isfinite().all() and not found[1].any()


def test_a_workspace_serves_calls_of_every_size_and_keeps_what_it_handed_out() -> None:
    shape = cases.AttentionShape(tuple((1, n) for n in CONTEXTS), (4, 2), 32)
    batch, spec = cases.attention_batch(shape), cases.attention_spec(shape)
    kv = cases.filled_cache(shape, batch)
    q, options = torch.randn(len(CONTEXTS), 4, 32), AttentionOptions(splits=Splits(4, 64))
    size = decode_plan(q, spec, batch, options).workspace_size(spec)
    assert size == len(CONTEXTS) * 4 * 4 * 33
    workspace = Workspace()
    small = workspace.reserve(8, q.device)
    for _ in range(2):
        found = attention(q, spec, batch, kv, options, workspace)
        torch.testing.assert_close(found, reference(q, spec, batch, kv), atol=5e-6, rtol=1e-4)
    memory = workspace.reserve(size, q.device)
    assert memory.numel() == size and workspace.reserve(1, q.device) is memory
    assert small.numel() == 8 and memory.data_ptr() != small.data_ptr()


def test_splits_fill_the_device_and_follow_rows_only() -> None:
    assert decode_splits(1, 1, 132).most == MAX_SPLITS
    assert [decode_splits(rows, 8, 132).most for rows in (1, 4, 8, 16, 32, 256)] == [16, 8, 4, 1, 1, 1]


def test_unusable_layouts_are_refused() -> None:
    shape = cases.AttentionShape(((1, 40),), (4, 2), 32)
    batch, spec = cases.attention_batch(shape), cases.attention_spec(shape)
    kv = cases.filled_cache(shape, batch)
    q = torch.randn(1, 4, 32)
    with pytest.raises(ValueError, match="contiguous queries"):
        attention(torch.randn(1, 4, 64)[:, :, ::2], spec, batch, kv)
    with pytest.raises(ValueError, match="one layout"):
        attention(q, spec, batch, (kv[0], kv[1].transpose(1, 2)))
    odd = replace(shape, block_size=5)
    with pytest.raises(ValueError, match="not of 5"):
        attention(q, spec, cases.attention_batch(odd), cases.empty_cache(odd))
    with pytest.raises(ValueError, match="head size 320"):
        attention_tiles(320, torch.bfloat16, (9, 0))
