"""Drawing tokens row by row in plain PyTorch: what `Sampler` does, for parameters that lie on the device."""

from __future__ import annotations

import math
from typing import Protocol

import torch

from footplate.engine.sampling.noise import draw_key, gumbel
from footplate.engine.sampling.sampler import MIN_TEMPERATURE

NEVER = float("-inf")
HARDLY = -1e30  # finite: a row of nothing else must not subtract infinities


class DrawState(Protocol):
    """Tables of the persistent batch that a draw reads, each [num_rows]; and the tokens it may append to."""

    @property
    def tokens(self) -> torch.Tensor:
        """[num_rows, max_len] int32."""

    @property
    def lengths(self) -> torch.Tensor:
        """int32: known tokens, so also the position of the one to draw."""

    @property
    def temperature(self) -> torch.Tensor:
        """float32; below MIN_TEMPERATURE is greedy."""

    @property
    def top_k(self) -> torch.Tensor:
        """int32; 0 is off."""

    @property
    def top_p(self) -> torch.Tensor:
        """float32; 1 is off."""

    @property
    def min_p(self) -> torch.Tensor:
        """float32; 0 is off."""

    @property
    def seeds(self) -> torch.Tensor:
        """int64."""


def sample(
    logits: torch.Tensor, rows: torch.Tensor, state: DrawState, *, appends: bool = False
) -> torch.Tensor:
    """Ids [R] int32 drawn from logits [R, V] by the parameters of `rows` [R] int32; row -1 gets -1.

    Greedy rows take the arg-max, ties to the lowest id. Others: temperature, min-p, top-k, top-p, then the
    arg-max of what is left with Gumbel noise of (seed, position, id). Tokens that tie with the last one that
    top-k or top-p keeps are kept too. With `appends` the ids enter the token table and lengths grow by one.
    """
    ids = torch.empty(rows.shape[0], dtype=torch.int32, device=logits.device)
    for index, row in enumerate(rows.tolist()):
        ids[index] = _draw(logits[index].float(), row, state) if row >= 0 else -1
        if appends and row >= 0:
            state.tokens[row, int(state.lengths[row])] = ids[index]
            state.lengths[row] += 1
    return ids


def _draw(logits: torch.Tensor, row: int, state: DrawState) -> int:
    """One id for logits [V] float32. What is no number never wins; without any number the first id does."""
    logits = logits.nan_to_num(nan=HARDLY, posinf=math.inf, neginf=NEVER)
    if state.temperature[row] < MIN_TEMPERATURE:
        return _first_best(logits)
    scores = logits / state.temperature[row]
    key = torch.tensor([draw_key(int(state.seeds[row]), int(state.lengths[row]))], dtype=torch.int32)
    noise = gumbel(torch.arange(len(scores), dtype=torch.int32), key)[0].to(scores.device)
    kept = _kept(scores, int(state.top_k[row]), float(state.top_p[row]), float(state.min_p[row]))
    return _first_best(torch.where(kept, scores + noise, NEVER))


def _first_best(scores: torch.Tensor) -> int:
    """The arg-max of scores [V]; of equal ones the first, which torch.argmax promises on no device."""
    return int((scores == scores.max()).nonzero()[0])


def _kept(scores: torch.Tensor, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Which of scores [V] min-p, then top-k, then top-p leave."""
    kept = scores >= scores.max() + (math.log(min_p) if min_p > 0 else NEVER)
    if 0 < top_k < len(scores):
        kept &= scores >= scores.topk(top_k).values[-1]
    if top_p < 1:
        shares = torch.where(kept, scores, NEVER).double().softmax(dim=-1)
        levels, level_of = torch.unique(scores, return_inverse=True)  # ascending
        mass = torch.zeros(len(levels), dtype=torch.float64, device=scores.device).index_add(
            0, level_of, shares
        )
        above = mass.flip(0).cumsum(0).flip(0) - mass
        kept &= above[level_of] < top_p
    return kept
