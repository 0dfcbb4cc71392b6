"""W3C trace context, version 00: which trace a request belongs to, and whether it is recorded.

Of `tracestate` and `baggage`, which are texts of others, nothing is read, kept or sent on.
Source: https://www.w3.org/TR/trace-context/
"""

from __future__ import annotations

import os
import random
import re
from dataclasses import dataclass

# Ids need no secrecy, and a system call for each would cost more than all else of a span.
_ids = random.Random(os.urandom(16))
_HEADER = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_MAX_HEADER_BYTES = 256
WIRE_BYTES = 25


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A place in a trace. `trace_id`: 16 bytes; `span_id`: 8 bytes, of the span that comes before."""

    trace_id: bytes
    span_id: bytes
    is_sampled: bool

    @staticmethod
    def from_header(value: bytes) -> TraceContext | None:
        """Of a `traceparent`; None where it isn't one. Later versions are read as far as they agree."""
        if len(value) > _MAX_HEADER_BYTES:
            return None
        found = _HEADER.fullmatch(value.strip())
        if found is None:
            return None
        version, trace_id, span_id, flags, rest = found.groups()
        if version == b"ff" or (version == b"00" and rest is not None):
            return None
        if trace_id == b"0" * 32 or span_id == b"0" * 16:
            return None
        is_sampled = bool(int(flags, 16) & 1)
        return TraceContext(bytes.fromhex(trace_id.decode()), bytes.fromhex(span_id.decode()), is_sampled)

    @staticmethod
    def from_wire(data: bytes) -> TraceContext | None:
        """Of `to_wire`; None of anything else."""
        if len(data) != WIRE_BYTES or data[24] > 1:
            return None
        return TraceContext(data[:16], data[16:24], data[24] == 1)

    def to_wire(self) -> bytes:
        """25 bytes: trace id, span id, sampled or not."""
        return self.trace_id + self.span_id + bytes((self.is_sampled,))


def new_trace_id() -> bytes:
    """16 bytes, not all zero."""
    return (_ids.getrandbits(128) or 1).to_bytes(16, "big")


def new_span_id() -> bytes:
    """8 bytes, not all zero."""
    return (_ids.getrandbits(64) or 1).to_bytes(8, "big")


def is_chosen(own_id: bytes, ratio: float) -> bool:
    """Whether what has this id is recorded, by its last 8 bytes: an id that was made here, by chance."""
    return int.from_bytes(own_id[-8:], "big") < ratio * 2.0**64
