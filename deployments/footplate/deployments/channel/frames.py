"""The byte format of the token channel: versioned frames, the plain case as an array of 32-bit words.

A frame is a header of eight bytes (version, kind, two spare bytes, payload length; little-endian) and its
payload. `TOKENS` carries what one engine step added to any number of sequences as unsigned 32-bit words:

    stream id | choice index << 8 | finish code | number of tokens | token ids ...     repeated

A step's entry that needs more than ids (log-probabilities, cached-token count, an error) travels in an
`EXTRAS` frame as MessagePack. One step holds at most one delta per choice, so the order of the two frames of
a step doesn't matter; frames of later steps always follow those of earlier ones.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Sequence
from enum import IntEnum
from typing import TypeVar

import msgspec

from footplate.deployments.errors import FrameError
from footplate.deployments.refusal import Refusal
from footplate.engine.prefix import DIGEST_BYTES
from footplate.engine.types import EngineRequest, EngineStats, FinishReason, SequenceDelta
from footplate.platform.ports import EngineBegin
from footplate.routing.types import BlockEvents

VERSION = 4
HEADER = struct.Struct("<BBHI")
MAX_PAYLOAD_BYTES = 16 * 1024 * 1024

# The code's place in this tuple is what travels; append only.
FINISH_CODES: tuple[FinishReason | None, ...] = (
    None,
    FinishReason.STOP,
    FinishReason.LENGTH,
    FinishReason.ABORT,
    FinishReason.ERROR,
)
CODE_OF: dict[FinishReason | None, int] = {reason: code for code, reason in enumerate(FINISH_CODES)}


class Kind(IntEnum):
    """What a frame holds."""

    HELLO = 1  # engine -> gateway, MessagePack
    CHALLENGE = 2  # gateway -> engine, MessagePack
    PROOF = 3  # engine -> gateway, raw digest
    WELCOME = 4  # gateway -> engine, empty
    ACCEPT = 5  # engine -> gateway: the engine has taken these streams; words
    TOKENS = 6  # engine -> gateway: words, see the module's text
    EXTRAS = 7  # engine -> gateway: MessagePack list of (stream id, SequenceDelta)
    STATUS = 8  # engine -> gateway: heart-beat and statistics, MessagePack
    STOP = 9  # gateway -> engine: end one choice; words (stream id, choice index, tokens that count)
    ABORT = 10  # gateway -> engine: end streams; words (stream ids)
    ENDED = 11  # engine -> gateway: the end of aborted streams, behind all that was made of them; words (ids)
    SUBMIT = 12  # gateway -> engine: a request and its stream, MessagePack; ACCEPT or REFUSE is the answer
    REFUSE = 13  # engine -> gateway: why it doesn't take a request, MessagePack
    BLOCKS = 14  # engine -> gateway: what its prefix cache has gained and lost, MessagePack
    SHOW_ALL = 15  # gateway -> engine: an event is missing, so begin anew with all that is cached; empty
    BEGAN = 16  # engine -> gateway: how it began a stream, before its first token; words, see `began_frame`
    ASK_KEY = 17  # engine -> gateway: may whoever has this key read metrics? MessagePack (number, key)
    KEY_ANSWER = 18  # gateway -> engine: words (number, 1 or 0)


class Status(msgspec.Struct, array_like=True):
    """A replica's heart-beat: its statistics, and the age of the step loop's last sign of life.

    One that drains takes nothing new and ends what it has. One that leaves will soon: it takes what no other
    replica does.
    """

    engine_age_s: float
    stats: EngineStats
    is_draining: bool = False
    metrics_port: int = 0  # where it answers /metrics itself; 0: nowhere
    is_leaving: bool = False


class Submission(msgspec.Struct, array_like=True):
    """A request, and the stream of its gateway that its tokens go to.

    `trace`: the W3C trace context it belongs to, as `TraceContext.to_wire` writes it; empty: none.
    """

    stream_id: int
    request: EngineRequest
    trace: bytes = b""


class Refused(msgspec.Struct, array_like=True):
    """A stream that no token will come for."""

    stream_id: int
    refusal: Refusal


class Blocks(msgspec.Struct, array_like=True):
    """`BlockEvents` with their keys one behind the other."""

    sequence: int
    stored: bytes
    evicted: bytes
    is_reset: bool


_extras_encoder = msgspec.msgpack.Encoder()
_extras_decoder = msgspec.msgpack.Decoder(list[tuple[int, SequenceDelta]])
_status_decoder = msgspec.msgpack.Decoder(Status)
# Empty mappings of frozen values are read-only views.
_submission_encoder = msgspec.msgpack.Encoder(enc_hook=dict)
_submission_decoder = msgspec.msgpack.Decoder(Submission)
_refused_decoder = msgspec.msgpack.Decoder(Refused)
_blocks_decoder = msgspec.msgpack.Decoder(Blocks)
_asked_key_decoder = msgspec.msgpack.Decoder(tuple[int, str])
_Read = TypeVar("_Read")
_MAX_WORD = 0xFFFF_FFFF
_SWAP = sys.byteorder != "little"


def frame(kind: Kind, payload: bytes = b"") -> bytes:
    """One whole frame, ready to write."""
    return HEADER.pack(VERSION, kind, 0, len(payload)) + payload


def word_frame(kind: Kind, words: Sequence[int]) -> bytes:
    """A frame whose payload is unsigned 32-bit words.

    Raises:
        OverflowError: a word is negative or needs more than 32 bits.
    """
    packed = array("I", words)
    if _SWAP:
        packed.byteswap()
    return HEADER.pack(VERSION, kind, 0, len(words) * 4) + packed.tobytes()


def read_words(payload: bytes) -> list[int]:
    """The words of a payload.

    Raises:
        FrameError: the payload is no whole number of words.
    """
    if len(payload) % 4:
        raise FrameError(f"a word payload of {len(payload)} bytes is no multiple of 4")
    packed = array("I")
    packed.frombytes(payload)
    if _SWAP:
        packed.byteswap()
    return packed.tolist()


def is_plain(delta: SequenceDelta) -> bool:
    """Whether ids and finish code say everything about this delta."""
    return not (
        delta.cached_tokens
        or delta.logprobs is not None
        or delta.prompt_logprobs is not None
        or delta.error is not None
    )


def append_tokens(words: list[int], stream_id: int, delta: SequenceDelta) -> None:
    """Add one plain delta to the words of a `TOKENS` frame."""
    token_ids = delta.token_ids
    words += (stream_id, delta.index << 8 | CODE_OF[delta.finish_reason], len(token_ids), *token_ids)


def extras_frame(entries: Sequence[tuple[int, SequenceDelta]]) -> bytes:
    """A frame of deltas that need more than ids, each with its stream id."""
    return frame(Kind.EXTRAS, _extras_encoder.encode(entries))


def read_extras(payload: bytes) -> list[tuple[int, SequenceDelta]]:
    """The (stream id, delta) pairs of an `EXTRAS` payload.

    Raises:
        FrameError: the payload is not what `extras_frame` writes.
    """
    return _decoded(_extras_decoder, payload, "an extras payload")


def submit_frame(stream_id: int, request: EngineRequest, trace: bytes = b"") -> bytes:
    """A request on its way to an engine."""
    return frame(Kind.SUBMIT, _submission_encoder.encode(Submission(stream_id, request, trace)))


def began_frame(stream_id: int, begun: EngineBegin) -> bytes:
    """How an engine began: when the request came (unix, two words), time in the queue and of the prompt.

    Times are in microseconds, and at most 71 minutes.
    """
    queue_us, prefill_us = (
        min(max(int(seconds * 1e6), 0), _MAX_WORD) for seconds in (begun.queue_s, begun.prefill_s)
    )
    high, low = divmod(begun.arrived_unix_ns, 1 << 32)
    return word_frame(Kind.BEGAN, (stream_id, high, low, queue_us, prefill_us))


def read_began(payload: bytes) -> tuple[int, EngineBegin]:
    """The stream and the times of a `BEGAN` payload. Raises FrameError."""
    words = read_words(payload)
    if len(words) != 5:
        raise FrameError(f"a beginning of {len(words)} words has not 5")
    stream_id, high, low, queue_us, prefill_us = words
    return stream_id, EngineBegin(high << 32 | low, queue_us / 1e6, prefill_us / 1e6)


def read_submission(payload: bytes) -> Submission:
    """The request of a `SUBMIT` payload. Raises FrameError."""
    return _decoded(_submission_decoder, payload, "a submission")


def ask_key_frame(number: int, key: str) -> bytes:
    """A replica's question whether a key may read metrics."""
    return frame(Kind.ASK_KEY, _extras_encoder.encode((number, key)))


def read_asked_key(payload: bytes) -> tuple[int, str]:
    """Number and key of an `ASK_KEY` payload. Raises FrameError."""
    return _decoded(_asked_key_decoder, payload, "a question for a key")


def refuse_frame(stream_id: int, refusal: Refusal) -> bytes:
    """An engine's no."""
    return frame(Kind.REFUSE, _extras_encoder.encode(Refused(stream_id, refusal)))


def read_refused(payload: bytes) -> Refused:
    """The no of a `REFUSE` payload. Raises FrameError."""
    return _decoded(_refused_decoder, payload, "a refusal")


def blocks_frame(events: BlockEvents) -> bytes:
    """Block events; keep them below 500,000 keys, or they are more than a frame may hold."""
    stored, evicted = b"".join(events.stored), b"".join(events.evicted)
    return frame(
        Kind.BLOCKS, _extras_encoder.encode(Blocks(events.sequence, stored, evicted, events.is_reset))
    )


def read_blocks(payload: bytes) -> BlockEvents:
    """The events of a `BLOCKS` payload. Raises FrameError."""
    blocks = _decoded(_blocks_decoder, payload, "block events")
    return BlockEvents(blocks.sequence, _keys(blocks.stored), _keys(blocks.evicted), blocks.is_reset)


def _keys(joined: bytes) -> list[bytes]:
    if len(joined) % DIGEST_BYTES:
        raise FrameError(f"block keys of {len(joined)} bytes are no multiple of {DIGEST_BYTES}")
    return [joined[start : start + DIGEST_BYTES] for start in range(0, len(joined), DIGEST_BYTES)]


def _decoded(decoder: msgspec.msgpack.Decoder[_Read], payload: bytes, what: str) -> _Read:
    try:
        return decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FrameError(f"{what} can't be read: {type(error).__name__}") from error


def status_frame(status: Status) -> bytes:
    """A heart-beat frame."""
    return frame(Kind.STATUS, _extras_encoder.encode(status))


def read_status(payload: bytes) -> Status:
    """The heart-beat of a `STATUS` payload.

    Raises:
        FrameError: the payload is not what `status_frame` writes.
    """
    return _decoded(_status_decoder, payload, "a status payload")


class FrameReader:
    """Cuts a byte stream into frames. `max_payload` may be raised once a peer has proved itself."""

    def __init__(self, max_payload: int = MAX_PAYLOAD_BYTES) -> None:
        self.max_payload = max_payload
        self._rest = b""

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """The (kind, payload) pairs completed by `data`, in order.

        Raises:
            FrameError: another version, or a payload over the limit. The stream can't be read any further.
        """
        if self._rest:
            data = self._rest + data
        out: list[tuple[int, bytes]] = []
        position, end = 0, len(data)
        while end - position >= HEADER.size:
            version, kind, _, length = HEADER.unpack_from(data, position)
            if version != VERSION:
                raise FrameError(f"the peer sent frame version {version}; this side speaks {VERSION}")
            if length > self.max_payload:
                raise FrameError(f"the peer sent a payload of {length} bytes; at most {self.max_payload} go")
            start = position + HEADER.size
            if start + length > end:
                break
            out.append((kind, data[start : start + length]))
            position = start + length
        self._rest = data[position:]
        return out
