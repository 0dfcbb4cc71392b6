"""The least a planned step must move and compute, counted from the model's shape. Pure; knows no torch.

Counted as bytes: every matrix once a step, the token rows that are looked up, keys and values of each
distinct block once a step and layer (so a prefix that rows share counts once), and those written.
Counted as operations: two for each weight and token, and four for each query, key and element of a head.
Left out: activations, norms, logits and draws, which stay in caches or are small beside the rest. A step
can't end before the longer of the two, taken at the device's ceilings (Williams et al., CACM 2009).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from footplate.engine.plan import ScheduledRow, SchedulerOutput
from footplate.engine.weights.model_config import ModelConfig
from footplate.engine.weights.tensor_names import tensor_shapes


@dataclass(frozen=True, slots=True)
class StoredSizes:
    """How the model lies in memory, in bytes."""

    layer_matrices: int  # of all layers together
    head: int
    embedding_row: int
    kv_element: int
    block_size: int  # tokens


@dataclass(frozen=True, slots=True)
class StepCost:
    """What one step must move and compute."""

    num_bytes: int
    num_flops: int

    def least_s(self, bytes_s: float, flops_s: float) -> float:
        """Seconds at these ceilings."""
        return max(self.num_bytes / bytes_s, self.num_flops / flops_s)


class StepCounter:
    """Counts planned steps in their order, the first included: it follows the block table of every row."""

    def __init__(self, shape: ModelConfig, sizes: StoredSizes) -> None:
        self._shape = shape
        self._sizes = sizes
        self._tables: dict[int, list[int]] = {}
        # Layers with the same window see the same keys.
        self._layers = Counter(shape.layer_windows)
        matrices = (*"qkvo", "gate", "up", "down")
        self._layer_weights = sum(
            size[0] * size[1]
            for name, size in tensor_shapes(shape).items()
            if name.rpartition(".")[2] in matrices and name.startswith("layers.")
        )
        self._head_weights = shape.vocab_size * shape.hidden_size

    def count(self, output: SchedulerOutput) -> StepCost:
        for new in output.new_rows:
            self._tables[new.row] = list(new.block_table)
        for row in output.rows:
            self._tables[row.row] += row.new_blocks
        num_drawn = sum(row.samples for row in output.rows)
        return StepCost(
            self._weight_bytes(output.num_tokens, num_drawn) + self._kv_bytes(output.rows),
            2 * self._layer_weights * output.num_tokens
            + 2 * self._head_weights * num_drawn
            + self._attention_flops(output.rows),
        )

    def _weight_bytes(self, num_tokens: int, num_drawn: int) -> int:
        sizes = self._sizes
        head = sizes.head if num_drawn else 0
        return sizes.layer_matrices + head + num_tokens * sizes.embedding_row

    def _kv_bytes(self, rows: Sequence[ScheduledRow]) -> int:
        """Blocks are counted whole but for a row's last one; so is the block a window begins in."""
        shape, sizes = self._shape, self._sizes
        position = 2 * shape.num_kv_heads * shape.head_dim * sizes.kv_element  # of one layer
        written = sum(row.num_tokens for row in rows) * shape.num_layers
        read = sum(self._positions_read(rows, window) * count for window, count in self._layers.items())
        return position * (written + read)

    def _positions_read(self, rows: Sequence[ScheduledRow], window: int) -> int:
        size, whole, rest = self._sizes.block_size, [], 0
        for row in rows:
            end = row.start + row.num_tokens
            begin = max(0, row.start + 1 - window) // size if window else 0
            whole.append(np.array(self._tables[row.row][begin : end // size], dtype=np.int64))
            rest += end % size
        return len(np.unique(np.concatenate(whole))) * size + rest if whole else 0

    def _attention_flops(self, rows: Iterable[ScheduledRow]) -> int:
        per_pair = 4 * self._shape.num_heads * self._shape.head_dim
        pairs = sum(
            count * _visible(row.start, row.start + row.num_tokens, window)
            for row in rows
            for window, count in self._layers.items()
        )
        return per_pair * pairs


def _visible(start: int, end: int, window: int) -> int:
    """Keys that the tokens at start..end - 1 see, all together; each sees itself and at most `window`."""
    if not window:
        return (end * (end + 1) - start * (start + 1)) // 2
    turn = min(max(start, window - 1), end)  # from here on a token sees `window` keys
    return _visible(start, turn, 0) + (end - turn) * window
