"""Row state on the device: the token table, block tables and sampling parameters of every row.

The host sends differences only: rows that enter, blocks that were added. Drawn tokens are written to the
table by the device itself, so the next step can be queued before the host has read this one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from footplate.engine.plan import NewRow
from footplate.engine.sampling.sampler import MIN_TEMPERATURE
from footplate.engine.types import SamplingParams


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

    def enter(self, rows: Sequence[NewRow]) -> None:
        """Write everything about rows that enter."""
        if not rows:
            return
        for new in rows:
            self.tokens[new.row, : len(new.token_ids)].copy_(self._put(new.token_ids), non_blocking=True)
            self.blocks[new.row, : len(new.block_table)].copy_(self._put(new.block_table), non_blocking=True)
        index = self._put([new.row for new in rows]).long()
        self.lengths[index] = self._put([len(new.token_ids) for new in rows])
        params = [new.params for new in rows]
        floats = self._put([_floats(p) for p in params], np.float32)
        self.temperature[index], self.top_p[index], self.min_p[index] = floats.unbind(1)
        self.top_k[index] = self._put([max(p.top_k, 0) for p in params])
        self.seeds[index] = self._put([_signed(p.seed or 0) for p in params], np.int64)

    def add_blocks(self, rows: Sequence[int], places: Sequence[int], blocks: Sequence[int]) -> None:
        """blocks[rows[i], places[i]] = blocks[i]."""
        if rows:
            index = self._put([rows, places, blocks])
            self.blocks[index[0].long(), index[1].long()] = index[2]

    def _put(self, values: object, dtype: type = np.int32) -> torch.Tensor:
        tensor = torch.from_numpy(np.asarray(values, dtype=dtype))
        if self.device.type != "cuda":
            return tensor
        # Pinned, so that the copy doesn't wait; the allocator keeps the memory until the copy has run.
        return tensor.pin_memory().to(self.device, non_blocking=True)


def _floats(params: SamplingParams) -> tuple[float, float, float]:
    cold = params.temperature < MIN_TEMPERATURE
    return (0.0 if cold else params.temperature, params.top_p, params.min_p)


def _signed(seed: int) -> int:
    """The seed's 64 bits as a signed number."""
    return (seed + 2**63) % 2**64 - 2**63
