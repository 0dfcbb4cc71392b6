"""One choice's way from token ids to deliverable text: characters, stop strings, logprob entries, end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from footplate.engine.text.detokenizer import Detokenizer, TokenTexts
from footplate.engine.text.stops import StopMatcher
from footplate.engine.types import FinishReason, SamplingParams, SequenceDelta, TokenLogprob


@dataclass(slots=True)
class TextPiece:
    """Text that may go out, with the tokens consumed since the piece before.

    `logprobs` holds one entry for each token whose text begins to be delivered here, so that over an answer
    each delivered token has exactly one.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: Sequence[TokenLogprob] = ()


class ChoiceDecoder:
    """Turns one choice's deltas into text pieces, about one a token.

    The joined pieces, the counts and the end are the same for every way of cutting the ids into deltas.
    After `push` has returned, `finish_reason` says whether the choice has ended, `stop_reason` what matched
    (a stop string, or the id of a stop token), and `num_tokens` how many tokens were delivered or ended the
    answer. Tokens after a stop string are not counted.

    `keeps_end_entry`: the token at which the engine ended the answer has a logprob entry even when hidden.
    """

    def __init__(
        self,
        texts: TokenTexts,
        special_ids: frozenset[int],
        params: SamplingParams,
        keeps_end_entry: bool = False,
    ) -> None:
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.error: str | None = None
        self.num_tokens = 0
        self._special_ids = special_ids
        self._stop_token_ids = frozenset(params.stop_token_ids)
        self._min_tokens = params.min_tokens
        self._include_stop = params.include_stop_str_in_output
        self._detokenizer = Detokenizer(texts)
        self._stops = StopMatcher(params.stop, self._include_stop) if params.stop else None
        self._wants_logprobs = params.logprobs is not None
        self._is_plain = self._stops is None and not self._wants_logprobs
        self._keeps_end_entry = keeps_end_entry
        self._end_entry: TokenLogprob | None = None
        self._taken: list[int] = []  # ids consumed since the last piece
        self._waiting: list[tuple[int, TokenLogprob]] = []  # (where its text begins, entry)
        self._num_decoded = 0  # characters out of the detokenizer
        self._num_released = 0  # characters out of the stop matcher

    def push(self, delta: SequenceDelta) -> list[TextPiece]:
        """Take one delta in. After the end, further deltas give nothing."""
        pieces: list[TextPiece] = []
        if self.finish_reason is not None:
            return pieces
        if self._is_plain and delta.finish_reason is None:
            self._push_plain(delta.token_ids, pieces)
            return pieces
        last = len(delta.token_ids) - 1 if delta.finish_reason is FinishReason.STOP else -1
        logprobs = delta.logprobs if self._wants_logprobs else None
        for index, token_id in enumerate(delta.token_ids):
            entry = logprobs[index] if logprobs is not None else None
            self._take(token_id, entry, index == last, pieces)
            if self.finish_reason is not None:
                return pieces
        if delta.finish_reason is not None:
            self._end(delta, pieces)
        return pieces

    def _push_plain(self, token_ids: Sequence[int], pieces: list[TextPiece]) -> None:
        """`_take` for the common case, without stop strings and logprobs: most tokens pass here."""
        decode = self._detokenizer.push
        taken = self._taken
        for token_id in token_ids:
            text = decode(token_id)
            if not text:
                taken.append(token_id)
            elif taken:
                taken.append(token_id)
                pieces.append(TextPiece(text, tuple(taken)))
                taken.clear()
            else:
                pieces.append(TextPiece(text, (token_id,)))
        self.num_tokens += len(token_ids)

    def _take(
        self, token_id: int, entry: TokenLogprob | None, ends_answer: bool, pieces: list[TextPiece]
    ) -> None:
        self.num_tokens += 1
        self._taken.append(token_id)
        if ends_answer and self._keeps_end_entry:
            self._end_entry = entry
            entry = None
        if ends_answer and self._hides_end(token_id):
            return
        text = self._detokenizer.push(token_id)
        if entry is not None and self._writes(token_id):
            self._waiting.append((self._num_decoded, entry))
        if text:
            self._num_decoded += len(text)
            self._release(text, pieces)

    def _release(self, text: str, pieces: list[TextPiece]) -> None:
        if self._stops is None:
            self._emit(text, pieces)
            return
        out, matched = self._stops.push(text, may_stop=self.num_tokens >= self._min_tokens)
        if matched is not None:
            self.finish_reason = FinishReason.STOP
            self.stop_reason = matched
        if out or matched is not None:
            self._emit(out, pieces)

    def _emit(self, text: str, pieces: list[TextPiece]) -> None:
        self._num_released += len(text)
        piece = TextPiece(text, tuple(self._taken))
        self._taken = []
        if self._waiting:
            ready = [entry for start, entry in self._waiting if start < self._num_released]
            del self._waiting[: len(ready)]
            piece.logprobs = ready
        pieces.append(piece)

    def _end(self, delta: SequenceDelta, pieces: list[TextPiece]) -> None:
        tail = self._detokenizer.flush()
        if tail:
            self._num_decoded += len(tail)
            self._release(tail, pieces)
        if self.finish_reason is not None:
            return
        held = self._stops.flush() if self._stops is not None else ""
        if held or self._taken:
            self._emit(held, pieces)
        if self._end_entry is not None:
            pieces[-1].logprobs = [*pieces[-1].logprobs, self._end_entry]
        self.finish_reason = delta.finish_reason
        self.error = delta.error
        if delta.finish_reason is FinishReason.STOP and delta.token_ids:
            ended_by = delta.token_ids[-1]
            self.stop_reason = ended_by if ended_by in self._stop_token_ids else None

    def _hides_end(self, token_id: int) -> bool:
        """Whether the token that ended the answer is kept out of the text.

        Control tokens follow skip_special_tokens like all others; an ordinary stop token is treated as a stop
        string is.
        """
        return token_id not in self._special_ids and not self._include_stop

    def _writes(self, token_id: int) -> bool:
        return bool(self._detokenizer.bytes_of(token_id))


def join_pieces(pieces: Sequence[TextPiece]) -> str:
    """The text of all pieces."""
    return "".join(piece.text for piece in pieces)
