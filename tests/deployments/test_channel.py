"""The token channel between a gateway and engine replicas, over real sockets, with a scripted engine side."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from footplate.deployments.channel import frames
from footplate.deployments.channel.address import ChannelAddress
from footplate.deployments.channel.frames import Kind, Status
from footplate.deployments.channel.handshake import Dialer, Doorkeeper
from footplate.deployments.channel.hub import EngineLink, HubLimits, TokenHub, TokenStream
from footplate.deployments.channel.outlet import Delivery, OutletLimits, TokenOutlet
from footplate.deployments.errors import ChannelError, ChannelRefused
from footplate.engine.errors import EngineDead
from footplate.engine.types import EngineRequest, EngineStats, FinishReason, SequenceDelta, TokenLogprob
from footplate.routing.types import BlockEvents

KEY = b"k" * 32
DEADLINE_S = 5.0


def asynchronous(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run an async test on a loop of its own, with a deadline."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        async def limited() -> None:
            async with asyncio.timeout(DEADLINE_S):
                await test(*args, **kwargs)

        asyncio.run(limited())

    return run


async def until(claim: Callable[[], object]) -> None:
    """Give the loop turns until the claim holds; the test's deadline ends it otherwise."""
    while not claim():
        await asyncio.sleep(0.001)


class Clock:
    """A clock that moves when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Listener:
    """Notes what it is told of links."""

    told: list[str]

    def heard(self, link: EngineLink, status: Status) -> None:
        self.told.append("leaving" if status.is_leaving else "heard")

    def blocks_changed(self, link: EngineLink, events: BlockEvents) -> None: ...

    def quiet(self, link: EngineLink) -> None:
        self.told.append("quiet")

    def lost(self, link: EngineLink) -> None:
        self.told.append("lost")


class Pair:
    """A hub and an outlet that talk over one socket; `aborts` and `cuts` are what the engine was told."""

    def __init__(self, hub: TokenHub) -> None:
        self.hub = hub
        self.submits: list[EngineRequest] = []
        self.aborts: list[tuple[str, int | None]] = []
        self.cuts: list[tuple[str, int, int]] = []
        self.engine_age_s = 0.0
        self.outlet = self.new_outlet()

    def new_outlet(self, key: bytes = KEY, **limits: Any) -> TokenOutlet:
        return TokenOutlet(
            key,
            label=("m", "0"),
            submit=self.submits.append,
            abort=lambda request_id, index: self.aborts.append((request_id, index)),
            cut=lambda *cut: self.cuts.append(cut),
            status=lambda: Status(self.engine_age_s, EngineStats(running=7)),
            limits=OutletLimits(status_every_s=0.01, **limits),
        )

    async def request(self, request_id: str = "r", num_choices: int = 1) -> tuple[TokenStream, Delivery]:
        stream = self.hub.open(request_id, num_choices)
        link = await self.outlet.link(self.hub.address)
        delivery = self.outlet.open(link, stream.stream_id, request_id, num_choices)
        self.outlet.accept(delivery)
        await stream.accepted
        return stream, delivery


@asynccontextmanager
async def connected(
    tmp_path: Path, clock: Callable[[], float] | None = None, address: str = "", **limits: Any
) -> AsyncIterator[Pair]:
    hub = TokenHub(KEY, HubLimits(**limits), **({"clock": clock} if clock else {}))
    await hub.start(address or f"unix:{tmp_path}/hub.sock")
    pair = Pair(hub)
    try:
        yield pair
    finally:
        await pair.outlet.close()
        await hub.close()
        await until(lambda: not hub.links)


def token(request_id: str, *ids: int, index: int = 0, finish: FinishReason | None = None) -> SequenceDelta:
    return SequenceDelta(request_id, index, ids, None, finish)


@pytest.mark.parametrize("address", ["", "tcp:127.0.0.1:0"])
@asynchronous
async def test_tokens_arrive_whole_and_in_order(tmp_path: Path, address: str) -> None:
    async with connected(tmp_path, address=address) as pair:
        stream, delivery = await pair.request()
        for value in range(50):
            pair.outlet.deliver([token("r", value, value + 1)])
        pair.outlet.deliver([token("r", finish=FinishReason.STOP)])
        got: list[SequenceDelta] = []
        while batch := await stream.next():
            got += batch
        assert [delta.token_ids for delta in got] == [(v, v + 1) for v in range(50)] + [()]
        assert got[-1].finish_reason is FinishReason.STOP
        assert await delivery.done
        assert pair.aborts == []


@asynchronous
async def test_all_streams_of_one_step_travel_in_one_message(tmp_path: Path) -> None:
    async with connected(tmp_path) as pair:
        streams = [(await pair.request(f"r{i}"))[0] for i in range(8)]
        link = await pair.outlet.link(pair.hub.address)
        writes: list[bytes] = []
        link.write = writes.append  # type: ignore[method-assign]
        pair.outlet.deliver([token(f"r{i}", i) for i in range(8)])
        await until(lambda: any(message[1] == Kind.TOKENS for message in writes))
        assert sum(message[1] == Kind.TOKENS for message in writes) == 1
        del link.write
        assert len(streams) == 8


@asynchronous
async def test_a_lagging_reader_gets_everything_pending_at_once(tmp_path: Path) -> None:
    async with connected(tmp_path) as pair:
        stream, _ = await pair.request()
        for value in range(5):
            pair.outlet.deliver([token("r", value)])
        await until(lambda: len(stream._pending) == 5)
        assert [delta.token_ids[0] for delta in await stream.next()] == list(range(5))


@asynchronous
async def test_log_probabilities_and_errors_keep_their_place_among_plain_tokens(tmp_path: Path) -> None:
    async with connected(tmp_path) as pair:
        stream, _ = await pair.request()
        sent = [
            SequenceDelta("r", 0, (1,), (TokenLogprob(1, -0.5, 1, ((1, -0.5),)),), cached_tokens=16),
            token("r", 2),
            SequenceDelta("r", 0, (), None, FinishReason.ERROR, error="the step failed"),
        ]
        for delta in sent:
            pair.outlet.deliver([delta])
        got: list[SequenceDelta] = []
        while batch := await stream.next():
            got += batch
        assert got == sent


@asynchronous
async def test_tokens_may_be_delivered_from_the_engines_thread(tmp_path: Path) -> None:
    async with connected(tmp_path) as pair:
        stream, _ = await pair.request()

        def engine() -> None:
            for value in range(2000):
                pair.outlet.deliver([token("r", value)])
            pair.outlet.deliver([token("r", finish=FinishReason.LENGTH)])

        thread = threading.Thread(target=engine)
        thread.start()
        got: list[int] = []
        while batch := await stream.next():
            got += [value for delta in batch for value in delta.token_ids]
        thread.join()
        assert got == list(range(2000))


@asynchronous
async def test_closing_a_stream_aborts_it_at_the_engine(tmp_path: Path) -> None:
    async with connected(tmp_path) as pair:
        stream, delivery = await pair.request()
        stream.close()
        stream.close()
        assert not await delivery.done
        assert pair.aborts == [("r", None)]
        assert await stream.next() == ()


@asynchronous
async def test_stopping_one_choice_leaves_the_others_running(tmp_path: Path) -> None:
    async with connected(tmp_path) as pair:
        stream, delivery = await pair.request(num_choices=2)
        stream.stop(1, 0)
        await until(lambda: pair.aborts == [("r", 1)])
        pair.outlet.deliver([token("r", 5, index=1), token("r", 6, index=0, finish=FinishReason.STOP)])
        assert [delta.token_ids for delta in await stream.next()] == [(6,)]
        assert await stream.next() == ()
        assert await delivery.done


@asynchronous
async def test_a_cancelled_stream_has_all_that_was_made_until_the_engine_heard_of_it(tmp_path: Path) -> None:
    """And not a token more, whatever the engine still had in flight."""
    async with connected(tmp_path) as pair:
        stream, delivery = await pair.request(num_choices=2)
        pair.outlet.deliver([token("r", 1), token("r", 2, index=1)])
        assert [delta.token_ids for delta in await stream.next()] == [(1,), (2,)]
        # On its way while the client leaves.
        pair.outlet.deliver([token("r", 3), token("r", 4, index=1, finish=FinishReason.STOP)])
        last = await stream.cancel()
        assert last is not None and [delta.token_ids for delta in last] == [(3,), (4,)]
        assert not await delivery.done
        assert pair.aborts == [("r", None)]
        assert pair.cuts == [("r", 0, 2)], "the other choice had ended by itself"
        pair.outlet.deliver([token("r", 5)])
        assert await stream.next() == ()
        assert await stream.cancel() == []


@asynchronous
async def test_nobody_says_what_was_made_when_the_engine_is_gone_or_silent(tmp_path: Path) -> None:
    async with connected(tmp_path, cancel_s=0.05) as pair:
        gone, _ = await pair.request("gone")
        silent, _ = await pair.request("silent")
        gone.fail(EngineDead("killed"))
        assert await gone.cancel() is None
        assert silent.link is not None
        pair.hub.send_abort = lambda stream: None  # type: ignore[method-assign]
        assert await silent.cancel() is None


@asynchronous
async def test_the_engine_hears_how_much_of_a_choice_counts_also_after_it_ended_it(tmp_path: Path) -> None:
    async with connected(tmp_path) as pair:
        stream, _ = await pair.request()
        pair.outlet.deliver([token("r", 1), token("r", 2, finish=FinishReason.LENGTH)])
        await stream.next()
        stream.stop(0, 1)
        await until(lambda: pair.cuts == [("r", 0, 1)])
        assert pair.aborts == []


@asynchronous
async def test_a_gateway_that_is_lost_counts_as_far_as_tokens_were_sent(tmp_path: Path) -> None:
    async with connected(tmp_path) as pair:
        stream, delivery = await pair.request()
        pair.outlet.deliver([token("r", 1), token("r", 2)])
        await stream.next()
        assert stream.link is not None
        stream.link.drop()
        assert not await delivery.done
        assert pair.cuts == [("r", 0, 2)]


@asynchronous
async def test_a_stream_given_up_before_acceptance_is_aborted_when_it_is_accepted(tmp_path: Path) -> None:
    async with connected(tmp_path) as pair:
        stream = pair.hub.open("r")
        stream.close()
        link = await pair.outlet.link(pair.hub.address)
        delivery = pair.outlet.open(link, stream.stream_id, "r", 1)
        pair.outlet.accept(delivery)
        await delivery.done
        assert pair.aborts == [("r", None)]


@asynchronous
async def test_a_reader_that_never_reads_is_aborted_at_the_bound(tmp_path: Path) -> None:
    async with connected(tmp_path, max_pending_entries=10) as pair:
        stream, delivery = await pair.request()
        for value in range(11):
            pair.outlet.deliver([token("r", value)])
        await delivery.done
        assert pair.aborts == [("r", None)]
        assert [delta.finish_reason for delta in await stream.next()] == [FinishReason.ABORT]
        assert pair.hub.num_overflows == 1


@asynchronous
async def test_what_waits_for_a_reader_is_bounded_by_its_size_not_by_its_tokens(tmp_path: Path) -> None:
    """Candidates of logprobs weigh as much as tokens, and what was read counts no more."""
    entry = TokenLogprob(1, -0.5, 1, tuple((other, -1.0) for other in range(20)))
    heavy = SequenceDelta("r", 0, (1,), (entry,))
    async with connected(tmp_path, max_pending_entries=50) as pair:
        stream, delivery = await pair.request()
        for _ in range(3):
            pair.outlet.deliver([heavy, heavy])
            num_read = 0
            while num_read < 2:
                num_read += len(await stream.next())
        assert not delivery.done.done()
        pair.outlet.deliver([heavy, heavy, heavy])
        await delivery.done
        assert pair.aborts == [("r", None)]


@asynchronous
async def test_a_gateway_that_does_not_read_gets_its_requests_aborted(tmp_path: Path) -> None:
    async with connected(tmp_path) as pair:
        pair.outlet = pair.new_outlet(max_unsent_bytes=100_000)
        _, delivery = await pair.request()
        (link,) = [link for link in pair.hub.links if link.is_trusted]
        assert link._transport is not None
        link._transport.pause_reading()
        # Kernel buffers take a few hundred kB before the process holds anything itself.
        ids = tuple(range(20_000))
        while not delivery.done.done():
            pair.outlet.deliver([token("r", *ids)])
            await asyncio.sleep(0)
        assert not delivery.done.result()
        assert pair.aborts == [("r", None)]
        link._transport.resume_reading()


@asynchronous
async def test_a_lost_replica_fails_its_streams_after_what_had_arrived(tmp_path: Path) -> None:
    async with connected(tmp_path) as pair:
        stream, _ = await pair.request()
        pair.outlet.deliver([token("r", 1)])
        await until(lambda: stream._pending)
        await pair.outlet.close()
        await until(lambda: stream.failure)
        assert [delta.token_ids for delta in await stream.next()] == [(1,)]
        with pytest.raises(EngineDead, match="lost"):
            await stream.next()


@asynchronous
async def test_a_lost_gateway_aborts_its_requests(tmp_path: Path) -> None:
    async with connected(tmp_path) as pair:
        _, delivery = await pair.request()
        await pair.hub.close()
        assert not await delivery.done
        assert pair.aborts == [("r", None)]


@asynchronous
async def test_a_replica_that_owes_tokens_and_falls_silent_is_given_up(tmp_path: Path) -> None:
    clock = Clock()
    async with connected(tmp_path, clock, silence_s=5.0, check_every_s=3600) as pair:
        stream, _ = await pair.request()
        assert pair.outlet._beat is not None
        pair.outlet._beat.cancel()
        (link,) = pair.hub.links
        link.heard_at = clock.now
        clock.now += 4.9
        pair.hub.check()
        assert stream.failure is None
        clock.now += 0.2
        pair.hub.check()
        with pytest.raises(EngineDead, match="silent"):
            await stream.next()


@asynchronous
async def test_heart_beats_keep_a_long_prefill_alive(tmp_path: Path) -> None:
    clock = Clock()
    async with connected(tmp_path, clock, silence_s=5.0, check_every_s=3600) as pair:
        stream, _ = await pair.request()
        (link,) = pair.hub.links
        for _ in range(5):
            clock.now += 4.0
            await until(lambda: link.heard_at == clock.now)
            pair.hub.check()
        assert stream.failure is None


@asynchronous
async def test_a_silent_replica_is_passed_over_and_given_up_though_it_owes_nothing(tmp_path: Path) -> None:
    """Its node may be gone: nobody tells, and nothing is ever written there that could fail."""
    clock = Clock()
    limits = {"quiet_s": 1.5, "silence_s": 5.0, "check_every_s": 3600}
    async with connected(tmp_path, clock, **limits) as pair:
        told: list[str] = []
        pair.hub.listener = Listener(told)
        await pair.outlet.link(pair.hub.address)
        assert pair.outlet._beat is not None
        pair.outlet._beat.cancel()
        (link,) = pair.hub.links
        link.heard_at = clock.now
        for seconds, words in ((1.4, []), (0.2, ["quiet"]), (3.3, ["quiet"] * 2)):
            clock.now += seconds
            pair.hub.check()
            assert [word for word in told if word == "quiet"] == words
        clock.now += 0.2
        pair.hub.check()
        await until(lambda: not pair.hub.links)
        assert told[-1] == "lost"


@asynchronous
async def test_a_gateway_that_was_held_up_itself_blames_no_replica(tmp_path: Path) -> None:
    async with connected(tmp_path, silence_s=0.3, check_every_s=0.02) as pair:
        stream, _ = await pair.request()
        for _ in range(3):
            time.sleep(0.4)
            await asyncio.sleep(0.05)
        assert stream.failure is None
        assert len(pair.hub.links) == 1


@asynchronous
async def test_a_stuck_step_loop_behind_a_live_replica_is_a_fault(tmp_path: Path) -> None:
    async with connected(tmp_path, stuck_s=60.0, check_every_s=3600) as pair:
        stream, _ = await pair.request()
        pair.engine_age_s = 61.0
        await until(lambda: all(link.status and link.status.engine_age_s > 60 for link in pair.hub.links))
        pair.hub.check()
        with pytest.raises(EngineDead, match="made no step"):
            await stream.next()


@asynchronous
async def test_a_replica_that_leaves_says_so_and_one_that_has_ended_comes_back_no_more(
    tmp_path: Path,
) -> None:
    async with connected(tmp_path) as pair:
        told: list[str] = []
        pair.hub.listener = Listener(told)
        stream, delivery = await pair.request()
        pair.outlet.leave()
        await until(lambda: "leaving" in told)
        pair.outlet.deliver([token("r", 1)])
        assert (await stream.next())[0].token_ids == (1,)
        await pair.outlet.close()
        assert not await delivery.done
        with pytest.raises(EngineDead):
            await stream.next()
        with pytest.raises(ChannelError, match="has ended"):
            await pair.outlet.link(pair.hub.address)


@asynchronous
async def test_statistics_are_pushed_labelled_by_engine(tmp_path: Path) -> None:
    async with connected(tmp_path) as pair:
        await pair.outlet.link(pair.hub.address)
        await until(pair.hub.stats)
        assert pair.hub.stats() == {("m", "0"): EngineStats(running=7)}


@asynchronous
async def test_a_wrong_key_is_refused_by_both_ends(tmp_path: Path) -> None:
    async with connected(tmp_path) as pair:
        stranger = pair.new_outlet(key=b"x" * 32)
        with pytest.raises(ChannelRefused, match="channel key"):
            await stranger.link(pair.hub.address)
        assert pair.hub.stats() == {}


@asynchronous
async def test_frames_before_the_proof_close_the_connection(tmp_path: Path) -> None:
    async with connected(tmp_path) as pair:
        stream = pair.hub.open("r")
        reader, writer = await asyncio.open_unix_connection(pair.hub.address.removeprefix("unix:"))
        writer.write(frames.word_frame(Kind.ACCEPT, [stream.stream_id]))
        assert await reader.read() == b""
        assert (pair.hub.num_refused, stream.link) == (1, None)
        writer.close()


@asynchronous
async def test_a_peer_that_never_proves_itself_is_dropped(tmp_path: Path) -> None:
    clock = Clock()
    async with connected(tmp_path, clock, handshake_s=5.0, check_every_s=3600) as pair:
        reader, writer = await asyncio.open_unix_connection(pair.hub.address.removeprefix("unix:"))
        await until(lambda: pair.hub.links)
        clock.now += 5.1
        pair.hub.check()
        assert await reader.read() == b""
        writer.close()


@asynchronous
async def test_an_address_where_nobody_listens_is_an_error_at_once(tmp_path: Path) -> None:
    async with connected(tmp_path) as pair:
        with pytest.raises(ChannelError, match="no gateway answers"):
            await pair.outlet.link(f"unix:{tmp_path}/nobody.sock")


@asynchronous
async def test_many_requests_at_once_share_one_connection(tmp_path: Path) -> None:
    async with connected(tmp_path) as pair:
        await asyncio.gather(*(pair.request(f"r{i}") for i in range(20)))
        assert len(pair.hub.links) == 1


def test_a_proof_for_one_label_does_not_serve_another() -> None:
    doorkeeper = Doorkeeper(KEY)
    dialer, other = Dialer(KEY, "m", "0"), Dialer(KEY, "m", "1")
    _, challenge = doorkeeper.challenge(dialer.hello)
    with pytest.raises(ChannelRefused):
        other.prove(challenge)
    doorkeeper.check(dialer.prove(challenge))
    with pytest.raises(ChannelRefused):
        doorkeeper.check(b"\0" * 32)


@pytest.mark.parametrize(
    "text", ["", "unix:", "tcp:localhost", "tcp::80", "http://x:1", "unix:/" + "a" * 120]
)
def test_a_bad_address_is_refused(text: str) -> None:
    with pytest.raises(ChannelError):
        ChannelAddress.parse(text)


@pytest.mark.parametrize("text", ["unix:/run/a.sock", "tcp:127.0.0.1:80", "tcp:[::1]:80"])
def test_an_address_reads_back_as_written(text: str) -> None:
    assert str(ChannelAddress.parse(text)) == text
