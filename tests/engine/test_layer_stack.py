"""What a model's last layer leaves out of a step with prompts."""

from __future__ import annotations

import torch

from footplate.engine.kernels import cases
from footplate.engine.kernels.ops import PrefixGroups
from footplate.engine.layers.layer_stack import last_tokens


def test_last_tokens_are_the_same_sequences_with_one_query_each() -> None:
    shape = cases.AttentionShape(((1, 40), (1, 33), (20, 20), (9, 41)))
    batch = cases.attention_batch(shape)
    last = last_tokens(batch)
    assert last.rows.tolist() == [0, 1, 21, 30]
    assert last.batch.positions.tolist() == [39, 32, 19, 40]
    assert torch.equal(last.batch.slots, batch.slots[last.rows])
    assert last.batch.query_starts.tolist() == [0, 1, 2, 3, 4]
    assert (last.batch.num_decodes, last.batch.max_query_len) == (4, 1)
    assert last.batch.context_lens is batch.context_lens and last.batch.block_tables is batch.block_tables


def test_sequences_that_were_no_decodes_stand_on_no_shared_prefix() -> None:
    batch = cases.attention_batch(cases.AttentionShape(((1, 40), (1, 40), (20, 20))))
    batch.num_decodes = 2
    one = torch.tensor([32], dtype=torch.int32)
    rows = torch.tensor([0, 1], dtype=torch.int32)
    batch.prefix_groups = PrefixGroups(rows, torch.tensor([0, 2], dtype=torch.int32), one, one.expand(2))
    groups = last_tokens(batch).batch.prefix_groups
    assert groups is not None and groups.row_lens.tolist() == [32, 32, 0]
    assert torch.equal(groups.rows, rows)
