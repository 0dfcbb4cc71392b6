"""The model runner: owns device tensors, carries out one planned step, and never decides who runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from footplate.engine.layers.attention import KvPair
from footplate.engine.models.decoder import Decoder
from footplate.engine.plan import SchedulerOutput, StepResult
from footplate.engine.runner.batch import PersistentBatch
from footplate.engine.sampling.sampler import Sampler, token_logprobs
from footplate.engine.types import TokenLogprob

# Prompt log-probabilities are made some rows at a time: a row of logits is large, and what is made of it
# takes several times as much for the moment.
LOGIT_ROWS = 64
LOGIT_BYTES = 16 << 20


class ModelRunner:
    """Runs planned steps in their order. `caches` holds [blocks, KV heads, block size, head size] a layer."""

    def __init__(
        self, model: Decoder, caches: list[KvPair], batch: PersistentBatch, sampler: Sampler
    ) -> None:
        self._model = model
        self.caches = caches
        self._layers = model.bind(caches)
        self._batch = batch
        self._sampler = sampler

    @torch.inference_mode()
    def run(self, output: SchedulerOutput) -> StepResult:
        """Carry out one step: block copies, new rows, forward pass, draws."""
        for source, target in output.copies:
            for pair in self.caches:
                for cache in pair:
                    cache[target] = cache[source]
        self._batch.apply(output)
        token_ids, attention = self._batch.step_inputs(output)
        reads_prompts = any(self._batch.params(r.row).prompt_logprobs is not None for r in output.rows)
        hidden = self._model.hidden(token_ids, attention, self._layers, last_only=not reads_prompts)
        result = StepResult(output.step, {})
        if reads_prompts:
            self._read_prompts(output, hidden, result)
            hidden = hidden[attention.query_starts[1:].long() - 1]
        self._draw(output, hidden, result)
        return result

    def _draw(self, output: SchedulerOutput, hidden: torch.Tensor, result: StepResult) -> None:
        """Draw from hidden states [S, hidden], those of each row's last token."""
        drawing = [i for i, row in enumerate(output.rows) if row.samples]
        if not drawing:
            return
        sampling = [output.rows[i] for i in drawing]
        rows = [self._batch.context(r.row) for r in sampling]
        picked = hidden if len(drawing) == len(hidden) else hidden[drawing]
        logits = self._model.logits(picked)
        wanted = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
        raw = logits[torch.tensor(wanted, device=logits.device)] if wanted else None
        drawn = self._sampler.sample(logits, rows)
        tokens = drawn.tolist()
        self._batch.append([r.row for r in sampling], tokens)
        result.tokens = {row.sequence_id: token for row, token in zip(sampling, tokens, strict=True)}
        if raw is not None:
            entries = token_logprobs(raw, drawn[wanted], [rows[i].params.logprobs or 0 for i in wanted])
            result.logprobs = {sampling[i].sequence_id: e for i, e in zip(wanted, entries, strict=True)}

    def _read_prompts(self, output: SchedulerOutput, hidden: torch.Tensor, result: StepResult) -> None:
        begin = 0
        for row in output.rows:
            context = self._batch.context(row.row)
            num_top = context.params.prompt_logprobs
            # the token after each computed prompt position, except after the last: that one is drawn
            count = min(row.start + row.num_tokens, context.num_prompt - 1) - row.start
            if num_top is not None and count > 0:
                targets = context.token_ids[row.start + 1 : row.start + 1 + count].tolist()
                part = hidden[begin : begin + count]
                result.prompt_logprobs[row.sequence_id] = self._logprobs_of(part, targets, num_top)
            begin += row.num_tokens

    def _logprobs_of(self, hidden: torch.Tensor, targets: Sequence[int], num_top: int) -> list[TokenLogprob]:
        entries: list[TokenLogprob] = []
        rows = logit_rows(self._model.config.vocab_size)
        for begin in range(0, len(targets), rows):
            ids = torch.tensor(targets[begin : begin + rows], device=hidden.device)
            logits = self._model.logits(hidden[begin : begin + rows])
            entries += token_logprobs(logits, ids, [num_top] * len(ids))
        return entries


def logit_rows(vocab_size: int) -> int:
    """How many rows of logits to make at a time."""
    return max(1, min(LOGIT_ROWS, LOGIT_BYTES // (4 * vocab_size)))
