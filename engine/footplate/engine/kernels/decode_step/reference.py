"""The tables' side of a decode step in plain PyTorch: one token for each row, placed by the row's length."""

from __future__ import annotations

from typing import Protocol

import torch

from footplate.engine.kernels.ops import AttentionBatch


class RowTables(Protocol):
    """What the device holds of every row of the persistent batch."""

    @property
    def tokens(self) -> torch.Tensor:
        """[num_rows, max_len] int32."""

    @property
    def lengths(self) -> torch.Tensor:
        """[num_rows] int32: known tokens, drawn ones included."""

    @property
    def blocks(self) -> torch.Tensor:
        """[num_rows, max_blocks] int32."""


def decode_inputs(
    rows: torch.Tensor,
    new_blocks: torch.Tensor,
    tables: RowTables,
    block_size: int,
    token_ids: torch.Tensor,
    batch: AttentionBatch,
) -> torch.Tensor:
    """Place the last known token of each of `rows` [R] int32; row -1 is padding. Returns token_ids.

    new_blocks [R] int32 holds the block that a row got for this token, or -1; it is entered into the tables.
    Writes token_ids [R] int32 and the batch's positions, slots, context_lens and block_tables [R, any width],
    of which only the blocks that the context holds. Padding gets token 0, position 0, slot -1, context 0.
    """
    for index, row in enumerate(rows.tolist()):
        length = int(tables.lengths[row]) if row >= 0 else 0
        position, num_blocks = max(length - 1, 0), -(-length // block_size)
        place = position // block_size
        if row >= 0 and new_blocks[index] >= 0:
            tables.blocks[row, place] = new_blocks[index]
        slot = int(tables.blocks[row, place]) * block_size + position % block_size
        token_ids[index] = tables.tokens[row, position] if row >= 0 else 0
        batch.positions[index] = position
        batch.slots[index] = slot if row >= 0 else -1
        batch.context_lens[index] = length
        batch.block_tables[index, :num_blocks] = tables.blocks[row, :num_blocks]
    return token_ids
