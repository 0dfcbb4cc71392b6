"""Edits of one row of logits before the draw: masks, biases and penalties, in their fixed order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from footplate.engine.types import SamplingParams

NEVER = float("-inf")


@dataclass(slots=True)
class RowContext:
    """What a draw may depend on: parameters, the row's known tokens, and where its prompt ends."""

    params: SamplingParams
    token_ids: np.ndarray  # [num_known] int32, a view
    num_prompt: int

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt


def needs_edits(params: SamplingParams, num_output: int) -> bool:
    """Whether `edit_row` would change anything."""
    return bool(
        params.allowed_token_ids
        or params.bad_words_ids
        or params.min_tokens > num_output
        or params.logit_bias
        or params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1.0
    )


def edit_row(logits: torch.Tensor, row: RowContext, eos_token_ids: tuple[int, ...]) -> None:
    """Apply allowed ids, bad words, min-tokens, logit bias and penalties to logits [V], in place.

    When bad words and min-tokens leave none of the allowed ids, the allowed ids win.
    """
    params = row.params
    if params.allowed_token_ids:
        allowed = _index(params.allowed_token_ids, logits)
        kept = logits[allowed]
        logits.fill_(NEVER)
        logits[allowed] = kept
    _mask(logits, row, eos_token_ids)
    if params.allowed_token_ids and logits[allowed].max() == NEVER:
        logits[allowed] = kept
    if params.logit_bias:
        bias = torch.tensor(list(params.logit_bias.values()), dtype=logits.dtype, device=logits.device)
        logits[_index(tuple(params.logit_bias), logits)] += bias
    _apply_penalties(logits, row)


def _mask(logits: torch.Tensor, row: RowContext, eos_token_ids: tuple[int, ...]) -> None:
    """Take out what would complete a bad word, and before min-tokens what would end the answer."""
    params = row.params
    for word in params.bad_words_ids:
        head, last = tuple(word[:-1]), word[-1]
        output = row.token_ids[row.num_prompt :]
        if not head or (len(output) >= len(head) and tuple(output[-len(head) :]) == head):
            logits[last] = NEVER
    if row.num_output < params.min_tokens:
        ends = (*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids))
        if ends:
            logits[_index(ends, logits)] = NEVER


def _apply_penalties(logits: torch.Tensor, row: RowContext) -> None:
    params = row.params
    if params.repetition_penalty != 1.0:  # CTRL (arXiv:1909.05858): counts prompt and output
        seen = _index(np.unique(row.token_ids), logits)
        values = logits[seen]
        penalty = params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if (params.presence_penalty or params.frequency_penalty) and row.num_output:
        ids, counts = np.unique(row.token_ids[row.num_prompt :], return_counts=True)
        penalties = params.presence_penalty + params.frequency_penalty * counts
        logits[_index(ids, logits)] -= torch.as_tensor(penalties, dtype=logits.dtype, device=logits.device)


def _index(ids: tuple[int, ...] | np.ndarray, logits: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(np.asarray(ids, dtype=np.int64), device=logits.device)
