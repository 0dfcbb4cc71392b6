"""Copying whole KV blocks within every cache tensor, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def block_copy(caches: Sequence[torch.Tensor], copies: torch.Tensor) -> None:
    """Copy block `source` to block `target` in each cache [B, ...] for every row (source, target) of [N, 2].

    No block may be the target of one copy and named by another.
    """
    source, target = copies.long().unbind(dim=1)
    for cache in caches:
        cache[target] = cache[source]
