"""What is kept of a line's answer, and the lines of output and error files. Pure.

An answer is kept together with its usage event: whoever finds it after its worker was lost can bill it
exactly, and marks the line without running it again.
"""

from __future__ import annotations

from typing import Any

import msgspec

from footplate.billing.errors import InvalidUsage
from footplate.billing.usage import UsageEvent
from footplate.platform.batches.values import LineEnd, LineState, LineTokens

_ENCODER = msgspec.json.Encoder()


class KeptResult(msgspec.Struct, frozen=True):
    """One answer as it stands in the file store. `event`: the bytes of its usage event, empty without one."""

    status: int
    line: bytes
    event: bytes = b""
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    def to_bytes(self) -> bytes:
        """For the file store."""
        return _PACKER.encode(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> KeptResult | None:
        """None for bytes that are none of `to_bytes`, such as the first half of them."""
        try:
            return _UNPACKER.decode(data)
        except msgspec.DecodeError:
            return None

    def usage_event(self) -> UsageEvent | None:
        """What it is billed by."""
        try:
            return UsageEvent.from_bytes(self.event) if self.event else None
        except InvalidUsage:
            return None

    def end(self, attempt: int) -> LineEnd:
        """How a line ends that has it."""
        state = LineState.SUCCEEDED if self.status == 200 else LineState.FAILED
        tokens = LineTokens(self.input_tokens, self.cached_tokens, self.output_tokens)
        return LineEnd(state, attempt, self.status, tokens)


_PACKER = msgspec.msgpack.Encoder()
_UNPACKER = msgspec.msgpack.Decoder(KeptResult)


def answered_line(event_id: str, custom_id: str, request_id: str, status: int, body: bytes) -> bytes:
    """A line of the output file, or of the error file when it is not a 200; `body` is JSON."""
    response = {"status_code": status, "request_id": request_id, "body": msgspec.Raw(body)}
    return _line(event_id, custom_id, response, None)


def unfinished_line(event_id: str, custom_id: str, code: str, message: str) -> bytes:
    """A line of the error file, for one that was not run to its end."""
    return _line(event_id, custom_id, None, {"code": code, "message": message})


def _line(event_id: str, custom_id: str, response: Any, error: Any) -> bytes:
    fields = {"id": event_id, "custom_id": custom_id, "response": response, "error": error}
    return _ENCODER.encode(fields)


def tokens_of(body: bytes) -> LineTokens:
    """What an answer says that it used."""
    usage = _ANSWER.decode(body).usage
    return LineTokens(usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens, usage.completion_tokens)


class _Details(msgspec.Struct, frozen=True):
    cached_tokens: int = 0


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details = _Details()


class _Answer(msgspec.Struct, frozen=True):
    usage: _Usage = _Usage()


_ANSWER = msgspec.json.Decoder(_Answer)
