"""Sending prompts to the warp-specialised kernel: how it cuts its work, where keys and values lie."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from footplate.engine.kernels.attention.specialised.kernel import HALF, LINES, prefill_kernel
from footplate.engine.kernels.ops import AttentionBatch, AttentionSpec

HEAD_DIM = 128
ROWS = 128  # queries times heads of a KV head, for each program
KEYS = 128  # of a tile
NUM_STAGES = 3  # tiles of keys, and of values, in the rings
# Of a thread at the start, then of those that multiply and of those that ask for tiles: 64 Ki for 384 in all.
REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS = 168, 232, 40


@dataclass(frozen=True, slots=True)
class _Address:
    """What a descriptor needs of a tensor, without keeping its memory."""

    pointer: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.pointer


@functools.lru_cache(maxsize=1024)
def _descriptor(
    pointer: int, dtype: torch.dtype, num_rows: int, head_dim: int, block_size: int
) -> TensorDescriptor:
    """Rows of a cache in boxes of half a block; kept, since making one takes as long as a launch."""
    shape, box = [num_rows, head_dim], [block_size, HALF.value]
    return TensorDescriptor(_Address(pointer, dtype), shape, [head_dim, 1], box, LINES.value)


def suits(spec: AttentionSpec, keys: torch.Tensor) -> bool:
    """Whether the kernel takes heads of this size and number, and a cache laid out so."""
    is_cut = spec.head_dim == HEAD_DIM and spec.num_heads // spec.num_kv_heads <= ROWS
    return is_cut and keys.stride(0) % spec.head_dim == 0


def launch_prefill(
    q: torch.Tensor,
    output: torch.Tensor,
    spec: AttentionSpec,
    batch: AttentionBatch,
    kv: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Attention of the sequences after the decode rows, q [T, H, D], into `output`."""
    group = spec.num_heads // spec.num_kv_heads
    num_blocks, num_kv_heads, block_size, head_dim = kv[0].shape
    block_rows = kv[0].stride(0) // head_dim
    num_rows = (num_blocks - 1) * block_rows + num_kv_heads * block_size
    caches = (_descriptor(x.data_ptr(), x.dtype, num_rows, head_dim, block_size) for x in kv)
    num_sequences = len(batch.context_lens) - batch.num_decodes
    # Each sequence may end within a tile; programs past the last tile leave at once.
    num_tiles = (q.shape[0] - batch.num_decodes) // (ROWS // group) + num_sequences
    prefill_kernel[(num_kv_heads, num_tiles)](
        q,
        output,
        *caches,
        batch.query_starts,
        batch.context_lens,
        batch.block_tables,
        batch.num_decodes,
        num_sequences,
        batch.block_tables.stride(0),
        block_rows,
        spec.scale,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        WINDOW=spec.window,
        SOFT_CAP=spec.soft_cap,
        KEYS=KEYS,
        STAGES=NUM_STAGES,
        CONSUMER_REGISTERS=CONSUMER_REGISTERS,
        PRODUCER_REGISTERS=PRODUCER_REGISTERS,
        num_warps=4,  # of the first warpgroup; the kernel adds the others
        maxnreg=REGISTERS,
    )
