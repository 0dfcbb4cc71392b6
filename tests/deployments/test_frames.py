"""Frames say what they were given to say, however the bytes are cut, and refuse what they can't read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from footplate.deployments.channel import frames
from footplate.deployments.channel.frames import FINISH_CODES, FrameReader, Kind, Status
from footplate.deployments.errors import FrameError
from footplate.engine.types import EngineStats, FinishReason, SequenceDelta, TokenLogprob

words = st.lists(st.integers(0, 2**32 - 1), max_size=60)
plain_deltas = st.builds(
    SequenceDelta,
    request_id=st.just("r"),
    index=st.integers(0, 2**16),
    token_ids=st.lists(st.integers(0, 2**32 - 1), max_size=5).map(tuple),
    finish_reason=st.sampled_from(FINISH_CODES),
)
logprobs = st.builds(
    TokenLogprob,
    token_id=st.integers(0, 2**20),
    logprob=st.floats(max_value=0, allow_nan=False),
    rank=st.integers(1, 100),
    top=st.lists(st.tuples(st.integers(0, 2**20), st.floats(max_value=0, allow_nan=False)), max_size=3).map(
        tuple
    ),
)
rich_deltas = st.builds(
    SequenceDelta,
    request_id=st.just("r"),
    index=st.integers(0, 8),
    token_ids=st.lists(st.integers(0, 2**20), max_size=3).map(tuple),
    logprobs=st.none() | st.lists(logprobs, max_size=3).map(tuple),
    finish_reason=st.sampled_from(FINISH_CODES),
    cached_tokens=st.integers(0, 10_000),
    prompt_logprobs=st.none() | st.lists(st.none() | logprobs, max_size=3).map(tuple),
    error=st.none() | st.text(max_size=20),
)


@given(words)
def test_words_come_back_as_they_were(given_words: list[int]) -> None:
    ((kind, payload),) = FrameReader().feed(frames.word_frame(Kind.TOKENS, given_words))
    assert kind == Kind.TOKENS
    assert frames.read_words(payload) == given_words


@given(st.lists(st.tuples(st.integers(1, 2**32 - 1), plain_deltas), max_size=8))
def test_token_entries_follow_the_stated_layout(entries: list[tuple[int, SequenceDelta]]) -> None:
    encoded: list[int] = []
    for stream_id, delta in entries:
        assert frames.is_plain(delta)
        frames.append_tokens(encoded, stream_id, delta)
    position = 0
    for stream_id, delta in entries:
        head, count = encoded[position + 1], encoded[position + 2]
        assert encoded[position] == stream_id
        assert (head >> 8, FINISH_CODES[head & 0xFF]) == (delta.index, delta.finish_reason)
        assert tuple(encoded[position + 3 : position + 3 + count]) == delta.token_ids
        position += 3 + count
    assert position == len(encoded)


@given(st.lists(st.tuples(st.integers(1, 2**32 - 1), rich_deltas), max_size=4))
def test_extras_come_back_equal(entries: list[tuple[int, SequenceDelta]]) -> None:
    ((kind, payload),) = FrameReader().feed(frames.extras_frame(entries))
    assert kind == Kind.EXTRAS
    assert frames.read_extras(payload) == entries


@given(st.lists(st.binary(max_size=40), max_size=6), st.integers(1, 17))
def test_frames_survive_any_cut_of_the_stream(payloads: list[bytes], step: int) -> None:
    stream = b"".join(frames.frame(Kind.EXTRAS, payload) for payload in payloads)
    reader = FrameReader()
    out = [pair for cut in range(0, len(stream), step) for pair in reader.feed(stream[cut : cut + step])]
    assert out == [(Kind.EXTRAS, payload) for payload in payloads]


def test_a_status_comes_back_equal() -> None:
    status = Status(0.25, EngineStats(running=3, steps=9, finished={"stop": 2}))
    ((_, payload),) = FrameReader().feed(frames.status_frame(status))
    assert frames.read_status(payload) == status


def test_minus_infinity_survives() -> None:
    delta = SequenceDelta("r", 0, (1,), (TokenLogprob(1, float("-inf"), 9),))
    ((_, payload),) = FrameReader().feed(frames.extras_frame([(1, delta)]))
    assert frames.read_extras(payload) == [(1, delta)]


def test_another_version_is_refused() -> None:
    with pytest.raises(FrameError, match="version 9"):
        FrameReader().feed(b"\x09" + frames.frame(Kind.STATUS)[1:])


def test_a_payload_over_the_limit_is_refused_before_it_is_read() -> None:
    header = frames.HEADER.pack(frames.VERSION, Kind.EXTRAS, 0, 1025)
    with pytest.raises(FrameError, match="1025 bytes"):
        FrameReader(max_payload=1024).feed(header)


@given(st.binary(max_size=64))
def test_rubbish_in_a_payload_gives_a_frame_error_or_a_value(payload: bytes) -> None:
    for read in (frames.read_extras, frames.read_status, frames.read_words):
        try:
            read(payload)
        except FrameError:
            continue


def test_finish_codes_keep_their_place_on_the_wire() -> None:
    # These numbers travel between versions; a new reason goes to the end.
    assert [frames.CODE_OF[reason] for reason in (None, *FinishReason)] == [0, 1, 2, 3, 4]
