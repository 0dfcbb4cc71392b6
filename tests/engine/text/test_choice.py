from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from footplate.engine.text.choice import ChoiceDecoder, join_pieces
from footplate.engine.text.detokenizer import TokenTexts
from footplate.engine.types import FinishReason, SamplingParams, SequenceDelta, TokenLogprob

WORDS = [b"abc", b"EN", b"D", b"x", b"\xf0\x9f", b"\xa7\x91", b"<eos>", b"END", b"cE", b"N", b"", b"e"]
EOS = 6


def _decoder(**params: Any) -> ChoiceDecoder:
    sampling = SamplingParams(**params)
    texts = TokenTexts(WORDS)
    shown = texts.hiding([EOS]) if sampling.skip_special_tokens else texts
    return ChoiceDecoder(shown, frozenset({EOS}), sampling)


def _deltas(groups: Sequence[Sequence[int]], finish: FinishReason, logprobs: bool) -> list[SequenceDelta]:
    deltas = []
    for number, ids in enumerate(groups):
        last = number == len(groups) - 1
        entries = tuple(TokenLogprob(token_id, -1.0, 1) for token_id in ids) if logprobs else None
        deltas.append(SequenceDelta("r", 0, tuple(ids), entries, finish if last else None))
    return deltas


def _answer(groups: Sequence[Sequence[int]], finish: FinishReason, **params: Any) -> tuple[Any, ...]:
    decoder = _decoder(**params)
    pieces = []
    for delta in _deltas(groups, finish, "logprobs" in params):
        pieces += decoder.push(delta)
    entries = [entry.token_id for piece in pieces for entry in piece.logprobs]
    ids = [token_id for piece in pieces for token_id in piece.token_ids]
    return join_pieces(pieces), decoder.finish_reason, decoder.stop_reason, decoder.num_tokens, entries, ids


def _cut(ids: Sequence[int], edges: Sequence[int]) -> list[Sequence[int]]:
    bounds = sorted({0, len(ids), *(edge for edge in edges if edge < len(ids))})
    return [ids[begin:end] for begin, end in itertools.pairwise(bounds)] or [()]


def test_a_stop_string_over_tokens_ends_with_what_came_before() -> None:
    """FAULTS a1 and a2."""
    text, finish, matched, num_tokens, entries, ids = _answer(
        [(0,), (1,), (2, 3, 3)], FinishReason.LENGTH, stop=("END",), logprobs=0
    )
    assert (text, finish, matched) == ("abc", FinishReason.STOP, "END")
    assert num_tokens == 3, "tokens after the stop string are not counted"
    assert entries == [0], "tokens whose text is not delivered have no entry"
    assert ids == [0, 1, 2]


def test_a_token_delivered_in_part_has_one_entry() -> None:
    """FAULTS a6."""
    text, _, _, num_tokens, entries, _ = _answer(
        [(0, 8), (9, 2)], FinishReason.LENGTH, stop=("END",), logprobs=0
    )
    assert (text, num_tokens, entries) == ("abcc", 4, [0, 8])


def test_held_text_is_flushed_when_length_ends_the_answer() -> None:
    """FAULTS a4."""
    answer = _answer([(0,), (1,)], FinishReason.LENGTH, stop=("END",), logprobs=0)
    assert answer == ("abcEN", FinishReason.LENGTH, None, 2, [0, 1], [0, 1])


def test_eos_is_counted_and_hidden_and_has_no_entry() -> None:
    assert _answer([(0, EOS)], FinishReason.STOP, logprobs=0) == (
        "abc",
        FinishReason.STOP,
        None,
        2,
        [0],
        [0, EOS],
    )


def test_eos_is_shown_on_request() -> None:
    answer = _answer([(0, EOS)], FinishReason.STOP, skip_special_tokens=False, logprobs=0)
    assert answer[0] == "abc<eos>"
    assert answer[4] == [0, EOS]


@pytest.mark.parametrize(("include", "expected"), [(False, "abc"), (True, "abcx")])
def test_an_ordinary_stop_token_is_shown_only_on_request(include: bool, expected: str) -> None:
    answer = _answer([(0,), (3,)], FinishReason.STOP, stop_token_ids=(3,), include_stop_str_in_output=include)
    assert answer[:4] == (expected, FinishReason.STOP, 3, 2)


def test_parts_of_a_character_each_have_an_entry() -> None:
    text, *_, entries, _ = _answer([(4,), (5,)], FinishReason.LENGTH, logprobs=0)
    assert (text, entries) == ("🧑", [4, 5])


def test_stop_strings_wait_for_min_tokens() -> None:
    """FAULTS a56."""
    answer = _answer([(7,), (3,), (7,), (3,)], FinishReason.LENGTH, stop=("END",), min_tokens=2)
    assert answer[:4] == ("ENDx", FinishReason.STOP, "END", 3)


def test_nothing_comes_after_the_end() -> None:
    decoder = _decoder(stop=("END",))
    decoder.push(SequenceDelta("r", 0, (7,)))
    assert decoder.finish_reason is FinishReason.STOP
    assert decoder.push(SequenceDelta("r", 0, (0,), finish_reason=FinishReason.LENGTH)) == []
    assert decoder.finish_reason is FinishReason.STOP


def test_an_error_keeps_its_sentence() -> None:
    decoder = _decoder()
    decoder.push(SequenceDelta("r", 0, (), finish_reason=FinishReason.ERROR, error="step failed"))
    assert (decoder.finish_reason, decoder.error) == (FinishReason.ERROR, "step failed")


@given(
    ids=st.lists(st.integers(0, len(WORDS) - 1), max_size=12),
    edges=st.lists(st.integers(0, 12), max_size=6),
    stops=st.sampled_from([(), ("END",), ("END", "x"), ("cE", "EN"), ("\ufffd",), ("🧑x",)]),
    finish=st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
    include=st.booleans(),
    skip=st.booleans(),
    min_tokens=st.integers(0, 4),
    logprobs=st.booleans(),
)
def test_every_cutting_gives_the_one_shot_answer(
    ids: list[int],
    edges: list[int],
    stops: tuple[str, ...],
    finish: FinishReason,
    include: bool,
    skip: bool,
    min_tokens: int,
    logprobs: bool,
) -> None:
    """FAULTS a6."""
    params: dict[str, Any] = {
        "stop": stops,
        "include_stop_str_in_output": include,
        "skip_special_tokens": skip,
        "min_tokens": min_tokens,
        **({"logprobs": 0} if logprobs else {}),
    }
    # The token that ended the answer travels in the delta that says so.
    assert _answer(_cut(ids, edges), finish, **params) == _answer([ids], finish, **params)
