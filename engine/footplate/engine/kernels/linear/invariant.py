"""Products whose bits depend on their own row only, for the deterministic mode on CUDA.

A library picks another kernel, and with it another order of sums, for another number of rows. Here every
slice of at most 64 rows runs through one kernel with one tiling, in which a row's sums are taken in one order
wherever it stands in the slice. The weights are read once a slice, so long prompts take longer.
"""

from __future__ import annotations

import torch

from footplate.engine.kernels.linear.dense import DenseLinear
from footplate.engine.kernels.skinny_linear.kernel import linear
from footplate.engine.kernels.skinny_linear.tiling import MAX_ROWS, Tiling

TILING = Tiling(64, 128, 4, 3)


class InvariantLinear(DenseLinear):
    """As DenseLinear, on CUDA. Always MAX_ROWS rows: a short slice is filled up with zeros."""

    def __call__(
        self, x: torch.Tensor, add_to: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        x = x.to(self.dtype)
        parts = [self._slice(x[at : at + MAX_ROWS]) for at in range(0, x.shape[0], MAX_ROWS)]
        product = torch.cat(parts) if len(parts) != 1 else parts[0]
        if add_to is not None:
            return add_to.add_(product)
        return product if out is None else out.copy_(product)

    def _slice(self, x: torch.Tensor) -> torch.Tensor:
        count = x.shape[0]
        if count < MAX_ROWS:
            x = torch.cat((x, x.new_zeros((MAX_ROWS - count, x.shape[1]))))
        return linear(x.contiguous(), self.weight, tiling=TILING)[:count]
