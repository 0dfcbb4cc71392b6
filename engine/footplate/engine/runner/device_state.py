"""Row state on the device: the token table, block tables and sampling parameters of every row.

The host sends differences only: rows that enter, blocks that were added. Drawn tokens are written to the
table by the device itself, so the next step can be queued before the host has read this one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from footplate.engine.plan import NewRow
from footplate.engine.runner.batch import PersistentBatch
from footplate.engine.runner.staging import Staging
from footplate.engine.sampling.sampler import MIN_TEMPERATURE


class DeviceState:
    """Tensors of `num_rows` rows of at most `max_len` tokens; their addresses never change."""

    def __init__(self, num_rows: int, max_len: int, block_size: int, device: torch.device) -> None:
        self.block_size = block_size
        self.device = device
        self.tokens = torch.zeros((num_rows, max_len + 1), dtype=torch.int32, device=device)
        self.lengths = torch.zeros(num_rows, dtype=torch.int32, device=device)  # known tokens
        width = -(-max_len // block_size) + 1
        self.blocks = torch.zeros((num_rows, width), dtype=torch.int32, device=device)
        self.temperature = torch.zeros(num_rows, dtype=torch.float32, device=device)
        self.top_p = torch.ones(num_rows, dtype=torch.float32, device=device)
        self.min_p = torch.zeros(num_rows, dtype=torch.float32, device=device)
        self.top_k = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self.seeds = torch.zeros(num_rows, dtype=torch.int64, device=device)

    def enter(self, rows: Sequence[NewRow], batch: PersistentBatch, staging: Staging) -> None:
        """Write everything about rows that enter, which `batch` has taken in; one copy for all."""
        if not rows:
            return
        facts = np.empty((len(rows), _FACTS), dtype=np.int32)
        parts = []
        for i, new in enumerate(rows):
            facts[i] = _facts(new)
            parts += [
                batch.tokens[new.row, : len(new.token_ids)],
                batch.table(new.row)[: len(new.block_table)],
            ]
        moved, *arrays = staging.put_all(facts, *parts)
        for new, tokens, table in zip(rows, arrays[::2], arrays[1::2], strict=True):
            self.tokens[new.row, : tokens.numel()].copy_(tokens)
            self.blocks[new.row, : table.numel()].copy_(table)
        row, length, temperature, top_p, min_p, top_k, *seed = moved.unbind(1)
        index = row.long()
        self.lengths[index] = length
        for target, bits in ((self.temperature, temperature), (self.top_p, top_p), (self.min_p, min_p)):
            target[index] = bits.contiguous().view(torch.float32)
        self.top_k[index] = top_k
        self.seeds[index] = torch.stack(seed, dim=1).view(torch.int64).squeeze(1)

    def add_blocks(
        self, rows: Sequence[int], places: Sequence[int], blocks: Sequence[int], staging: Staging
    ) -> None:
        """blocks[rows[i], places[i]] = blocks[i]."""
        if rows:
            row, place, block = staging.put(np.array([rows, places, blocks], dtype=np.int32))
            self.blocks[row.long(), place.long()] = block


_FACTS = 8  # 32-bit words that say all about a row but its tokens and blocks


def _facts(new: NewRow) -> np.ndarray:
    """Row, length, temperature, top_p, min_p (bits of float32), top_k, seed (low word, high word)."""
    params = new.params
    temperature = 0.0 if params.temperature < MIN_TEMPERATURE else params.temperature
    facts = np.empty(_FACTS, dtype=np.int32)
    facts[:2] = new.row, len(new.token_ids)
    facts[2:5].view(np.float32)[:] = temperature, params.top_p, params.min_p
    facts[5] = max(params.top_k, 0)
    facts[6:8].view(np.uint64)[:] = (params.seed or 0) % 2**64
    return facts
