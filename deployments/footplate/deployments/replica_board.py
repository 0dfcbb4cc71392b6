"""The replicas as one gateway knows them: their connections, and a router for each model.

One event loop owns it. It listens to the token channel and asks nobody, so a decision costs no round trip.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from footplate.deployments.channel import frames
from footplate.deployments.channel.frames import Kind, Status
from footplate.deployments.channel.hub import EngineLink
from footplate.deployments.specs import generation_of
from footplate.engine.prefix import PrefixHasher
from footplate.engine.types import EngineRequest, EngineStats
from footplate.routing.router import Decision, Router
from footplate.routing.types import BlockEvents, BlockKey, Ranked, ReplicaId, ReplicaLoad

NewRouter = Callable[[int], Router]


@dataclass(slots=True)
class _Model:
    router: Router
    hasher: PrefixHasher
    links: dict[ReplicaId, EngineLink] = field(default_factory=dict)
    # Whether there was ever a choice: of a replica that is alone nobody asks what it holds.
    had_several: bool = False
    # Whom all of their blocks were asked for, and have not come.
    asked: set[ReplicaId] = field(default_factory=set)
    # Who will go soon, and is asked where nobody else is left.
    leaving: set[ReplicaId] = field(default_factory=set)


class RoutingObserver(Protocol):
    """Hears of every decision."""

    def decided(self, model: str, decision: Decision, hashing_s: float, deciding_s: float) -> None:
        """Times are of hashing the prompt's blocks, and of the decision itself."""
        ...


class ReplicaBoard:
    """A `LinkListener`. A replica is known from its first status on, and until its link is lost."""

    def __init__(
        self,
        prefix_key: bytes,
        *,
        clock: Callable[[], float] = time.monotonic,
        new_router: NewRouter = Router,
        metrics: RoutingObserver | None = None,
    ) -> None:
        self._prefix_key = prefix_key
        self._clock = clock
        self._new_router = new_router
        self._metrics = metrics
        # By name and generation: another generation may have other weights, and another vocabulary.
        self._models: dict[tuple[str, int], _Model] = {}
        self._current: dict[str, int] = {}
        self._waiters: set[asyncio.Future[None]] = set()
        self._suspects: set[EngineLink] = set()

    def use(self, model: str, generation: int) -> None:
        """Let what is new go to this generation's replicas; what was placed elsewhere stays there."""
        self._current[model] = generation
        for key in [key for key in self._models if key[0] == model]:
            self._drop_unused(key)
        self._wake()

    def forget(self, model: str) -> None:
        """A model is served no longer."""
        self._current.pop(model, None)
        for key in [key for key in self._models if key[0] == model]:
            self._drop_unused(key)

    def heard(self, link: EngineLink, status: Status) -> None:
        """A replica's statistics have come: it is there, and has so much to do."""
        name, replica = key_of(link), ReplicaId(link.label[1])
        model = self._models.get(name)
        if status.is_draining:
            if model is not None and model.links.get(replica) is link:
                self._remove(model, replica)
            return
        if model is None:
            block_size = status.stats.block_size
            model = _Model(self._new_router(block_size), PrefixHasher(self._prefix_key, block_size))
            self._models[name] = model
        if model.links.get(replica) is not link:
            # A replacement takes over its predecessor's place, and nothing of its cache.
            self._remove(model, replica)
            model.links[replica] = link
            model.had_several |= len(model.links) > 1
            if link in self._suspects:
                self._suspects.discard(link)
                self._ask_for_all(model, replica, link)
        if status.is_leaving:
            model.leaving.add(replica)
        model.router.report(replica, load_of(status.stats), self._clock())
        model.router.index.sweep()
        self._wake()

    def blocks_changed(self, link: EngineLink, events: BlockEvents) -> None:
        """What a replica's cache has gained and lost. Where something is missing, all is asked for, once."""
        model, replica = self._models.get(key_of(link)), ReplicaId(link.label[1])
        if model is None or model.links.get(replica) is not link:
            return
        if model.router.apply(replica, events):
            model.asked.discard(replica)
        elif replica not in model.asked:
            self._ask_for_all(model, replica, link)

    def quiet(self, link: EngineLink) -> None:
        """A replica's heart-beats stay out: as `suspect`."""
        self.suspect(link)

    def lost(self, link: EngineLink) -> None:
        """A replica is gone; nothing is asked of it from now on."""
        self._suspects.discard(link)
        self._forget(link)

    def suspect(self, link: EngineLink) -> None:
        """A replica gave no answer: nothing new goes there until it is heard of again."""
        if not link.is_lost:
            self._suspects.add(link)
        self._forget(link)

    def decide(self, model: str, request: EngineRequest, tried: Collection[EngineLink] = ()) -> Decision:
        """Whom to ask for a request, in order, but for those tried; nobody when no other replica is known."""
        known = self._known(model)
        if known is None:
            return Decision((), len(request.prompt_token_ids))
        began = time.perf_counter()
        keys: Sequence[BlockKey] | None = None
        if known.had_several:
            keys = known.hasher.chain(request.prompt_token_ids, request.cache_scope)
        hashed = time.perf_counter()
        num_tokens = len(request.prompt_token_ids)
        without = {name for name, link in known.links.items() if link in tried} if tried else set()
        if known.leaving and len(known.leaving | without) < len(known.links):
            without |= known.leaving
        decision = known.router.decide(keys, num_tokens, self._clock(), request.session, without)
        if self._metrics is not None:
            self._metrics.decided(model, decision, hashed - began, time.perf_counter() - hashed)
        return decision

    def link(self, model: str, replica: ReplicaId) -> EngineLink | None:
        """The connection to a replica."""
        known = self._models.get((model, generation_of(replica)))
        return None if known is None else known.links.get(replica)

    def links(self, model: str) -> Collection[EngineLink]:
        """Of all replicas of a model that can be asked."""
        known = self._known(model)
        return () if known is None else known.links.values()

    def placed(self, model: str, decision: Decision, chosen: Ranked) -> None:
        """A replica is being asked."""
        known = self._models.get((model, generation_of(chosen.replica)))
        if known is not None:
            known.router.placed(decision, chosen, self._clock())

    def index_sizes(self) -> dict[str, tuple[int, int]]:
        """Of each model: keys in the index, and events that got lost on their way."""
        found = {}
        for name in {name for name, _ in self._models}:
            model = self._known(name)
            if model is not None:
                found[name] = len(model.router.index), model.router.index.num_gaps
        return found

    async def wait_for_news(self) -> None:
        """Return when a replica is heard of."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)

    def _known(self, model: str) -> _Model | None:
        """The generation that serves."""
        return self._models.get((model, self._current.get(model, 1)))

    def _drop_unused(self, key: tuple[str, int]) -> None:
        """Forget a generation that has no replica any more, unless it is the one that serves."""
        if not self._models[key].links and self._current.get(key[0]) != key[1]:
            del self._models[key]

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _forget(self, link: EngineLink) -> None:
        key, replica = key_of(link), ReplicaId(link.label[1])
        model = self._models.get(key)
        if model is None:
            return
        if model.links.get(replica) is link:
            self._remove(model, replica)
        self._drop_unused(key)

    @staticmethod
    def _ask_for_all(model: _Model, replica: ReplicaId, link: EngineLink) -> None:
        model.asked.add(replica)
        link.write(frames.frame(Kind.SHOW_ALL))

    @staticmethod
    def _remove(model: _Model, replica: ReplicaId) -> None:
        model.links.pop(replica, None)
        model.asked.discard(replica)
        model.leaving.discard(replica)
        model.router.remove(replica)


def key_of(link: EngineLink) -> tuple[str, int]:
    """The model and the generation of it that a replica serves."""
    model, label = link.label
    return model, generation_of(label)


def load_of(stats: EngineStats) -> ReplicaLoad:
    """What a replica has to do before a request that somebody waits for: batch work makes room."""
    return ReplicaLoad(
        stats.running - stats.batch_running,
        stats.waiting - stats.batch_waiting,
        stats.prefill_tokens,
        stats.kv_usage,
    )
