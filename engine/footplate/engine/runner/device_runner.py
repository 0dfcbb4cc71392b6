"""The runner for devices that work through a queue: a step is launched, and read when the next one is queued.

Every tensor a step needs is on the device already or a few bytes away: the host sends which rows run and
which blocks they got. A step in which every row decodes is one replay of a CUDA graph, draws included. Steps
with prompt chunks are launched kernel by kernel; the device is busy long enough with them to hide that.

Rows that ask for edits or log-probabilities are drawn once more, on the host's view of their tokens. That
waits for the step before, so such requests cost speed; no other request's result changes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from footplate.engine.kernels.ops import AttentionBatch
from footplate.engine.layers.attention import KvPair
from footplate.engine.models.device_decoder import DeviceDecoder
from footplate.engine.plan import ScheduledRow, SchedulerOutput, StepResult
from footplate.engine.runner.batch import PersistentBatch
from footplate.engine.runner.decode_graphs import DecodeGraphs
from footplate.engine.runner.device_state import DeviceState
from footplate.engine.runner.prefix_groups import GroupFinder
from footplate.engine.runner.staging import Staging
from footplate.engine.sampling.edits import needs_edits
from footplate.engine.sampling.sampler import Sampler, token_logprobs
from footplate.engine.types import TokenLogprob

LOGIT_ROWS = 1024  # prompt log-probabilities are made this many rows at a time


@dataclass(slots=True)
class PendingStep:
    """A launched step. `result` waits for the device; steps are read in the order of their launch."""

    runner: DeviceRunner
    output: SchedulerOutput
    drawn: list[ScheduledRow]
    ids: torch.Tensor  # host memory, [len(drawn)] int32; valid once `event` has passed
    event: torch.cuda.Event | None
    made: StepResult
    is_read: bool = field(default=False)

    def result(self) -> StepResult:
        self.runner.settle(self)
        return self.made


class DeviceRunner:
    """Carries out planned steps on one device."""

    def __init__(
        self,
        model: DeviceDecoder,
        batch: PersistentBatch,
        state: DeviceState,
        sampler: Sampler,
        graphs: DecodeGraphs,
    ) -> None:
        self._model = model
        self._batch = batch
        self._state = state
        self._sampler = sampler
        self._graphs = graphs
        self._groups = GroupFinder(state.block_size)
        self._staging = Staging(state.device)
        self._unread: deque[PendingStep] = deque()
        self._waited_s = 0.0

    @property
    def max_rows(self) -> int:
        return self._state.lengths.shape[0]

    @property
    def waited_s(self) -> float:
        """Seconds waited for the device, in all; the rest of a step is the host's own work."""
        return self._waited_s + self._staging.waited_s

    @property
    def caches(self) -> list[KvPair]:
        return self._model.caches

    def run(self, output: SchedulerOutput) -> StepResult:
        """Launch a step and wait for it."""
        return self.launch(output).result()

    @torch.inference_mode()
    def launch(self, output: SchedulerOutput) -> PendingStep:
        """Queue one step: block copies, new rows, forward pass, draws."""
        self._model.copy_blocks(output.copies)
        self._batch.apply(output)
        self._state.enter(output.new_rows, self._batch, self._staging)
        rows, made = output.rows, StepResult(output.step, {})
        logits: torch.Tensor | None
        is_special = self._batch.has_special(np.fromiter((r.row for r in rows), np.int64, len(rows)))
        if all(r.num_tokens == 1 and r.samples for r in rows) and self._graphs.holds(len(rows)):
            drawn = list(rows)
            logits, ids = self._decode(drawn)
        else:
            # Decodes first: they have a kernel of their own.
            ordered = sorted(rows, key=lambda r: r.num_tokens > 1)
            drawn, logits, ids = self._mixed(ordered, made if is_special else None)
        if is_special and logits is not None:
            self._draw_again(drawn, logits, ids, made)
        host, event = self._staging.fetch(ids)
        pending = PendingStep(self, output, drawn, host, event, made)
        self._unread.append(pending)
        return pending

    def settle(self, last: PendingStep | None = None) -> None:
        """Read launched steps in order, up to and with `last`, or all."""
        while self._unread and not (last is not None and last.is_read):
            step = self._unread.popleft()
            if step.event is not None:
                start = time.perf_counter()
                step.event.synchronize()
                self._waited_s += time.perf_counter() - start
            tokens = step.ids.tolist()
            if tokens:
                self._batch.append([r.row for r in step.drawn], tokens)
            step.made.tokens = {r.sequence_id: t for r, t in zip(step.drawn, tokens, strict=True)}
            step.is_read = True

    # --- the two kinds of step --------------------------------------------------------------------------

    def _decode(self, rows: Sequence[ScheduledRow]) -> tuple[torch.Tensor, torch.Tensor]:
        """(logits [R, V], drawn ids [R]) of a step in which every row computes a token and draws the next."""
        count = len(rows)
        size = self._graphs.size_for(count)
        inputs = np.full((2, size), -1, dtype=np.int32)
        inputs[0, :count] = [r.row for r in rows]
        inputs[1, :count] = [r.new_blocks[0] if r.new_blocks else -1 for r in rows]
        self._staging.send(inputs, self._graphs.inputs(size))
        logits, ids = self._graphs.run(size)
        return logits[:count], ids[:count]

    def _mixed(
        self, rows: Sequence[ScheduledRow], made: StepResult | None
    ) -> tuple[list[ScheduledRow], torch.Tensor | None, torch.Tensor]:
        """A step with prompt chunks: (rows that draw, their logits [R, V], drawn ids [R]).

        Log-probabilities of prompts go into `made`, which is left out when no row wants any.
        """
        self._add_blocks(rows)
        token_rows, batch = self._inputs(rows)
        token_ids = self._state.tokens[token_rows, batch.positions.long()]
        hidden = self._model.hidden(token_ids, batch, last_only=made is None)
        if made is not None:
            self._read_prompts(rows, hidden, made)
            hidden = hidden[batch.query_starts[1:].long() - 1]
        drawing = [i for i, r in enumerate(rows) if r.samples]
        drawn = [rows[i] for i in drawing]
        if not drawn:
            return [], None, token_ids[:0]
        index = self._staging.put(np.array([[r.row for r in drawn], drawing], dtype=np.int32))
        logits = self._model.logits(hidden[index[1].long()])
        return drawn, logits, self._model.draw(logits, index[0], self._state)

    def _add_blocks(self, rows: Sequence[ScheduledRow]) -> None:
        """Tell the device what `PersistentBatch.apply` has taken in."""
        of_row, places, blocks = [], [], []
        for r in rows:
            end = self._batch.num_blocks(r.row)
            for i, block in enumerate(r.new_blocks, start=end - len(r.new_blocks)):
                of_row.append(r.row)
                places.append(i)
                blocks.append(block)
        self._state.add_blocks(of_row, places, blocks, self._staging)

    def _inputs(self, rows: Sequence[ScheduledRow]) -> tuple[torch.Tensor, AttentionBatch]:
        """(table row of each token [T], where the tokens stand)."""
        plan = self._batch.plan(rows)
        packed = self._staging.put_all(
            plan.token_rows, plan.positions, plan.slots, plan.query_starts, plan.context_lens, plan.tables
        )
        token_rows, positions, slots, query_starts, context_lens, tables = packed
        num_decodes = sum(r.num_tokens == 1 for r in rows)
        batch = AttentionBatch(
            positions=positions,
            slots=slots.long(),
            query_starts=query_starts,
            context_lens=context_lens,
            block_tables=tables,
            max_query_len=plan.max_query_len,
            max_context_len=plan.max_context_len,
            num_decodes=num_decodes,
            prefix_groups=self._groups.find(plan, num_decodes, self._staging),
        )
        return token_rows.long(), batch

    # --- what some rows ask for ---------------------------------------------------------------------------

    def _draw_again(
        self, drawn: Sequence[ScheduledRow], logits: torch.Tensor, ids: torch.Tensor, made: StepResult
    ) -> None:
        """Correct the draws of rows with edits, and tell log-probabilities. Waits for the device if any."""
        params = [self._batch.params(r.row) for r in drawn]
        known = [r.start + r.num_tokens - self._batch.num_prompt(r.row) for r in drawn]
        edited = [i for i, (p, n) in enumerate(zip(params, known, strict=True)) if needs_edits(p, n)]
        wanted = [i for i, p in enumerate(params) if p.logprobs is not None]
        if edited:
            self.settle()  # edits look at every token before this one
            index = torch.tensor(edited, device=logits.device)
            contexts = [self._batch.context(drawn[i].row) for i in edited]
            tokens = self._sampler.sample(logits[index].float(), contexts).to(torch.int32)
            ids[index] = tokens
            table_rows = torch.tensor([drawn[i].row for i in edited], device=logits.device)
            self._state.tokens[table_rows, self._state.lengths[table_rows].long() - 1] = tokens
        if wanted:
            index = torch.tensor(wanted, device=logits.device)
            chosen = ids[index].long()
            entries = token_logprobs(logits[index].float(), chosen, [params[i].logprobs or 0 for i in wanted])
            made.logprobs = {drawn[i].sequence_id: e for i, e in zip(wanted, entries, strict=True)}

    def _read_prompts(self, rows: Sequence[ScheduledRow], hidden: torch.Tensor, made: StepResult) -> None:
        begin = 0
        for row in rows:
            num_top = self._batch.params(row.row).prompt_logprobs
            # the token after each computed prompt position, except after the last: that one is drawn
            count = min(row.start + row.num_tokens, self._batch.num_prompt(row.row) - 1) - row.start
            if num_top is not None and count > 0:
                targets = self._batch.tokens[row.row, row.start + 1 : row.start + 1 + count].tolist()
                part = hidden[begin : begin + count]
                made.prompt_logprobs[row.sequence_id] = self._logprobs_of(part, targets, num_top)
            begin += row.num_tokens

    def _logprobs_of(self, hidden: torch.Tensor, targets: Sequence[int], num_top: int) -> list[TokenLogprob]:
        entries: list[TokenLogprob] = []
        for begin in range(0, len(targets), LOGIT_ROWS):
            ids = torch.tensor(targets[begin : begin + LOGIT_ROWS], device=hidden.device)
            logits = self._model.logits(hidden[begin : begin + LOGIT_ROWS]).float()
            entries += token_logprobs(logits, ids, [num_top] * len(ids))
        return entries
