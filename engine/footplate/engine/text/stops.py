"""Stop strings over a stream of text: nothing of one leaks, and nothing else is kept back for long."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Looks for stop strings in one answer's text, character by character.

    The stop string that is complete first wins; of two that are complete at the same character, the longer.
    So the result doesn't depend on how the text is cut. Text is held back only while it may begin a stop
    string.
    Source: Knuth, Morris and Pratt, "Fast pattern matching in strings" (1977).
    """

    __slots__ = ("_failures", "_firsts", "_held", "_include", "_states", "_stops")

    def __init__(self, stops: Sequence[str], include_in_output: bool) -> None:
        # Longest first, so that the first complete one at a character is the one that wins.
        self._stops = sorted(set(filter(None, stops)), key=len, reverse=True)
        self._failures = [_failure_table(stop) for stop in self._stops]
        self._firsts = frozenset(stop[0] for stop in self._stops)
        self._states = [0] * len(self._stops)
        self._held = ""
        self._include = include_in_output

    def push(self, text: str, may_stop: bool = True) -> tuple[str, str | None]:
        """Take text in; give what may go out now, and the stop string that ended the answer, if one did.

        While `may_stop` is False a complete stop string is text like any other (too few tokens so far).
        """
        if not self._held and self._firsts.isdisjoint(text):
            return text, None
        whole = self._held + text
        begin = len(self._held)
        for position in range(begin, len(whole)):
            stop = self._advance(whole[position])
            if stop is not None and may_stop:
                end = position + 1
                self._held = ""
                return whole[: end if self._include else end - len(stop)], stop
        kept = max(self._states)
        cut = len(whole) - kept
        self._held = whole[cut:]
        return whole[:cut], None

    def flush(self) -> str:
        """The text still held back when the answer ends for another reason."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> str | None:
        """Move each stop string's automaton by one character; the first complete one, or None."""
        complete = None
        for index, stop in enumerate(self._stops):
            failures = self._failures[index]
            state = self._states[index]
            while state and stop[state] != character:
                state = failures[state - 1]
            if stop[state] == character:
                state += 1
            if state == len(stop):
                complete = complete or stop
                state = failures[state - 1]
            self._states[index] = state
        return complete


def _failure_table(stop: str) -> list[int]:
    """For each prefix of `stop`, the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[index] != stop[length]:
            length = table[length - 1]
        if stop[index] == stop[length]:
            length += 1
        table[index] = length
    return table
