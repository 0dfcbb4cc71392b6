"""The gateway's end of the token channel: one listener, one link per engine replica, one stream per request.

Owned by one event loop; nothing here is safe from another thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from footplate.deployments.channel import frames
from footplate.deployments.channel.address import ChannelAddress, listen
from footplate.deployments.channel.frames import FINISH_CODES, FrameReader, Kind, Status
from footplate.deployments.channel.handshake import MAX_HANDSHAKE_BYTES, Doorkeeper, Hello
from footplate.deployments.errors import ChannelError, ChannelRefused, FrameError
from footplate.deployments.sparse_lines import SparseLines
from footplate.engine.errors import EngineDead, EngineError
from footplate.engine.types import EngineRequest, EngineStats, FinishReason, SequenceDelta
from footplate.platform.ports import EngineBegin
from footplate.routing.types import BlockEvents

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HubLimits:
    """Bounds of the gateway's end. Times in seconds."""

    # Of one stream whose reader lags, deltas and candidates of logprobs together, at about 200 bytes each;
    # then it is aborted.
    max_pending_entries: int = 16_384
    handshake_s: float = 5.0
    # No frame at all, where a heart-beat comes twice a second: others are asked, then it is given up. It may
    # be frozen, or its node gone, of which nobody tells.
    quiet_s: float = 1.5
    silence_s: float = 5.0
    stuck_s: float = 60.0  # the replica answers, but its step loop gave no sign of life for so long
    check_every_s: float = 0.25
    cancel_s: float = 2.0  # for an engine's word on what it had made of an aborted request
    # A reader is woken at most this often: a first token and all slower ones pass at once, faster ones share
    # a write. Each write costs trips through the kernel here and in the proxy, more than all else together.
    min_wake_gap_s: float = 0.010


class TokenStream:
    """The tokens of one request as they arrive. Made by `TokenHub.open`; one reader at a time."""

    __slots__ = (
        "_ended",
        "_hub",
        "_num_pending",
        "_open",
        "_pending",
        "_waiter",
        "_woken_at",
        "accepted",
        "begun",
        "failure",
        "link",
        "num_choices",
        "request_id",
        "stream_id",
    )

    def __init__(self, hub: TokenHub, stream_id: int, request_id: str, num_choices: int) -> None:
        self._hub = hub
        self.num_choices = num_choices
        self._open = set(range(num_choices))
        self._pending: list[SequenceDelta] = []
        self._num_pending = 0  # entries, as the limit counts them
        self._waiter: asyncio.Future[None] | None = None
        self._ended: asyncio.Future[None] | None = None
        self._woken_at = float("-inf")
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.failure: EngineError | None = None
        self.link: EngineLink | None = None
        self.begun: EngineBegin | None = None
        self.request_id = request_id
        self.stream_id = stream_id

    @property
    def is_finished(self) -> bool:
        """Whether nothing more will come: every choice has ended, or the stream failed."""
        return not self._open or self.failure is not None

    async def next(self) -> Sequence[SequenceDelta]:
        """Wait for tokens, then give all that came since; empty when all choices have ended.

        Raises:
            EngineError: the stream failed; raised after what had arrived was given.
        """
        while not self._pending:
            if self.failure is not None:
                raise self.failure
            if not self._open:
                return ()
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        taken, self._pending = self._pending, []
        self._num_pending = 0
        return taken

    def stop(self, index: int, num_used: int) -> None:
        """End one choice at the engine; nothing further of it is given. It may have ended by itself."""
        self._hub.send_stop(self, index, num_used)
        if index in self._open:
            self._open.discard(index)
            self._pending = [delta for delta in self._pending if delta.index != index]
            self._settle()

    async def cancel(self) -> Sequence[SequenceDelta] | None:
        """Abort what runs; what was made until the engine heard of it. None: nobody says how much it is."""
        if not self.is_finished:
            self._hub.send_abort(self)
            self._ended = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(self._hub.limits.cancel_s):
                    await self._ended
            except TimeoutError:
                return None
        taken, self._pending = self._pending, []
        return None if self.failure is not None else taken

    def end_cancelled(self) -> None:
        """The engine has said all that it will."""
        self._open.clear()
        self._settle()

    def close(self) -> None:
        """Forget the stream and abort what still runs. Idempotent."""
        if not self.is_finished:
            self._hub.send_abort(self)
            self._open.clear()
        self._settle()

    def discard(self) -> None:
        """As `close`, of a stream that nobody has waited for: whatever was made of it counts for nothing."""
        if self.link is not None and not self.is_finished:
            self._hub.send_discard(self, self.link)
            self._open.clear()
        self.close()

    def fail(self, error: EngineError) -> None:
        """End the stream with an error, unless it has ended already."""
        if self.is_finished:
            return
        self.failure = error
        self._settle()

    def push(self, delta: SequenceDelta) -> None:
        """Take one delta of an engine step."""
        if delta.index not in self._open:
            return
        self._pending.append(delta)
        self._num_pending += 1
        if delta.logprobs is not None:
            self._num_pending += sum(1 + len(entry.top) for entry in delta.logprobs)
        if delta.finish_reason is not None:
            self._open.discard(delta.index)
            if not self._open:
                self._settle()
        elif self._num_pending > self._hub.limits.max_pending_entries:
            self._overflow()
        if self._waiter is not None and not self._hub.hold(self, self._woken_at):
            self.wake()

    def wake(self) -> None:
        """Let the reader have what is pending, if it waits."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            self._woken_at = self._hub.clock()
            waiter.set_result(None)

    def _overflow(self) -> None:
        # The reader doesn't read. What it has not taken is thrown away with the rest of the generation.
        self._hub.send_abort(self)
        self._hub.num_overflows += 1
        cut = FinishReason.ABORT
        self._pending = [SequenceDelta(self.request_id, i, finish_reason=cut) for i in sorted(self._open)]
        self._open.clear()
        self._settle()

    def _settle(self) -> None:
        """Leave the hub once finished, and wake whoever waits."""
        if not self.is_finished:
            return
        self._hub.forget(self)
        for waiting in (self.accepted, self._ended):
            if waiting is not None and not waiting.done():
                waiting.set_result(None)
        self.wake()


class LinkListener(Protocol):
    """Who wants to know what replicas tell of themselves. A replica's first word is its status."""

    def heard(self, link: EngineLink, status: Status) -> None:
        """A replica's statistics, as they have just come."""
        ...

    def blocks_changed(self, link: EngineLink, events: BlockEvents) -> None:
        """What its prefix cache has gained and lost."""
        ...

    def quiet(self, link: EngineLink) -> None:
        """Its heart-beats stay out; told again and again until they come or the link is lost."""
        ...

    def lost(self, link: EngineLink) -> None:
        """The connection is gone."""
        ...


class _Nobody:
    """Listens to nothing."""

    def heard(self, link: EngineLink, status: Status) -> None: ...

    def blocks_changed(self, link: EngineLink, events: BlockEvents) -> None: ...

    def quiet(self, link: EngineLink) -> None: ...

    def lost(self, link: EngineLink) -> None: ...


class EngineLink(asyncio.Protocol):
    """One engine replica's connection, from accept to loss."""

    def __init__(self, hub: TokenHub) -> None:
        self._hub = hub
        self._doorkeeper = Doorkeeper(hub.key)
        self._reader = FrameReader(MAX_HANDSHAKE_BYTES)
        self._transport: asyncio.Transport | None = None
        self._hello: Hello | None = None
        self.connected_at = hub.clock()
        self.heard_at = self.connected_at
        self.is_trusted = False
        self.status: Status | None = None
        self.streams: dict[int, TokenStream] = {}
        # Sent there and not answered yet.
        self.asked: dict[int, TokenStream] = {}

    @property
    def is_lost(self) -> bool:
        """Whether the connection is gone."""
        return self._transport is None

    @property
    def label(self) -> tuple[str, str]:
        """(model, engine index) of the peer."""
        return (self._hello.model, self._hello.engine) if self._hello else ("", "")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        self._transport = transport  # type: ignore[assignment]  # uvloop's transport is no subclass
        self._hub.links.add(self)

    def data_received(self, data: bytes) -> None:
        self.heard_at = self._hub.clock()
        try:
            for kind, payload in self._reader.feed(data):
                self._receive(kind, payload)
        except ChannelError as error:
            if isinstance(error, ChannelRefused):
                self._hub.num_refused += 1
            if self._hub.lines.is_due("closed", str(error)):
                logger.warning("token channel closed: %s", error)
            self.drop()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._hub.links.discard(self)
        if self.is_trusted:
            self._hub.listener.lost(self)
        model, engine = self.label
        self.fail_streams(f"the connection to replica {engine} of {model} was lost")

    def fail_streams(self, why: str) -> None:
        """End every stream this replica owes tokens."""
        streams = [*self.streams.values(), *self.asked.values()]
        self.streams, self.asked = {}, {}
        for stream in streams:
            stream.fail(EngineDead(why))

    def write(self, data: bytes) -> None:
        """Send one small frame to the engine, if the connection still stands."""
        if self._transport is not None:
            self._transport.write(data)

    def drop(self) -> None:
        """Close at once, without flushing."""
        if self._transport is not None:
            self._transport.abort()

    def _receive(self, kind: int, payload: bytes) -> None:
        if not self.is_trusted:
            self._shake_hands(kind, payload)
        elif kind == Kind.TOKENS:
            self._take_tokens(frames.read_words(payload))
        elif kind == Kind.EXTRAS:
            for stream_id, delta in frames.read_extras(payload):
                stream = self.streams.get(stream_id)
                if stream is not None:
                    delta.request_id = stream.request_id
                    stream.push(delta)
        elif kind in (Kind.ACCEPT, Kind.ENDED):
            for stream_id in frames.read_words(payload):
                self._note_stream(kind, stream_id)
        else:
            self._receive_other(kind, payload)

    def _receive_other(self, kind: int, payload: bytes) -> None:
        """What is no part of a stream that runs."""
        if kind == Kind.STATUS:
            self.status = frames.read_status(payload)
            self._hub.listener.heard(self, self.status)
        elif kind == Kind.BLOCKS:
            self._hub.listener.blocks_changed(self, frames.read_blocks(payload))
        elif kind == Kind.ASK_KEY:
            self._hub.judge_key(self, *frames.read_asked_key(payload))
        elif kind == Kind.BEGAN:
            stream_id, begun = frames.read_began(payload)
            if stream_id in self.streams:
                self.streams[stream_id].begun = begun
        elif kind == Kind.REFUSE:
            refused = frames.read_refused(payload)
            self._hub.refuse(refused.stream_id, self, refused.refusal.to_error())
        else:
            raise FrameError(f"an engine sent a frame of kind {kind}")

    def _note_stream(self, kind: int, stream_id: int) -> None:
        if kind == Kind.ACCEPT:
            self._hub.bind(stream_id, self)
        elif stream_id in self.streams:
            self.streams[stream_id].end_cancelled()

    def _shake_hands(self, kind: int, payload: bytes) -> None:
        if kind == Kind.HELLO:
            self._hello, challenge = self._doorkeeper.challenge(payload)
            self.write(frames.frame(Kind.CHALLENGE, challenge))
        elif kind == Kind.PROOF:
            self._doorkeeper.check(payload)
            self.is_trusted = True
            self._reader.max_payload = frames.MAX_PAYLOAD_BYTES
            self.write(frames.frame(Kind.WELCOME))
        else:
            raise ChannelRefused(f"the peer sent a frame of kind {kind} before it proved itself")

    def _take_tokens(self, words: list[int]) -> None:
        streams = self.streams
        position, end = 0, len(words)
        while position < end:
            if end - position < 3 or (first := position + 3) + words[position + 2] > end:
                raise FrameError("a token frame ends inside an entry")
            stream = streams.get(words[position])
            head = words[position + 1]
            position = first + words[position + 2]
            if stream is None:  # ended here before the engine heard of it
                continue
            if head & 0xFF >= len(FINISH_CODES):
                raise FrameError(f"a token frame has finish code {head & 0xFF}")
            token_ids = tuple(words[first:position])
            finish_reason = FINISH_CODES[head & 0xFF]
            stream.push(SequenceDelta(stream.request_id, head >> 8, token_ids, None, finish_reason))


class TokenHub:
    """Listens for engine replicas and hands their tokens to the streams of this gateway."""

    def __init__(
        self, key: bytes, limits: HubLimits | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.key = key
        self.limits = limits or HubLimits()
        self.clock = clock
        self.links: set[EngineLink] = set()
        self.address = ""
        self.num_refused = 0
        self.num_overflows = 0
        self._streams: dict[int, TokenStream] = {}
        self._next_id = 1
        self._server: asyncio.Server | None = None
        self._watch: asyncio.Task[None] | None = None
        self._held: set[TokenStream] = set()
        self.listener: LinkListener = _Nobody()
        # Whether a key may read metrics; None: nobody's may.
        self.key_judge: Callable[[str], Awaitable[bool]] | None = None
        # Scrapers and whoever dials come again and again.
        self.lines = SparseLines()
        self._judging: set[asyncio.Task[None]] = set()

    async def start(self, address: str) -> None:
        """Listen at `unix:/path` or `tcp:host:port`; `self.address` is then what engines dial."""
        wanted = ChannelAddress.parse(address)
        self._server = await listen(wanted, lambda: EngineLink(self))
        if wanted.host and not wanted.port:
            wanted = ChannelAddress(host=wanted.host, port=self._server.sockets[0].getsockname()[1])
        self.address = str(wanted)
        self._watch = asyncio.create_task(self._watch_links(), name="token-channel-watch")

    async def close(self) -> None:
        """Stop listening and drop every link; open streams fail."""
        if self._watch is not None:
            self._watch.cancel()
        if self._server is not None:
            self._server.close()
        for link in list(self.links):
            link.drop()
        for stream in list(self._streams.values()):
            stream.fail(EngineDead("the gateway is shutting down"))

    def open(self, request_id: str, num_choices: int = 1) -> TokenStream:
        """A new stream; its id goes to the engine with the request."""
        stream_id = self._next_id
        while stream_id in self._streams:
            stream_id = stream_id % 0xFFFFFFFF + 1
        self._next_id = stream_id % 0xFFFFFFFF + 1
        stream = TokenStream(self, stream_id, request_id, num_choices)
        self._streams[stream_id] = stream
        return stream

    def bind(self, stream_id: int, link: EngineLink) -> None:
        """The engine behind `link` has accepted a stream. The first acceptance counts."""
        stream = self._streams.get(stream_id)
        asked = link.asked.pop(stream_id, None)
        if stream is None:
            # Whoever asked has left, or has gone to another engine.
            if asked is None:
                link.write(frames.word_frame(Kind.ABORT, [stream_id]))
            else:
                self.send_discard(asked, link)
        elif stream.link is None:
            stream.link = link
            link.streams[stream_id] = stream
            if not stream.accepted.done():
                stream.accepted.set_result(None)

    def submit(
        self, stream: TokenStream, link: EngineLink, request: EngineRequest, trace: bytes = b""
    ) -> None:
        """Send a request to a replica; `stream.accepted` ends with its yes, its no, or its loss."""
        if link.is_lost:
            stream.fail(EngineDead("the connection to the replica is lost"))
            return
        link.asked[stream.stream_id] = stream
        link.write(frames.submit_frame(stream.stream_id, request, trace))

    def refuse(self, stream_id: int, link: EngineLink, error: EngineError) -> None:
        """The engine behind `link` does not take a stream."""
        stream = link.asked.pop(stream_id, None)
        if stream is not None and stream.link is None:
            stream.fail(error)

    def judge_key(self, link: EngineLink, number: int, key: str) -> None:
        """Answer a replica that was shown a key."""

        async def judge() -> None:
            try:
                is_allowed = self.key_judge is not None and await self.key_judge(key)
            except Exception as error:
                if self.lines.is_due("key", type(error)):
                    logger.warning("a key for metrics can't be looked up: %s", type(error).__name__)
                is_allowed = False
            link.write(frames.word_frame(Kind.KEY_ANSWER, [number, int(is_allowed)]))

        task = asyncio.create_task(judge())
        self._judging.add(task)
        task.add_done_callback(self._judging.discard)

    def hold(self, stream: TokenStream, woken_at: float) -> bool:
        """Whether a reader was woken too recently; it is then woken with all others that are held."""
        if self.clock() - woken_at >= self.limits.min_wake_gap_s:
            return False
        if not self._held:
            asyncio.get_running_loop().call_later(self.limits.min_wake_gap_s, self._wake_held)
        self._held.add(stream)
        return True

    def _wake_held(self) -> None:
        held, self._held = self._held, set()
        for stream in held:
            stream.wake()

    def forget(self, stream: TokenStream) -> None:
        """Drop a finished stream from all tables."""
        self._streams.pop(stream.stream_id, None)
        if stream.link is not None:
            stream.link.streams.pop(stream.stream_id, None)

    def send_stop(self, stream: TokenStream, index: int, num_used: int) -> None:
        """Tell the engine that one choice is over, and how much of it counts."""
        if stream.link is not None:
            stream.link.write(frames.word_frame(Kind.STOP, [stream.stream_id, index, num_used]))

    def send_discard(self, stream: TokenStream, link: EngineLink) -> None:
        """Tell an engine that a whole stream is over, and that none of its tokens counts."""
        words = [word for index in range(stream.num_choices) for word in (stream.stream_id, index, 0)]
        link.write(frames.word_frame(Kind.STOP, words) + frames.word_frame(Kind.ABORT, [stream.stream_id]))

    def send_abort(self, stream: TokenStream) -> None:
        """Tell the engine that a whole stream is over."""
        if stream.link is not None:
            stream.link.write(frames.word_frame(Kind.ABORT, [stream.stream_id]))

    def stats(self) -> dict[tuple[str, str], EngineStats]:
        """The last statistics of each connected replica, by (model, engine index)."""
        return {link.label: link.status.stats for link in self.links if link.status is not None}

    def metrics_ports(self) -> dict[tuple[str, str], int]:
        """Where each connected replica answers `/metrics` itself, by (model, engine index)."""
        return {link.label: link.status.metrics_port for link in self.links if link.status is not None}

    def check(self) -> None:
        """Judge every link once: it must be heard, and its engine must make steps where it owes tokens."""
        now, limits = self.clock(), self.limits
        for link in list(self.links):
            model, engine = link.label
            silent_s = now - link.heard_at
            if not link.is_trusted:
                if now - link.connected_at > limits.handshake_s:
                    self.num_refused += 1
                    link.drop()
            elif silent_s > limits.silence_s:
                link.fail_streams(f"replica {engine} of {model} has been silent for {silent_s:.1f} s")
                link.drop()
            elif silent_s > limits.quiet_s:
                self.listener.quiet(link)
            elif not (link.streams or link.asked):
                continue
            elif link.status is not None and link.status.engine_age_s > limits.stuck_s:
                age_s = link.status.engine_age_s
                link.fail_streams(f"the engine of replica {engine} of {model} made no step for {age_s:.0f} s")

    async def _watch_links(self) -> None:
        loop, every_s, was_late = asyncio.get_running_loop(), self.limits.check_every_s, False
        while True:
            due = loop.time() + every_s
            await asyncio.sleep(every_s)
            # Where this process was held up itself, what came meanwhile is not read yet.
            was_late = not was_late and loop.time() - due > every_s
            if not was_late:
                self.check()
