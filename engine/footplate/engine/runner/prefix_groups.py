"""Which decode rows stand on the same blocks: their shared prefix can be read once for all of them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from footplate.engine.kernels.ops import PrefixGroups
from footplate.engine.runner.batch import StepPlan
from footplate.engine.runner.staging import Staging

MIN_SHARED_TOKENS = 256  # a shorter prefix is read faster than the second pass starts
MIN_SAVING = 0.2  # of all keys that a step reads


def find_groups(tables: np.ndarray, contexts: np.ndarray, block_size: int) -> tuple[np.ndarray, ...] | None:
    """(rows, starts, lens, row_lens) as in `PrefixGroups`, or None when reading together saves too little.

    tables [S, max_blocks] and contexts [S] describe rows that decode. A group is all rows with the same first
    block; it shares the blocks that are the same in all of them, less what would leave a row without a key of
    its own.
    """
    if len(tables) < 2:
        return None
    order = np.argsort(tables[:, 0], kind="stable")
    first = tables[order, 0]
    bounds = np.flatnonzero(np.concatenate(([True], first[1:] != first[:-1], [True])))
    row_lens = np.zeros(len(tables), dtype=np.int32)
    rows, starts, lens, saved = [], [0], [], 0
    for begin, end in pairwise(bounds):
        if end - begin < 2:
            continue
        members = order[begin:end]
        shared = _shared_blocks(tables[members], (int(contexts[members].min()) - 1) // block_size)
        if shared * block_size < MIN_SHARED_TOKENS:
            continue
        rows.append(members)
        starts.append(starts[-1] + len(members))
        lens.append(shared * block_size)
        row_lens[members] = shared * block_size
        saved += shared * block_size * (len(members) - 1)
    if saved < MIN_SAVING * int(contexts.sum()) or not rows:
        return None
    int32 = np.int32
    return np.concatenate(rows).astype(int32), np.array(starts, int32), np.array(lens, int32), row_lens


def _shared_blocks(tables: np.ndarray, most: int) -> int:
    same = (tables[:, :most] == tables[0, :most]).all(axis=0)
    return most if same.all() else int(np.argmin(same))


class GroupFinder:
    """Finds groups again only when those it found no longer hold."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._found: PrefixGroups | None = None
        self._columns = np.empty((0, 0), dtype=np.int32)  # of tables, as far as prefixes reach
        self._row_lens = np.empty(0, dtype=np.int32)

    def find(self, plan: StepPlan, num_decodes: int, staging: Staging) -> PrefixGroups | None:
        """The groups among a step's leading decodes, on the device."""
        tables, contexts = plan.tables[:num_decodes], plan.context_lens[:num_decodes]
        if num_decodes < 2 or len(np.unique(tables[:, 0])) == num_decodes:
            return None
        if self._found is not None and self._still_holds(tables, contexts):
            return self._found
        found = find_groups(tables, contexts, self._block_size)
        if found is None:
            self._found = None
            return None
        self._found, self._row_lens = PrefixGroups(*staging.put_all(*found)), found[3]
        self._columns = tables[:, : int(found[2].max()) // self._block_size].copy()
        return self._found

    def _still_holds(self, tables: np.ndarray, contexts: np.ndarray) -> bool:
        """Whether the same rows stand on the same prefixes, each with a key of its own behind."""
        same = np.array_equal(tables[:, : self._columns.shape[1]], self._columns)
        return same and bool((contexts > self._row_lens).all())
