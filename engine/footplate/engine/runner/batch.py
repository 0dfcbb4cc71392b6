"""The persistent batch: token table, block tables and parameters of every row, and a step's view of them.

Rows are slots that the scheduler hands out. A step only says what changed (new rows, new blocks, token
ranges); everything else is here already. Drawn tokens are written to the token table by the device side
itself, so a step can be prepared before the host has read the one before it, and no placeholder id exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from footplate.engine.kernels.ops import AttentionBatch
from footplate.engine.plan import NewRow, ScheduledRow, SchedulerOutput
from footplate.engine.sampling.edits import RowContext, needs_edits
from footplate.engine.types import SamplingParams


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A step's tokens on the host; shapes as in `AttentionBatch`."""

    token_rows: np.ndarray  # [T] int64, the table row of each token
    positions: np.ndarray  # [T] int32
    slots: np.ndarray  # [T] int64
    query_starts: np.ndarray  # [S + 1] int32
    context_lens: np.ndarray  # [S] int32
    tables: np.ndarray  # [S, max_blocks] int32
    max_query_len: int
    max_context_len: int


class PersistentBatch:
    """Row state of up to `num_rows` sequences of at most `max_len` tokens."""

    def __init__(self, num_rows: int, max_len: int, block_size: int, device: torch.device) -> None:
        self._block_size = block_size
        self._device = device
        self.tokens = np.zeros((num_rows, max_len + 1), dtype=np.int32)
        self.lengths = np.zeros(num_rows, dtype=np.int64)  # known tokens, drawn ones included
        self._blocks = np.zeros((num_rows, -(-max_len // block_size) + 1), dtype=np.int32)
        self._num_blocks = np.zeros(num_rows, dtype=np.int64)
        self._params: list[SamplingParams] = [SamplingParams()] * num_rows
        self._num_prompt = [0] * num_rows
        # Whether a row's draws may need the host's view: edits of logits, log-probabilities.
        self._is_special = np.zeros(num_rows, dtype=bool)

    def apply(self, output: SchedulerOutput) -> None:
        """Take in what the step changes."""
        for new in output.new_rows:
            self._enter(new)
        for row in output.rows:
            if row.new_blocks:
                begin = self._num_blocks[row.row]
                self._blocks[row.row, begin : begin + len(row.new_blocks)] = row.new_blocks
                self._num_blocks[row.row] = begin + len(row.new_blocks)

    def _enter(self, new: NewRow) -> None:
        row, num_tokens, num_blocks = new.row, len(new.token_ids), len(new.block_table)
        self.tokens[row, :num_tokens] = new.token_ids
        self.lengths[row] = num_tokens
        self._blocks[row, :num_blocks] = new.block_table
        self._num_blocks[row] = num_blocks
        self._params[row] = new.params
        self._num_prompt[row] = new.num_prompt
        params = new.params
        self._is_special[row] = (
            params.logprobs is not None or params.prompt_logprobs is not None or needs_edits(params, 0)
        )

    def plan(self, rows: Sequence[ScheduledRow]) -> StepPlan:
        """Where the tokens of a step stand, in the order of `rows`; the changes of the step were applied."""
        count = len(rows)
        of_row = np.fromiter((r.row for r in rows), np.int64, count)
        lens = np.fromiter((r.num_tokens for r in rows), np.int64, count)
        starts = np.fromiter((r.start for r in rows), np.int64, count)
        query_starts = np.zeros(count + 1, dtype=np.int32)
        np.cumsum(lens, out=query_starts[1:])
        num_tokens = int(query_starts[-1])
        if num_tokens == count:
            token_rows, positions = of_row, starts
        else:
            token_rows = np.repeat(of_row, lens)
            positions = np.arange(num_tokens) + np.repeat(starts - query_starts[:-1], lens)
        contexts = starts + lens
        width = -(-int(contexts.max()) // self._block_size)
        slots = (
            self._blocks[token_rows, positions // self._block_size].astype(np.int64) * self._block_size
            + positions % self._block_size
        )
        return StepPlan(
            token_rows=token_rows,
            positions=positions.astype(np.int32),
            slots=slots,
            query_starts=query_starts,
            context_lens=contexts.astype(np.int32),
            tables=np.ascontiguousarray(self._blocks[of_row, :width]),
            max_query_len=int(lens.max()),
            max_context_len=int(contexts.max()),
        )

    def step_inputs(self, output: SchedulerOutput) -> tuple[torch.Tensor, AttentionBatch]:
        """(token ids [T] int32, where they stand) of a step that was applied, its tokens being known."""
        plan = self.plan(output.rows)
        batch = AttentionBatch(
            positions=self._put(plan.positions),
            slots=self._put(plan.slots),
            query_starts=self._put(plan.query_starts),
            context_lens=self._put(plan.context_lens),
            block_tables=self._put(plan.tables),
            max_query_len=plan.max_query_len,
            max_context_len=plan.max_context_len,
        )
        return self._put(self.tokens[plan.token_rows, plan.positions]), batch

    def has_special(self, rows: np.ndarray) -> bool:
        """Whether any of these table rows asks for edits of logits or for log-probabilities."""
        return bool(self._is_special[rows].any())

    def params(self, row: int) -> SamplingParams:
        return self._params[row]

    def num_prompt(self, row: int) -> int:
        return self._num_prompt[row]

    def table(self, row: int) -> np.ndarray:
        """The row's block table, [max_blocks] int32; as many are valid as `num_blocks` says."""
        table: np.ndarray = self._blocks[row]
        return table

    def num_blocks(self, row: int) -> int:
        return int(self._num_blocks[row])

    def context(self, row: int) -> RowContext:
        """The row as a draw sees it. A view: valid until the row's next token is appended."""
        return RowContext(self._params[row], self.tokens[row, : self.lengths[row]], self._num_prompt[row])

    def append(self, rows: list[int], token_ids: list[int]) -> None:
        """Write drawn tokens to the table."""
        index = np.asarray(rows)
        self.tokens[index, self.lengths[index]] = token_ids
        self.lengths[index] += 1

    def _put(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)
