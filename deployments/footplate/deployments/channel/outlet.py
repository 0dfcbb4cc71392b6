"""The engine replica's end of the token channel: one link per gateway, one message per step and gateway.

`deliver` may be called from the engine's thread; everything else belongs to the replica's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from footplate.deployments.channel import frames
from footplate.deployments.channel.address import ChannelAddress, dial
from footplate.deployments.channel.frames import FrameReader, Kind, Status
from footplate.deployments.channel.handshake import MAX_HANDSHAKE_BYTES, Dialer
from footplate.deployments.channel.publisher import BlockPublisher
from footplate.deployments.errors import ChannelError, ChannelRefused, FrameError
from footplate.deployments.refusal import Refusal
from footplate.deployments.sparse_lines import SparseLines
from footplate.engine.errors import EngineError, EngineOverloaded
from footplate.engine.types import EngineRequest, SequenceDelta
from footplate.platform.ports import EngineBegin
from footplate.platform.telemetry.spans import CURRENT, RequestTrace
from footplate.platform.telemetry.trace_context import TraceContext

logger = logging.getLogger(__name__)
MAX_ASKED_KEYS = 64


@dataclass(frozen=True, slots=True)
class OutletLimits:
    """Bounds of the engine's end. Times in seconds."""

    max_unsent_bytes: int = 8 * 1024 * 1024  # of one gateway that doesn't read; then its requests are aborted
    handshake_s: float = 5.0
    status_every_s: float = 0.5
    # While there is work, of statistics and of block events: no more often, and no later than this.
    publish_every_s: float = 0.05
    # Of one gateway: which requests have ended, for its word on how much of them counts.
    max_ended: int = 4096
    ask_key_s: float = 2.0  # for a gateway's word on a key


@dataclass(slots=True)
class Delivery:
    """One request's way to its gateway. `done` ends with the last choice; True if all was delivered."""

    request_id: str
    stream_id: int
    link: GatewayLink
    open_choices: set[int]
    done: asyncio.Future[bool]
    # By choice, what has gone to the gateway.
    num_sent: list[int]
    # When the request came, by the monotonic and the wall clock.
    came_at: float = field(default_factory=time.monotonic)
    came_unix_ns: int = field(default_factory=time.time_ns)
    num_prompt: int = 0
    begun: EngineBegin | None = None


@dataclass(slots=True)
class _StepOutput:
    """What one flush adds for one link."""

    words: list[int] = field(default_factory=list)
    extras: list[tuple[int, SequenceDelta]] = field(default_factory=list)
    began: bytes = b""


class GatewayLink(asyncio.Protocol):
    """The connection to one gateway."""

    def __init__(self, outlet: TokenOutlet, dialer: Dialer) -> None:
        self._outlet = outlet
        self._dialer = dialer
        self._reader = FrameReader(MAX_HANDSHAKE_BYTES)
        self._transport: asyncio.Transport | None = None
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.deliveries: dict[int, Delivery] = {}
        self.ended: OrderedDict[int, str] = OrderedDict()

    @property
    def is_lost(self) -> bool:
        """Whether the connection is gone; a new one must be dialled."""
        return self._transport is None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's transport is no subclass
        self.write(frames.frame(Kind.HELLO, self._dialer.hello))

    def data_received(self, data: bytes) -> None:
        try:
            for kind, payload in self._reader.feed(data):
                self._receive(kind, payload)
        except ChannelError as error:
            if self._outlet.lines.is_due("closed", str(error)):
                logger.warning("token channel closed: %s", error)
            if not self.ready.done():
                self.ready.set_exception(error)
            self.drop()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if not self.ready.done():
            self.ready.set_exception(ChannelRefused("the gateway closed the connection during the handshake"))
        self._outlet.lose(self)

    def write(self, data: bytes) -> None:
        """Queue bytes for the gateway. One that has let too much pile up is dropped with its requests."""
        transport = self._transport
        if transport is None:
            return
        transport.write(data)
        if transport.get_write_buffer_size() > self._outlet.limits.max_unsent_bytes:
            logger.warning("a gateway does not read; it is dropped with %d requests", len(self.deliveries))
            self.drop()

    def drop(self) -> None:
        """Close at once, without flushing."""
        if self._transport is not None:
            self._transport.abort()

    def _receive(self, kind: int, payload: bytes) -> None:
        if kind == Kind.CHALLENGE and not self.ready.done():
            self.write(frames.frame(Kind.PROOF, self._dialer.prove(payload)))
        elif kind == Kind.WELCOME and not self.ready.done():
            self._reader.max_payload = frames.MAX_PAYLOAD_BYTES
            self.ready.set_result(None)
        elif kind == Kind.ABORT and self.ready.done():
            for stream_id in frames.read_words(payload):
                self._outlet.abort_stream(self, stream_id)
        elif kind == Kind.STOP and self.ready.done():
            words = frames.read_words(payload)
            for stream_id, index, num_used in zip(words[::3], words[1::3], words[2::3], strict=False):
                self._outlet.stop_choice(self, stream_id, index, num_used)
        elif kind == Kind.SUBMIT and self.ready.done():
            submission = frames.read_submission(payload)
            self._outlet.take(self, submission.stream_id, submission.request, submission.trace)
        elif kind == Kind.KEY_ANSWER and self.ready.done():
            words = frames.read_words(payload)
            self._outlet.hear_of_key(words[0], bool(words[1:] == [1]))
        elif kind == Kind.SHOW_ALL and self.ready.done():
            self._outlet.show_all(self)
        else:
            raise FrameError(f"a gateway sent a frame of kind {kind} out of turn")


class TokenOutlet:
    """Takes requests from gateways, sends each one's tokens back, and takes stops and aborts.

    `submit(request)` and `abort(request_id, index)` are the engine's; the first raises EngineError, the
    second must be safe to call for requests that have ended.
    `cut(request_id, index, num_used)` hears how many tokens of a choice count that is ended from here.
    """

    def __init__(
        self,
        key: bytes,
        *,
        label: tuple[str, str],
        submit: Callable[[EngineRequest], None],
        abort: Callable[[str, int | None], None],
        status: Callable[[], Status],
        cut: Callable[[str, int, int], None] | None = None,
        blocks: BlockPublisher[GatewayLink] | None = None,
        limits: OutletLimits | None = None,
    ) -> None:
        self.limits = limits or OutletLimits()
        self.lines = SparseLines()
        self._key = key
        self._label = label
        self._submit = submit
        self._abort = abort
        self._blocks = blocks
        self._cut = cut or _ignore
        self._status = status
        # Hears of each request once nothing more of it goes to its gateway.
        self.on_end: Callable[[Delivery], None] | None = None
        self._loop = asyncio.get_running_loop()
        self._links: dict[str, GatewayLink] = {}
        self._dialling: dict[str, asyncio.Task[GatewayLink]] = {}
        self._deliveries: dict[str, Delivery] = {}
        self._steps: deque[Sequence[SequenceDelta]] = deque()
        self._is_flush_due = False
        self._beat: asyncio.Task[None] | None = None
        self._publishing: asyncio.TimerHandle | None = None
        self._published_at = 0.0
        self._asked_keys: dict[int, asyncio.Future[bool]] = {}
        self._num_asked_keys = 0
        self._is_leaving = False
        self._is_draining = False
        self._is_closed = False

    async def link(self, address: str) -> GatewayLink:
        """The proven connection to a gateway, dialled when there is none.

        Raises:
            ChannelError: it doesn't answer or fails the challenge, or this end is closed.
        """
        if self._is_closed:
            raise ChannelError("this replica has ended")
        link = self._links.get(address)
        if link is not None and not link.is_lost:
            return link
        task = self._dialling.get(address)
        if task is None:
            task = asyncio.create_task(self._dial(address))
            self._dialling[address] = task
            task.add_done_callback(lambda _: self._dialling.pop(address, None))
        # Shielded: the one who started dialling may be cancelled while others wait for the same link.
        return await asyncio.shield(task)

    def open(self, link: GatewayLink, stream_id: int, request_id: str, num_choices: int) -> Delivery:
        """Route a request's tokens to a gateway's stream. Call it before the engine can make any."""
        done: asyncio.Future[bool] = self._loop.create_future()
        delivery = Delivery(request_id, stream_id, link, set(range(num_choices)), done, [0] * num_choices)
        self._deliveries[request_id] = delivery
        link.deliveries[stream_id] = delivery
        if link.is_lost:
            self._end(delivery, was_delivered=False)
        return delivery

    def accept(self, delivery: Delivery) -> None:
        """Tell the gateway that the engine has taken the request. Written before any of its tokens."""
        delivery.link.write(frames.word_frame(Kind.ACCEPT, [delivery.stream_id]))

    def take(self, link: GatewayLink, stream_id: int, request: EngineRequest, trace: bytes = b"") -> None:
        """A gateway's request: the engine has it, or the gateway is told why not."""
        if self._is_draining:
            no = Refusal.of(EngineOverloaded("this replica is about to stop; send the request again"))
            link.write(frames.refuse_frame(stream_id, no))
            return
        if request.request_id in self._deliveries:
            no = Refusal("InvalidRequest", "a request with this id is running", "request_id")
            link.write(frames.refuse_frame(stream_id, no))
            return
        delivery = self.open(link, stream_id, request.request_id, request.params.n)
        delivery.num_prompt = len(request.prompt_token_ids)
        # For whatever the engine logs of it.
        came = TraceContext.from_wire(trace)
        before = CURRENT.set(None if came is None else RequestTrace(request.request_id, came, None))
        try:
            self._submit(request)
        except EngineError as error:
            self.forget(delivery)
            link.write(frames.refuse_frame(stream_id, Refusal.of(error)))
        else:
            self.accept(delivery)
            self._publish_soon()
        finally:
            CURRENT.reset(before)

    async def may_scrape(self, key: str) -> bool:
        """Whether a key may read metrics, as a gateway says; no where none says it in time."""
        links = [link for link in self._links.values() if not link.is_lost]
        if not links or len(self._asked_keys) >= MAX_ASKED_KEYS:
            return False
        self._num_asked_keys = number = self._num_asked_keys % 0xFFFF_FFFF + 1
        answer: asyncio.Future[bool] = self._loop.create_future()
        self._asked_keys[number] = answer
        links[0].write(frames.ask_key_frame(number, key))
        try:
            async with asyncio.timeout(self.limits.ask_key_s):
                return await answer
        except TimeoutError:
            return False
        finally:
            del self._asked_keys[number]

    def hear_of_key(self, number: int, is_allowed: bool) -> None:
        """A gateway's answer; it may be late."""
        answer = self._asked_keys.get(number)
        if answer is not None and not answer.done():
            answer.set_result(is_allowed)

    def show_all(self, link: GatewayLink) -> None:
        """A gateway knows nothing of the prefix cache, or has lost the thread."""
        if self._blocks is not None:
            for peer, message in self._blocks.whole(link):
                peer.write(message)

    def leave(self) -> None:
        """Tell every gateway that this replica will go soon: what is new goes elsewhere, if it can."""
        self._is_leaving = True
        self._send_status()

    async def drain(self) -> None:
        """Take nothing new, tell every gateway, and return when all that runs has ended."""
        self._is_draining = True
        self._send_status()
        while self._deliveries:
            await asyncio.wait([delivery.done for delivery in self._deliveries.values()])

    def forget(self, delivery: Delivery) -> None:
        """Stop routing a request; tokens that still come for it are thrown away."""
        self._end(delivery, was_delivered=False)

    def deliver(self, deltas: Sequence[SequenceDelta]) -> None:
        """Take the deltas of one engine step. Callable from any thread; never blocks."""
        self._steps.append(deltas)
        # The flag is cleared on the loop before it reads the deque, so no step can be left behind.
        if not self._is_flush_due:
            self._is_flush_due = True
            self._loop.call_soon_threadsafe(self._flush)

    def abort_stream(self, link: GatewayLink, stream_id: int) -> None:
        """The gateway gave a stream up; it is told once it has all that was made of it until now."""
        self._flush()
        delivery = link.deliveries.get(stream_id)
        if delivery is not None:
            self._give_up(delivery)
        link.write(frames.word_frame(Kind.ENDED, [stream_id]))

    def stop_choice(self, link: GatewayLink, stream_id: int, index: int, num_used: int) -> None:
        """The gateway needs no more of one choice than so many tokens; it may have ended by itself."""
        delivery = link.deliveries.get(stream_id)
        if delivery is None:
            request_id = link.ended.get(stream_id)
            if request_id is not None:
                self._cut(request_id, index, num_used)
        elif index < len(delivery.num_sent):
            self._cut(delivery.request_id, index, num_used)
            if index in delivery.open_choices:
                self._abort(delivery.request_id, index)
                self._close_choice(delivery, index)

    def lose(self, link: GatewayLink) -> None:
        """A gateway is gone: nobody will read what its requests still make."""
        for address in [known for known, held in self._links.items() if held is link]:
            del self._links[address]
        if self._blocks is not None:
            self._blocks.lose(link)
        for delivery in list(link.deliveries.values()):
            self._give_up(delivery)

    async def close(self) -> None:
        """Drop all links, for good; requests that still run are aborted."""
        self._is_closed = True
        if self._beat is not None:
            self._beat.cancel()
        if self._publishing is not None:
            self._publishing.cancel()
        for link in list(self._links.values()):
            link.drop()
            self.lose(link)

    async def _dial(self, address: str) -> GatewayLink:
        link = GatewayLink(self, Dialer(self._key, *self._label))
        try:
            async with asyncio.timeout(self.limits.handshake_s):
                await dial(ChannelAddress.parse(address), lambda: link)
                await link.ready
        except TimeoutError as error:
            link.drop()
            raise ChannelError(f"the gateway at {address} did not answer the handshake") from error
        self._links[address] = link
        link.write(self._status_message())
        self.show_all(link)
        if self._beat is None:
            self._beat = asyncio.create_task(self._beat_forever(), name="token-channel-status")
        return link

    def _flush(self) -> None:
        self._is_flush_due = False
        steps = self._steps
        while steps:
            self._send_step(steps.popleft())
        self._publish_soon()

    def _send_step(self, deltas: Sequence[SequenceDelta]) -> None:
        outputs: dict[GatewayLink, _StepOutput] = {}
        for delta in deltas:
            delivery = self._deliveries.get(delta.request_id)
            if delivery is None:  # aborted meanwhile
                continue
            output = outputs.get(delivery.link)
            if output is None:
                output = outputs[delivery.link] = _StepOutput()
            if delivery.begun is None and delta.scheduled_at is not None:
                output.began += self._begin(delivery, delta)
            delivery.num_sent[delta.index] += len(delta.token_ids)
            if frames.is_plain(delta):
                frames.append_tokens(output.words, delivery.stream_id, delta)
            else:
                output.extras.append((delivery.stream_id, delta))
            if delta.finish_reason is not None:
                self._close_choice(delivery, delta.index)
        for link, output in outputs.items():
            message = output.began
            if output.words:
                message += frames.word_frame(Kind.TOKENS, output.words)
            if output.extras:
                message += frames.extras_frame(output.extras)
            link.write(message)

    def _begin(self, delivery: Delivery, delta: SequenceDelta) -> bytes:
        """A request's first word from the engine: how long it waited, and how long its prompt took."""
        now, scheduled_at = time.monotonic(), delta.scheduled_at or 0.0
        queue_s, prefill_s = max(scheduled_at - delivery.came_at, 0.0), max(now - scheduled_at, 0.0)
        delivery.begun = EngineBegin(delivery.came_unix_ns, queue_s, prefill_s)
        return frames.began_frame(delivery.stream_id, delivery.begun)

    def _give_up(self, delivery: Delivery) -> None:
        for index in sorted(delivery.open_choices):
            self._cut(delivery.request_id, index, delivery.num_sent[index])
        self._abort(delivery.request_id, None)
        self._end(delivery, was_delivered=False)

    def _close_choice(self, delivery: Delivery, index: int) -> None:
        delivery.open_choices.discard(index)
        if not delivery.open_choices:
            self._end(delivery, was_delivered=True)

    def _end(self, delivery: Delivery, *, was_delivered: bool) -> None:
        if self._deliveries.get(delivery.request_id) is delivery:
            del self._deliveries[delivery.request_id]
        link = delivery.link
        if link.deliveries.pop(delivery.stream_id, None) is not None:
            link.ended[delivery.stream_id] = delivery.request_id
            while len(link.ended) > self.limits.max_ended:
                link.ended.popitem(last=False)
        if not delivery.done.done():
            delivery.done.set_result(was_delivered)
            if self.on_end is not None:
                self.on_end(delivery)

    def _publish_soon(self) -> None:
        if self._publishing is None:
            wait_s = self._published_at + self.limits.publish_every_s - self._loop.time()
            self._publishing = self._loop.call_later(max(wait_s, 0.0), self._publish)

    def _publish(self) -> None:
        self._publishing = None
        self._published_at = self._loop.time()
        self._send_status()
        if self._blocks is not None:
            for link, message in self._blocks.news():
                link.write(message)

    async def _beat_forever(self) -> None:
        while True:
            await asyncio.sleep(self.limits.status_every_s)
            self._send_status()

    def _send_status(self) -> None:
        message = self._status_message()
        for link in list(self._links.values()):
            link.write(message)

    def _status_message(self) -> bytes:
        status = self._status()
        status.is_leaving, status.is_draining = self._is_leaving, self._is_draining
        return frames.status_frame(status)


def _ignore(request_id: str, index: int, num_used: int) -> None:
    """Nobody keeps account."""
