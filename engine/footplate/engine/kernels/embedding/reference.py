"""Looking up rows of a token table in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def embedding(token_ids: torch.Tensor, table: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Rows of the table [vocabulary, K], scaled: ids [T] -> [T, K] in the table's type.

    The scale is rounded to that type before it multiplies, as models with scaled embeddings were trained
    (Gemma, arXiv:2403.08295).
    """
    rows = F.embedding(token_ids.long(), table)
    return rows if scale == 1.0 else rows * torch.tensor(scale, dtype=table.dtype)
