"""The sampler: logits of a step's rows in, token ids and log-probabilities out.

Every row is handled by itself: no value of one row depends on which other rows are in the batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from footplate.engine.sampling.edits import NEVER, RowContext, edit_row, needs_edits
from footplate.engine.sampling.noise import draw_key, gumbel
from footplate.engine.types import SamplingParams, TokenLogprob
from footplate.engine.validation import MAX_LOGPROBS

CANDIDATES = 256  # most truncated draws need no more; those that do are done over the whole vocabulary
MIN_TEMPERATURE = 1e-5  # anything colder is greedy: scores over it leave float32


class Sampler:
    """Draws tokens. Owns only constants of the vocabulary."""

    def __init__(self, vocab_size: int, eos_token_ids: Sequence[int], device: torch.device) -> None:
        self._eos = tuple(eos_token_ids)
        self._vocabulary = torch.arange(vocab_size, dtype=torch.int32, device=device)

    def sample(self, logits: torch.Tensor, rows: Sequence[RowContext]) -> torch.Tensor:
        """Token ids [R] int64 for logits [R, V] float32, which are used up.

        Order of each row: edits (see `edits`), then temperature, min-p, top-k, top-p, draw.
        """
        for i, row in enumerate(rows):
            if needs_edits(row.params, row.num_output):
                edit_row(logits[i], row, self._eos)
        drawn = [i for i, row in enumerate(rows) if row.params.temperature >= MIN_TEMPERATURE]
        if not drawn:
            return logits.argmax(dim=-1)
        tokens = (
            logits.argmax(dim=-1)
            if len(drawn) < len(rows)
            else logits.new_empty(len(rows), dtype=torch.int64)
        )
        truncated = [i for i in drawn if _is_truncated(rows[i].params)]
        plain = [i for i in drawn if not _is_truncated(rows[i].params)]
        for part, draw in ((plain, self._draw_plain), (truncated, self._draw_truncated)):
            if part:
                index = torch.tensor(part, device=logits.device)
                chosen = [rows[i] for i in part]
                tokens[index] = draw(_scaled(logits[index], chosen), chosen)
        return tokens

    def _draw_plain(self, scores: torch.Tensor, rows: Sequence[RowContext]) -> torch.Tensor:
        noise = gumbel(self._vocabulary, _keys(rows, scores.device))
        return scores.add_(noise).argmax(dim=-1)

    def _draw_truncated(self, scores: torch.Tensor, rows: Sequence[RowContext]) -> torch.Tensor:
        """Draw from what min-p, top-k and top-p leave: the best candidates first, all tokens if need be.

        Both widths are the same for every batch: equal scores at a cut may be ordered differently in another.
        """
        vocab_size = scores.shape[1]
        tokens, complete = self._draw_among(scores, rows, min(CANDIDATES, vocab_size))
        if not complete.all():
            redo = (~complete).nonzero().flatten()
            again = [rows[i] for i in redo.tolist()]
            tokens[redo] = self._draw_among(scores[redo], again, vocab_size)[0]
        return tokens

    def _draw_among(
        self, scores: torch.Tensor, rows: Sequence[RowContext], width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(tokens [R], whether the `width` best held all survivors [R])."""
        best, ids = scores.topk(width, dim=-1)
        floor = best[:, :1] + _column(rows, lambda p: math.log(p.min_p) if p.min_p > 0 else NEVER, scores)
        limit = _column(rows, lambda p: p.top_k if p.top_k > 0 else scores.shape[1], scores)
        top_p = _column(rows, lambda p: p.top_p, scores)
        rank = torch.arange(width, device=scores.device)
        kept = (best >= floor) & (rank < limit)
        # the mass that top-p is a share of: what min-p and top-k left, also beyond the candidates
        everyone = torch.where(scores >= floor, scores, NEVER).logsumexp(dim=-1, keepdim=True)
        few = torch.where(kept, best, NEVER).logsumexp(dim=-1, keepdim=True)
        share = (best - torch.where(limit <= width, few, everyone)).exp()
        before = share.cumsum(dim=-1) - share
        kept &= (before < top_p) | (rank == 0)
        noise = gumbel(ids.to(torch.int32), _keys(rows, scores.device))
        choice = torch.where(kept, best + noise, NEVER).argmax(dim=-1, keepdim=True)
        limit = limit.flatten()
        complete = (limit <= width) | (~kept[:, -1] & (limit >= scores.shape[1])) | (width == scores.shape[1])
        return ids.gather(1, choice).flatten(), complete


def _is_truncated(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0


def _scaled(logits: torch.Tensor, rows: Sequence[RowContext]) -> torch.Tensor:
    return logits / _column(rows, lambda p: p.temperature, logits)


def _column(rows: Sequence[RowContext], value, like: torch.Tensor) -> torch.Tensor:  # type: ignore[no-untyped-def]
    return torch.tensor([[float(value(r.params))] for r in rows], dtype=torch.float32, device=like.device)


def _keys(rows: Sequence[RowContext], device: torch.device) -> torch.Tensor:
    """The draw's keys [R, 2]: of the seed and of the position the new token takes."""
    pairs = [draw_key(r.params.seed or 0, len(r.token_ids)) for r in rows]
    return torch.tensor(pairs, dtype=torch.int32, device=device)


def token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: Sequence[int]
) -> list[TokenLogprob]:
    """Log-probabilities (nats) under raw logits [R, V] of token_ids [R], each with num_top[r] others."""
    logprobs = logits.log_softmax(dim=-1)
    chosen = logprobs.gather(1, token_ids[:, None])
    ranks = (logprobs > chosen).sum(dim=-1) + 1
    width = min(MAX_LOGPROBS, logits.shape[1]) if any(num_top) else 0  # one width: so are ties in any batch
    values, ids = logprobs.topk(width, dim=-1) if width else (logprobs[:, :0], token_ids[:, None][:, :0])
    return [
        TokenLogprob(token, logprob, rank, tuple(zip(top_ids[:k], top_values[:k], strict=True)))
        for token, logprob, rank, top_ids, top_values, k in zip(
            token_ids.tolist(),
            chosen.flatten().tolist(),
            ranks.tolist(),
            ids.tolist(),
            values.tolist(),
            num_top,
            strict=True,
        )
    ]
