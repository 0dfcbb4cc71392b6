"""Server-sent events of a streamed answer: what came when, and how it ended. No text is kept."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from footplate.deployments.serve_bench.figures import Arrival

MAX_EVENT_BYTES = 1 << 22
_CODE = re.compile(r"[A-Za-z0-9_.-]{1,40}")
# Where a chat's delta carries output; a role alone, or an empty text, is none.
_OUTPUT = ("content", "reasoning_content", "reasoning", "refusal", "tool_calls", "function_call")

# What is read of a usage; output comes first.
_COUNTS = (("completion_tokens",), ("prompt_tokens",), ("prompt_tokens_details", "cached_tokens"))


class StreamReader:
    """Takes the bytes of one answer as they come; afterwards it says what they were.

    `error` is a kind: `stream_error` with the server's code, `bad_event`, or `cut` for a stream that ended
    without `[DONE]`.
    """

    def __init__(self) -> None:
        self.arrivals: list[Arrival] = []
        self.usage: dict[str, Any] = {}
        self.error: str | None = None
        self.is_done = False
        self._rest = b""
        self._num_told: int | None = 0
        self._most_told = 0
        self._has_bad_usage = False

    def feed(self, data: bytes, at_s: float) -> None:
        """One read of the socket, made at this time."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            self._fail("bad_event")
            self._rest = b""
        num_events = 0
        num_tokens: int | None = 0
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            tokens, has_output = self._take(line[5:].strip())
            if has_output:
                num_events += 1
                num_tokens = None if tokens is None or num_tokens is None else num_tokens + tokens
        if num_events:
            self.arrivals.append(Arrival(at_s, num_events, num_tokens))

    def end(self) -> None:
        """The connection or the body is over."""
        if not self.is_done:
            self._fail("cut")

    def _take(self, text: bytes) -> tuple[int | None, bool]:
        """Tokens that an event says it holds, and whether it holds output."""
        if text == b"[DONE]":
            self.is_done = True
            return None, False
        try:
            event = msgspec.json.decode(text)
        except msgspec.DecodeError:
            event = None
        if not isinstance(event, dict):
            self._fail("bad_event")
            return None, False
        if event.get("error") is not None:
            self._fail(f"stream_error:{_code(event['error'])}")
            return None, False
        choices = event.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else None
        told = self._told(event, choice)
        return told, isinstance(choice, dict) and (bool(told) or _has_output(choice))

    def _told(self, event: dict[str, Any], choice: Any) -> int | None:
        """Tokens of this event: by a running usage, or by their ids."""
        usage = event.get("usage")
        if isinstance(usage, dict):
            self._check(usage)
            self.usage = usage
        if not isinstance(choice, dict):
            return None
        if isinstance(ids := choice.get("token_ids"), list):
            return len(ids)
        if isinstance(usage, dict) and isinstance(total := usage.get("completion_tokens"), int):
            if self._num_told is not None:
                told, self._num_told = total - self._num_told, total
                return told
        elif _has_output(choice):
            # The usage does not run along: where it comes with the last choice, it tells of all of them.
            self._num_told = None
        return None

    def _fail(self, kind: str) -> None:
        self.error = self.error or kind

    def _check(self, usage: dict[str, Any]) -> None:
        """Each usage that comes: one that runs along tells how many tokens each event held."""
        counts = [_told_in(usage, path) for path in _COUNTS]
        known = [count for count in counts if _is_count(count)]
        num_output = counts[0] if _is_count(counts[0]) else self._most_told
        is_less = num_output < self._most_told
        self._has_bad_usage |= is_less or len(known) < len(counts) - counts.count(None)
        self._most_told = max(self._most_told, num_output)

    def is_usage_bad(self, max_output: int | None = None, max_input: int | None = None) -> bool:
        """Whether the server counted what can't be: no whole number, fewer than before, more than these."""
        num_input = self.count("prompt_tokens") or 0
        num_cached = self.count("prompt_tokens_details", "cached_tokens") or 0
        return (
            self._has_bad_usage
            or (max_output is not None and self._most_told > max_output)
            or (max_input is not None and max(num_input, num_cached) > max_input)
        )

    def count(self, *path: str) -> int | None:
        """A number of the usage, such as `completion_tokens`; None where the server told none."""
        found = _told_in(self.usage, path)
        return found if _is_count(found) else None


def _told_in(usage: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        usage = usage.get(name) if isinstance(usage, dict) else None
    return usage


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _has_output(choice: dict[str, Any]) -> bool:
    if choice.get("text"):
        return True
    delta = choice.get("delta")
    return isinstance(delta, dict) and any(delta.get(name) for name in _OUTPUT)


def _code(error: Any) -> str:
    """A server's word for a failure, if it is a word: its message is its own affair."""
    for name in ("code", "type"):
        code = str(error.get(name)) if isinstance(error, dict) and error.get(name) is not None else ""
        if _CODE.fullmatch(code):
            return code
    return "unknown"
