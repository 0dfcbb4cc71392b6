"""The gateway's way to the engines: over the channel, to the replica that a router ranks first."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from footplate.deployments.channel.hub import EngineLink, TokenHub, TokenStream
from footplate.deployments.replica_board import ReplicaBoard
from footplate.deployments.sparse_lines import SparseLines
from footplate.deployments.specs import ModelTarget, application_of
from footplate.engine.errors import EngineDead, EngineError, EngineOverloaded
from footplate.engine.types import EngineRequest, EngineStats, ModelCard, SequenceDelta
from footplate.platform.ports import Journey, ModelNames, Placement
from footplate.routing.types import Ranked

logger = logging.getLogger(__name__)

# An engine takes a request or refuses it in milliseconds; one that does neither is passed over for another.
# With what the other takes for it, nobody waits two seconds for a replica that is lost.
ANSWER_S = 1.0
# A model that takes longer to start is asked for less often: it may be one that can't.
MAX_QUICK_TRIES = 120
SLOW_TRY_S = 1.0
# One that has answered and has no replica now may have been scaled to none, or lost its last.
ASLEEP_TRY_S = 0.25
# One that starts is looked for as often as this.
NEW_TRY_S = 0.1


class EngineHandle(Protocol):
    """What this client needs from one Serve application: one generation of a model."""

    async def attach(self, address: str) -> list[ModelCard]:
        """Call `EngineReplica.attach` on every replica; cards of those that answer."""
        ...

    async def wake(self, address: str) -> ModelCard:
        """The same on whichever replica is there first: where there is none, Serve starts one for it."""
        ...


class ChannelGeneration:
    """One running request; see `ports.Generation`. Before its first token it survives its replica, once."""

    def __init__(
        self,
        client: ChannelInferenceClient,
        model: str,
        request: EngineRequest,
        stream: TokenStream,
        journey: Journey,
    ) -> None:
        self._client = client
        self._model = model
        self._request = request
        self._stream = stream
        self._journey = journey
        self._may_move = True

    @property
    def engine(self) -> str:
        """The accepting replica's index; its link is kept here even when it is lost."""
        return self._stream.link.label[1] if self._stream.link is not None else ""

    async def next(self) -> Sequence[SequenceDelta]:
        """Everything that came since the last call; empty at the end."""
        try:
            given = await self._stream.next()
        except EngineDead:
            self._left("moved" if self._may_move else "lost")
            if not self._may_move:
                raise
            self._may_move = False
            await self._move()
            return await self.next()
        self._may_move = False
        return given

    def stop(self, index: int, num_used: int) -> None:
        """End one choice at the engine."""
        self._stream.stop(index, num_used)

    async def cancel(self) -> Sequence[SequenceDelta] | None:
        """Abort what still runs, and wait for the last tokens that were made of it."""
        return await self._stream.cancel()

    async def close(self) -> None:
        """Abort what still runs."""
        self._left()
        self._stream.close()

    def _left(self, outcome: str | None = None) -> None:
        """Nothing more comes from the replica that has the request now."""
        placement = self._journey.placements[-1]
        if placement.ended_at is None:
            placement.ended_at, placement.begun = time.monotonic(), self._stream.begun
            placement.outcome = outcome or placement.outcome

    async def _move(self) -> None:
        dead = self._stream.link
        self._stream.close()
        self._client.num_moved += 1
        tried = set() if dead is None else {dead}
        self._stream = await self._client.place(self._model, self._request, tried, self._journey)


@dataclass(slots=True)
class _Generation:
    """One generation of a model: who keeps its replicas attached, and its card once one has answered."""

    attaching: asyncio.Task[None]
    handle: EngineHandle | None = None
    card: ModelCard | None = None


class ChannelInferenceClient:
    """Keeps the models' cards and attaches their replicas; see `ports.InferenceClient`.

    Of the generations of a model that may run, the newest one that has answered serves; the others keep the
    streams that they have.
    """

    def __init__(
        self,
        hub: TokenHub,
        models: Iterable[str],
        find_handle: Callable[[str], EngineHandle],
        board: ReplicaBoard,
        *,
        accept_s: float = 30.0,
        refresh_s: float = 2.0,
    ) -> None:
        self._hub = hub
        self._board = board
        hub.listener = board
        self._targets = {model: ModelTarget(model) for model in models}
        self._find_handle = find_handle
        self._accept_s = accept_s
        self._refresh_s = refresh_s
        # Of a model, whichever generation: one that can't start is tried in generation after generation.
        self._lines = SparseLines()
        self._cards: dict[str, ModelCard] = {}
        self._generations: dict[str, dict[int, _Generation]] = {}
        # Models without a replica, which somebody asks for.
        self._waking: dict[str, asyncio.Task[None]] = {}
        # Requests that were run again elsewhere.
        self.num_moved = 0

    def start(self) -> None:
        """Begin to fetch the models' cards and to attach their replicas."""
        self.serve(tuple(self._targets.values()))

    def serve(self, targets: Iterable[ModelTarget]) -> None:
        """Serve these models and no others, from now on. Streams that have begun are not touched."""
        self._targets = {target.name: target for target in targets}
        for model in self._generations.keys() - self._targets.keys():
            for each in self._generations.pop(model).values():
                each.attaching.cancel()
            self._cards.pop(model, None)
            self._board.forget(model)
        for model, target in self._targets.items():
            known = self._generations.setdefault(model, {})
            for generation in target.generations:
                if generation not in known:
                    attaching = asyncio.create_task(self._keep_attached(model, generation))
                    known[generation] = _Generation(attaching)

    async def close(self) -> None:
        """Stop all background work."""
        every = [each.attaching for known in self._generations.values() for each in known.values()]
        every += self._waking.values()
        for task in every:
            task.cancel()
        await asyncio.gather(*every, return_exceptions=True)

    def models(self) -> Mapping[str, ModelCard]:
        """The cards of the models whose replicas have answered, by name."""
        return self._cards

    def starting(self) -> Collection[ModelNames]:
        """The models that are to be served and of which no replica has answered yet."""
        return [ModelNames(t.name, t.aliases) for t in self._targets.values() if t.name not in self._cards]

    def stats(self) -> Mapping[tuple[str, str], EngineStats]:
        """The last statistics of each replica, by (model, engine index)."""
        return self._hub.stats()

    async def submit(
        self, model: str, request: EngineRequest, journey: Journey | None = None
    ) -> ChannelGeneration:
        """Hand a request to a replica; returns once an engine has accepted it.

        Raises:
            EngineError: the engine's refusal, `EngineDead`, or `EngineOverloaded` when none took it in time.
        """
        if model not in self._targets:
            raise EngineDead(f"no model named {model} is served here")
        journey = journey or Journey(model)
        stream = await self.place(model, request, set(), journey)
        return ChannelGeneration(self, model, request, stream, journey)

    async def place(
        self, model: str, request: EngineRequest, tried: set[EngineLink], journey: Journey
    ) -> TokenStream:
        """The request's stream at the first replica by rank that takes it, but for those `tried`.

        Where no replica is left that has not refused or died, one that comes meanwhile is waited for, unless
        the request has another model to go to (`Journey.may_wait`).

        Raises:
            EngineError: as `submit`.
        """
        refusal: EngineError | None = None
        try:
            async with asyncio.timeout(self._accept_s):
                while True:
                    decision = self._board.decide(model, request, tried)
                    was_asked = False
                    for ranked in decision.ranks:
                        link = self._board.link(model, ranked.replica)
                        if link is None or link in tried:
                            continue
                        was_asked = True
                        tried.add(link)
                        self._board.placed(model, decision, ranked)
                        answer = await self._ask(request, link, tried, _placed(journey, ranked))
                        if isinstance(answer, TokenStream):
                            return answer
                        refusal = _weightier(refusal, answer)
                    if was_asked:
                        # There may be others.
                        continue
                    if isinstance(refusal, EngineOverloaded):
                        raise refusal
                    if not journey.may_wait:
                        raise refusal or EngineOverloaded(f"no replica of {model} answers now")
                    if not self._board.links(model):
                        self._wake(model)
                    await self._board.wait_for_news()
        except TimeoutError:
            late = EngineOverloaded(f"no replica of {model} took the request in {self._accept_s:.0f} s")
            raise refusal or late from None

    async def _ask(
        self, request: EngineRequest, link: EngineLink, tried: set[EngineLink], journey: Journey
    ) -> TokenStream | EngineError | None:
        """One replica's answer: the stream, or why there is none and another may be asked; None: silence.

        Raises:
            InvalidRequest, RequestTooLarge: every other one would say the same.
        """
        model, placement = journey.model, journey.placements[-1]
        stream = self._hub.open(request.request_id, request.params.n)
        try:
            self._hub.submit(stream, link, request, journey.trace)
            # The last one is waited for as long as there is time, unless there is another model.
            is_last = journey.may_wait and not self._untried(model, tried)
            async with asyncio.timeout(None if is_last else ANSWER_S):
                await asyncio.shield(stream.accepted)
        except TimeoutError:
            stream.discard()
            _refused(placement)
            self._board.suspect(link)
            return None
        except BaseException:
            stream.discard()
            _refused(placement)
            raise
        if stream.link is not None:
            return stream
        _refused(placement)
        failure = stream.failure
        assert failure is not None, "an answer is a yes or a no"
        if isinstance(failure, EngineOverloaded | EngineDead):
            return failure
        raise failure

    def _untried(self, model: str, tried: set[EngineLink]) -> bool:
        return any(link not in tried for link in self._board.links(model))

    def _wake(self, model: str) -> None:
        """Have a first replica started, of a model that was scaled to none."""
        known = self._generations.get(model, {})
        newest = max(known, key=lambda number: (known[number].card is not None, number), default=None)
        handle = None if newest is None else known[newest].handle
        if model in self._waking or newest is None or handle is None:
            return
        waking = self._waking[model] = asyncio.create_task(self._woken(model, newest, handle))
        waking.add_done_callback(lambda _: self._waking.pop(model, None))

    async def _woken(self, model: str, generation: int, handle: EngineHandle) -> None:
        # Whoever waits for the replica gives up by then, and the next one asks again.
        with contextlib.suppress(Exception):
            async with asyncio.timeout(self._accept_s):
                card = await handle.wake(self._hub.address)
                self._note_card(model, generation, card)

    async def _keep_attached(self, model: str, generation: int) -> None:
        """Ask all replicas again and again: new ones must connect, and a new version brings a new card."""
        handle: EngineHandle | None = None
        num_tries = num_empty = 0
        while True:
            try:
                if handle is None:
                    handle = self._find_handle(application_of(model, generation))
                    self._generations[model][generation].handle = handle
                cards = await handle.attach(self._hub.address)
            except asyncio.CancelledError:
                raise
            except Exception as error:
                # No replica yet, or it died: the next round tries again. Requests learn of it by themselves.
                if self._lines.is_due(model, type(error)):
                    logger.info("replicas of %s can't be attached yet: %s", model, type(error).__name__)
                if self._is_over(model, generation):
                    del self._generations[model][generation]
                    return
                num_tries += 1
                await asyncio.sleep(0.25 if num_tries < MAX_QUICK_TRIES else SLOW_TRY_S)
                continue
            num_tries = 0
            if not cards and self._is_over(model, generation):
                del self._generations[model][generation]
                return
            for card in cards:
                self._note_card(model, generation, card)
            num_empty = 0 if cards else num_empty + 1
            await asyncio.sleep(self._pause_s(model, num_empty))

    def _pause_s(self, model: str, num_empty: int) -> float:
        """How long until replicas are asked again, after so many rounds in which there was none."""
        if not num_empty:
            return self._refresh_s
        if model in self._cards:
            return ASLEEP_TRY_S
        if num_empty * NEW_TRY_S >= self._refresh_s:
            # Nobody can say what a model is that has no replica: a gateway that comes wakes it.
            self._wake(model)
        return NEW_TRY_S

    def _note_card(self, model: str, generation: int, card: ModelCard) -> None:
        known = self._generations[model]
        is_first = known[generation].card is None
        known[generation].card = card
        newest = max(number for number, each in known.items() if each.card is not None)
        if newest == generation:
            self._cards[model] = card
            if is_first:
                self._board.use(model, generation)

    def _is_over(self, model: str, generation: int) -> bool:
        """Whether a generation that doesn't answer has been replaced by a newer one, which does."""
        return any(number > generation and each.card for number, each in self._generations[model].items())


def _weightier(refusal: EngineError | None, answer: EngineError | None) -> EngineError | None:
    """A full engine's word is worth more than a dead one's, and silence is none."""
    return refusal if answer is None or isinstance(refusal, EngineOverloaded) else answer


def _placed(journey: Journey, ranked: Ranked) -> Journey:
    """Note that a replica is asked now."""
    journey.placements.append(Placement(str(ranked.replica), time.monotonic(), ranked.reason.value))
    return journey


def _refused(placement: Placement) -> None:
    placement.outcome, placement.ended_at = "refused", time.monotonic()
