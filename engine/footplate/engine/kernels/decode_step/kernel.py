"""The tables' side of a decode step in Triton, so that a captured step needs nothing from the host."""

import torch
import triton
import triton.language as tl

from footplate.engine.kernels.decode_step.reference import RowTables
from footplate.engine.kernels.ops import AttentionBatch

_BLOCKS = 128  # table entries a program copies at once


@triton.jit
def _decode_inputs_kernel(
    rows,
    new_blocks,
    tokens,
    lengths,
    blocks,
    token_ids,
    positions,
    slots,
    context_lens,
    batch_tables,
    tokens_stride,
    blocks_stride,
    batch_tables_stride,
    BLOCK_SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.load(rows + index).to(tl.int64)
    is_real = row >= 0
    length = tl.load(lengths + row, mask=is_real, other=0).to(tl.int32)
    position = tl.maximum(length - 1, 0)
    token = tl.load(tokens + row * tokens_stride + position, mask=is_real, other=0)
    place = position // BLOCK_SIZE
    new_block = tl.load(new_blocks + index)
    block = tl.load(blocks + row * blocks_stride + place, mask=is_real, other=0)
    block = tl.where(new_block >= 0, new_block, block)
    tl.store(blocks + row * blocks_stride + place, block, mask=is_real & (new_block >= 0))
    slot = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
    tl.store(token_ids + index, token)
    tl.store(positions + index, position)
    tl.store(slots + index, tl.where(is_real, slot, -1))
    tl.store(context_lens + index, length)
    num_blocks = (length + BLOCK_SIZE - 1) // BLOCK_SIZE
    for begin in range(0, num_blocks, BLOCKS):
        at = begin + tl.arange(0, BLOCKS)
        copied = tl.load(blocks + row * blocks_stride + at, mask=at < num_blocks, other=0)
        copied = tl.where(at == place, block, copied)  # the new one may not have reached memory yet
        tl.store(batch_tables + index * batch_tables_stride + at, copied, mask=at < num_blocks)


def decode_inputs(
    rows: torch.Tensor,
    new_blocks: torch.Tensor,
    tables: RowTables,
    block_size: int,
    token_ids: torch.Tensor,
    batch: AttentionBatch,
    *,
    use_pdl: bool = False,
) -> torch.Tensor:
    """Place the last known token of each of `rows` [R] int32; row -1 is padding. Returns token_ids.

    new_blocks [R] int32 holds the block that a row got for this token, or -1; it is entered into the tables.
    Writes token_ids [R] int32 and the batch's positions, slots, context_lens and block_tables [R, any width],
    of which only the blocks that the context holds. Padding gets token 0, position 0, slot -1, context 0.
    """
    if rows.numel():
        _decode_inputs_kernel[(rows.shape[0],)](
            rows,
            new_blocks,
            tables.tokens,
            tables.lengths,
            tables.blocks,
            token_ids,
            batch.positions,
            batch.slots,
            batch.context_lens,
            batch.block_tables,
            tables.tokens.stride(0),
            tables.blocks.stride(0),
            batch.block_tables.stride(0),
            BLOCK_SIZE=block_size,
            BLOCKS=_BLOCKS,
            USE_PDL=use_pdl,
            num_warps=1,
            **({"launch_pdl": True} if use_pdl else {}),
        )
    return token_ids
