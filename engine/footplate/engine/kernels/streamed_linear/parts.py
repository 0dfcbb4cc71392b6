"""How a weight is shared out among programs, and the product that they leave behind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

MAX_ROWS = 64  # beyond this many rows the product is no longer a matter of reading weights
ROW_BUCKETS = (8, 16, 32, 64)  # the narrow side of Hopper's matrix unit
MOST_CHUNKS = 64  # sums of squares of one row, at most
STEP = 64  # columns: 128 bytes of a 16-bit type, one line of swizzled shared memory


@dataclass(frozen=True, slots=True)
class Cut:
    """The weight [N, K] as a sequence of steps, tile by tile; each program takes `share` steps in a row.

    A step is `tile` weight rows by STEP columns. Shares are equal whatever the shape, so all programs end
    together. A tile whose steps lie in several shares leaves as many parts, to be summed by whoever reads
    the product.
    """

    num_outputs: int
    num_inputs: int
    tile: int
    share: int
    num_stages: int  # steps of a program that are on their way at once

    @property
    def steps(self) -> int:
        """Steps of one tile."""
        return -(-self.num_inputs // STEP)

    @property
    def total(self) -> int:
        """Steps of all tiles."""
        return -(-self.num_outputs // self.tile) * self.steps

    @property
    def num_programs(self) -> int:
        return -(-self.total // self.share)

    @property
    def most_parts(self) -> int:
        """The most parts that any tile has."""
        tiles = range(self.total // self.steps)
        return max(((t + 1) * self.steps - 1) // self.share - t * self.steps // self.share + 1 for t in tiles)


@dataclass(frozen=True, slots=True)
class PendingNorm:
    """What a product of rows that were not normed yet still lacks: a factor 1 / rms for each row."""

    squares: torch.Tensor  # [M, C] float32: a row's sum of squares in C chunks, MOST_CHUNKS at most
    size: int  # elements of such a row
    eps: float


@dataclass(frozen=True, slots=True)
class Parts:
    """A product [M, N] that is not summed yet: values [most parts, M, N] float32.

    Column n has parts 0 up to the number of shares that its tile lies in; further ones hold anything.
    """

    values: torch.Tensor
    cut: Cut
    dtype: torch.dtype  # of the product
    norm: PendingNorm | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[1], self.values.shape[2]

    @property
    def device(self) -> torch.device:
        return self.values.device


def row_bucket(num_rows: int) -> int:
    """The padded number of rows that a product of `num_rows` is compiled for.

    Raises:
        ValueError: more rows than MAX_ROWS, or none.
    """
    for bucket in ROW_BUCKETS:
        if 0 < num_rows <= bucket:
            return bucket
    raise ValueError(f"a streamed product takes 1 to {MAX_ROWS} rows, not {num_rows}")


# A program's ring of tiles takes nearly all of a multiprocessor's shared memory (227 KiB on Hopper). With
# half of it the next product's program would fit beside, and fill its ring early; measured, that helps 8
# rows and hurts 32.
_RING_BYTES = 200 << 10


def choose(num_outputs: int, num_inputs: int, bucket: int, num_sms: int) -> Cut:
    """The cut for a weight [N, K] of a 16-bit type on a device of so many multiprocessors."""
    # Fewer rows take few bytes beside the weight's: small tiles then cost nothing, and leave fewer parts.
    tile = 64 if bucket <= 16 and num_outputs * num_inputs <= 1 << 25 else 128
    total = -(-num_outputs // tile) * -(-num_inputs // STEP)
    stages = min(16, _RING_BYTES // (2 * STEP * (tile + bucket)))
    return Cut(num_outputs, num_inputs, tile, -(-total // num_sms), stages)


def readable(
    x: torch.Tensor | Parts, *, applies_norm: bool = False
) -> tuple[torch.Tensor, int, dict[str, Any]]:
    """(first element, row stride, constants) for a kernel that reads x [M, N] by `kernel.load_sums`."""
    if isinstance(x, Parts):
        if x.norm is not None and not applies_norm:
            raise ValueError("these rows still lack their norm's factor, which this op does not apply")
        cut = x.cut
        shape = {"MOST": cut.most_parts, "TILE": cut.tile, "STEPS": cut.steps, "SHARE": cut.share}
        return x.values, cut.num_outputs, shape
    return x, x.stride(0), {"MOST": 0, "TILE": 1, "STEPS": 1, "SHARE": 1}
