"""All layers of a model as one call, and what its last layer may leave out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from footplate.engine.kernels.ops import AttentionBatch


@dataclass(frozen=True, slots=True)
class LastTokens:
    """The last token of each sequence: the only rows of the last layer that a step of prompts reads.

    That layer writes keys and values of all T tokens. Past them, attention, output product and MLP are made
    for S rows in place of T: of a prompt's work one layer's share, less its q, k and v.
    """

    rows: torch.Tensor  # [S] int64, rows among the batch's T tokens
    batch: AttentionBatch  # the same sequences, one query each


# Residual stream [T, hidden], which may be changed in place, to the last layer's output: [T, hidden], or with
# last tokens [S, hidden].
LayerStack = Callable[[torch.Tensor, AttentionBatch, LastTokens | None], torch.Tensor]


def last_tokens(batch: AttentionBatch) -> LastTokens:
    """Picked on the batch's device; no sequence may be without a query."""
    rows, count = batch.query_starts[1:].long() - 1, batch.context_lens.shape[0]
    groups = batch.prefix_groups
    if groups is not None:
        row_lens = F.pad(groups.row_lens, (0, count - groups.row_lens.shape[0]))
        groups = replace(groups, row_lens=row_lens)
    picked = replace(
        batch,
        positions=batch.positions[rows],
        slots=batch.slots[rows],
        query_starts=torch.arange(count + 1, dtype=torch.int32, device=rows.device),
        max_query_len=1,
        num_decodes=count,
        prefix_groups=groups,
    )
    return LastTokens(rows, picked)
