"""Dense weights on a GPU whose products of few rows are streamed."""

from __future__ import annotations

import torch

from footplate.engine.kernels.linear.dense import DenseLinear
from footplate.engine.kernels.ops import Product
from footplate.engine.kernels.streamed_linear.kernel import streamed_linear
from footplate.engine.kernels.streamed_linear.parts import MAX_ROWS


class StreamedLinear(DenseLinear):
    """A weight [N, K] that answers up to MAX_ROWS rows with parts, which the next kernel sums as it reads
    them.

    Above that the library's products are faster.
    """

    def __init__(self, weight: torch.Tensor, *, use_pdl: bool = False) -> None:
        super().__init__(weight)
        self._use_pdl = use_pdl

    def __call__(
        self, x: torch.Tensor, add_to: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> Product:
        if x.shape[0] > MAX_ROWS or add_to is not None or out is not None:
            return super().__call__(x, add_to, out)
        return streamed_linear(x, self.weight, use_pdl=self._use_pdl)
