from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from footplate.engine.text.stops import StopMatcher


def _run(pieces: list[str], stops: list[str], include: bool = False) -> tuple[str, str | None]:
    matcher = StopMatcher(stops, include)
    out = ""
    for piece in pieces:
        released, matched = matcher.push(piece)
        out += released
        if matched is not None:
            return out, matched
    return out + matcher.flush(), None


def _cuts(text: str) -> list[list[str]]:
    """Every way to cut a text into pieces."""
    if len(text) < 2:
        return [[text]]
    return [[text[:at], *rest] for at in range(1, len(text)) for rest in _cuts(text[at:])] + [[text]]


@pytest.mark.parametrize("text", ["abcEND", "abcENDxyz", "aENEND", "EEND", "END"])
def test_no_part_of_a_stop_string_leaks_however_it_is_cut(text: str) -> None:
    """FAULTS a1 and a2."""
    expected = text[: text.index("END")]
    assert {_run(cut, ["END"]) for cut in _cuts(text)} == {(expected, "END")}


def test_a_failed_partial_match_gives_each_character_once() -> None:
    """FAULTS a3."""
    assert {_run(cut, ["END"]) for cut in _cuts("aENxENE")} == {("aENxENE", None)}


def test_held_back_text_is_flushed_at_the_end() -> None:
    """FAULTS a4."""
    matcher = StopMatcher(["END"], include_in_output=False)
    assert matcher.push("abcEN") == ("abc", None)
    assert matcher.flush() == "EN"


def test_the_stop_string_can_be_included() -> None:
    assert {_run(cut, ["END"], include=True) for cut in _cuts("abENDc")} == {("abEND", "END")}


def test_the_first_complete_stop_string_wins() -> None:
    assert _run(["abcd"], ["bcd", "c"]) == ("ab", "c")
    assert _run(["abcd"], ["d", "bcd"]) == ("a", "bcd")


def test_text_without_a_beginning_of_a_stop_is_not_held() -> None:
    matcher = StopMatcher(["\n\n", "END"], include_in_output=False)
    assert matcher.push("plain words") == ("plain words", None)
    assert matcher.push("line\nnext") == ("line\nnext", None)


def test_a_stop_string_that_completes_too_early_is_text() -> None:
    matcher = StopMatcher(["ab"], include_in_output=False)
    assert matcher.push("ab", may_stop=False) == ("ab", None)
    assert matcher.push("xab", may_stop=True) == ("x", "ab")


@given(
    text=st.text(alphabet="abc", max_size=14),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=4),
    cuts=st.lists(st.integers(0, 14), max_size=6),
    include=st.booleans(),
)
def test_the_result_equals_a_search_in_the_whole_text(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    edges = sorted({0, len(text), *(cut for cut in cuts if cut <= len(text))})
    pieces = [text[begin:end] for begin, end in itertools.pairwise(edges)]
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not ends:
        assert _run(pieces, stops, include) == (text, None)
        return
    end, _, stop = min(ends)
    assert _run(pieces, stops, include) == (text[: end if include else end - len(stop)], stop)
