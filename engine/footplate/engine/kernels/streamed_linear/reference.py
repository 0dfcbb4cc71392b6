"""The streamed product in plain PyTorch, part by part."""

from __future__ import annotations

import torch

from footplate.engine.kernels.streamed_linear.parts import STEP, Cut, Parts


def streamed_linear(x: torch.Tensor, weight: torch.Tensor, cut: Cut) -> Parts:
    """x weightᵀ for x [M, K] and weight [N, K], float32 inside: what each program leaves, not yet summed."""
    values = torch.full((cut.most_parts, x.shape[0], cut.num_outputs), torch.nan, device=x.device)
    for program in range(cut.num_programs):
        begin, end = program * cut.share, min((program + 1) * cut.share, cut.total)
        for tile in range(begin // cut.steps, (end - 1) // cut.steps + 1):
            first = max(begin - tile * cut.steps, 0) * STEP
            last = min(end - tile * cut.steps, cut.steps) * STEP
            rows = slice(tile * cut.tile, (tile + 1) * cut.tile)
            product = x[:, first:last].float() @ weight[rows, first:last].float().T
            values[program - tile * cut.steps // cut.share, :, rows] = product
    return Parts(values, cut, x.dtype)


def summed(product: torch.Tensor | Parts) -> torch.Tensor:
    """The product itself, [M, N], rounded once; parts that nobody wrote are left out."""
    if not isinstance(product, Parts):
        return product
    cut = product.cut
    tile = torch.arange(cut.num_outputs, device=product.device) // cut.tile
    count = ((tile + 1) * cut.steps - 1) // cut.share - tile * cut.steps // cut.share + 1
    part = torch.arange(cut.most_parts, device=product.device)
    is_written = (part[:, None] < count[None, :])[:, None, :]
    return torch.where(is_written, product.values, 0.0).sum(dim=0).to(product.dtype)
