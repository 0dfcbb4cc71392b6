"""What an engine hears of how much counts: by choice, once, and never of a choice that is none."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from footplate.deployments.channel import frames
from footplate.deployments.channel.frames import Kind
from footplate.deployments.channel.outlet import OutletLimits
from footplate.engine.types import FinishReason, TokenLogprob
from tests.deployments.test_channel import Pair, asynchronous, connected, token, until


@asynchronous
async def test_given_up_choices_count_as_far_as_they_were_sent_and_stopped_ones_as_was_said(
    tmp_path: Path,
) -> None:
    async with connected(tmp_path) as pair:
        stream, delivery = await pair.request(num_choices=4)
        with_extras = token("r", 7, 8, index=3)
        with_extras.logprobs = (TokenLogprob(7, -1.0, 1), TokenLogprob(8, -1.0, 1))
        pair.outlet.deliver([token("r", 1, 2, 3), token("r", 4, index=1), token("r", 5, 6, index=2)])
        pair.outlet.deliver([with_extras, token("r", index=2, finish=FinishReason.LENGTH)])
        await until(lambda: delivery.num_sent == [3, 1, 2, 2])
        stream.stop(0, 1)
        await until(lambda: pair.cuts == [("r", 0, 1)])
        # The engine had one more on its way: nobody gets it, and it doesn't count.
        pair.outlet.deliver([token("r", 9)])
        assert stream.link is not None
        stream.link.drop()
        assert not await delivery.done
        assert pair.cuts[1:] == [("r", 1, 1), ("r", 3, 2)], "what had ended or was stopped stays as it is"
        assert pair.aborts == [("r", 0), ("r", None)]


@asynchronous
async def test_an_abort_is_answered_behind_all_tokens_also_when_all_had_ended(tmp_path: Path) -> None:
    async with connected(tmp_path) as pair:
        stream, delivery = await pair.request()
        # Delivered, and not yet flushed when the abort is read.
        pair.outlet.deliver([token("r", 1)])
        pair.outlet.deliver([token("r", 2, finish=FinishReason.STOP)])
        pair.outlet.abort_stream(delivery.link, stream.stream_id)
        assert await delivery.done
        got = [delta for _ in range(2) for delta in await stream.next()]
        assert [delta.token_ids for delta in got] == [(1,), (2,)]
        assert (pair.cuts, pair.aborts) == ([], [])


@asynchronous
async def test_a_cancelled_stream_ends_once_whoever_else_waits_for_it(tmp_path: Path) -> None:
    async with connected(tmp_path) as pair:
        stream, delivery = await pair.request()
        reader = asyncio.create_task(stream.next())
        await asyncio.sleep(0)
        assert await stream.cancel() == []
        assert await reader == ()
        stream.close()
        assert await stream.cancel() == []
        assert not await delivery.done
        assert (pair.cuts, pair.aborts) == ([("r", 0, 0)], [("r", None)])


@asynchronous
@pytest.mark.parametrize("has_ended", [False, True])
async def test_what_was_made_for_nobody_counts_for_nothing(tmp_path: Path, has_ended: bool) -> None:
    async with connected(tmp_path) as pair:
        # It leaves between the engine's yes and the first look at what came.
        stream, delivery = await pair.request(num_choices=2)
        finish = FinishReason.STOP if has_ended else None
        pair.outlet.deliver([token("r", 1, 2, finish=finish), token("r", 3, index=1)])
        await until(lambda: delivery.num_sent == [2, 1])
        stream.discard()
        await until(lambda: delivery.done.done())
        assert pair.cuts == [("r", 0, 0), ("r", 1, 0)]
        # It has left before the engine's yes.
        link = stream.link
        assert link is not None
        pair.cuts.clear()
        early = pair.hub.open("early", 2)
        link.asked[early.stream_id] = early
        early.discard()
        late = pair.outlet.open(delivery.link, early.stream_id, "early", 2)
        pair.outlet.accept(late)
        pair.outlet.deliver([token("early", 1, 2, finish=finish)])
        await until(lambda: len(pair.cuts) >= 2)
        assert pair.cuts == [("early", 0, 0), ("early", 1, 0)]
        assert late.done.done() and not link.asked


@asynchronous
async def test_words_about_streams_and_choices_that_are_none_do_nothing(tmp_path: Path) -> None:
    async with connected(tmp_path) as pair:
        stream, delivery = await pair.request()
        link = stream.link
        assert link is not None
        for words in ([stream.stream_id, 1, 0], [stream.stream_id, 2**32 - 1, 0], [999, 0, 0]):
            link.write(frames.word_frame(Kind.STOP, words))
        link.write(frames.word_frame(Kind.STOP, [stream.stream_id, 0]))  # a third of it is missing
        link.write(frames.word_frame(Kind.STOP, [stream.stream_id, 0, 5, stream.stream_id]))
        await until(lambda: pair.cuts)
        assert pair.cuts == [("r", 0, 5)]
        # An engine's word on the end of a stream that it does not have.
        other, _ = await pair.request("other")
        delivery.link.write(frames.word_frame(Kind.ENDED, [12345]))
        pair.outlet.deliver([token("other", 1)])
        assert [delta.token_ids for delta in await other.next()] == [(1,)]


@asynchronous
async def test_only_so_many_ended_requests_are_remembered(tmp_path: Path) -> None:
    async with connected(tmp_path) as pair:
        pair.outlet.limits = OutletLimits(max_ended=2)
        streams = []
        for number in range(3):
            stream, delivery = await pair.request(f"r{number}")
            pair.outlet.deliver([token(f"r{number}", 1, 2, finish=FinishReason.LENGTH)])
            assert await delivery.done
            await stream.next()
            streams.append(stream)
        for stream in streams:
            stream.stop(0, 1)
        await until(lambda: len(pair.cuts) == 2)
        assert pair.cuts == [("r1", 0, 1), ("r2", 0, 1)]


@asynchronous
async def test_a_stream_that_no_engine_has_taken_tells_nobody(tmp_path: Path) -> None:
    async with connected(tmp_path) as pair:
        stream = pair.hub.open("r", 2)
        stream.stop(1, 0)
        stream.stop(0, 0)
        assert stream.is_finished and await stream.next() == ()
        await settle(pair)
        assert (pair.cuts, pair.aborts) == ([], [])


async def settle(pair: Pair) -> None:
    """One request there and back: what was sent before it has arrived."""
    await pair.request("after")


@pytest.mark.parametrize("words", [[3, 0, 0], [3, 255, 2**32 - 1], [1, 0, 7, 2, 1, 0]])
def test_the_frame_of_a_stop_is_three_words_for_each_choice(words: list[int]) -> None:
    message = frames.word_frame(Kind.STOP, words)
    [(kind, payload)] = frames.FrameReader().feed(message)
    assert (kind, frames.read_words(payload)) == (Kind.STOP, words)
    assert len(message) == frames.HEADER.size + 4 * len(words)
