"""Stand-ins for the platform's ports, scripted by tests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from footplate.engine.types import (
    EngineRequest,
    EngineStats,
    FinishReason,
    ModelCard,
    SequenceDelta,
    TokenLogprob,
)
from footplate.platform.ports import EngineBegin, Journey, ModelNames, Placement, Principal


@dataclass(slots=True)
class Script:
    """What each choice of each request produces.

    The last id of `token_ids` ends the choice with STOP where `ends_with_stop`, unless max_tokens is lower.
    """

    token_ids: Sequence[int] = ()
    ends_with_stop: bool = True
    tokens_per_step: int = 1
    steps_per_batch: int = 1  # how many steps one `next` finds waiting
    cached_tokens: int = 0
    refusal: Exception | None = None  # raised by `submit`
    failure: Exception | None = None  # raised by `next` once `fail_after` steps were given
    fail_after: int = 0
    error: str | None = None  # a choice ends with ERROR once `fail_after` steps were given
    hold_after: int | None = None  # `next` waits after so many steps, until `goes_on`
    goes_on: asyncio.Event = field(default_factory=asyncio.Event)
    engine: str = "0"  # which engine of the model accepts
    steps_unseen: int = 0  # how many steps were made when a cancel reaches the engine
    loses_count: bool = False  # nobody says what was made when it did
    logprob: float = -0.5  # of every token
    begun: EngineBegin | None = None  # what the engine says of how it began


class ScriptedGeneration:
    """Plays a script for one request."""

    def __init__(self, request: EngineRequest, script: Script) -> None:
        self.request = request
        self.closed = asyncio.Event()
        self.stopped: set[int] = set()
        # How many tokens of a choice the gateway said to count.
        self.used: dict[int, int] = {}
        self._script = script
        self.num_steps = 0
        limit = request.params.max_tokens
        count = len(script.token_ids) if limit is None else min(limit, len(script.token_ids))
        self._ids = tuple(script.token_ids[:count])
        is_whole = count == len(script.token_ids) and limit != 0
        self._finish = FinishReason.STOP if script.ends_with_stop and is_whole else FinishReason.LENGTH
        self._position = 0
        self._done = False

    @property
    def engine(self) -> str:
        return self._script.engine

    async def next(self) -> Sequence[SequenceDelta]:
        script = self._script
        # Tests see each batch as a turn of the loop, as they would from a socket.
        await asyncio.sleep(0)
        if self._done or len(self.stopped) == self.request.params.n:
            return ()
        if script.hold_after is not None and self.num_steps >= script.hold_after:
            await script.goes_on.wait()
        if script.failure is not None and self.num_steps >= script.fail_after:
            raise script.failure
        if script.error is not None and self.num_steps >= script.fail_after:
            self._done = True
            return [
                SequenceDelta(self.request.request_id, 0, (), None, FinishReason.ERROR, error=script.error)
            ]
        deltas: list[SequenceDelta] = []
        for _ in range(script.steps_per_batch):
            deltas += self._step()
        return deltas

    def stop(self, index: int, num_used: int) -> None:
        self.stopped.add(index)
        self.used[index] = num_used

    async def cancel(self) -> Sequence[SequenceDelta] | None:
        if self._script.loses_count:
            return None
        deltas = (
            [] if self._done else [delta for _ in range(self._script.steps_unseen) for delta in self._step()]
        )
        self._done = True
        return deltas

    async def close(self) -> None:
        self.closed.set()

    def _step(self) -> list[SequenceDelta]:
        if self._done:
            return []
        begin = self._position
        ids = self._ids[begin : begin + self._script.tokens_per_step]
        self._position += len(ids)
        self._done = self._position >= len(self._ids)
        is_first = self.num_steps == 0
        self.num_steps += 1
        return [
            self._delta(index, ids, is_first)
            for index in range(self.request.params.n)
            if index not in self.stopped
        ]

    def _delta(self, index: int, ids: tuple[int, ...], is_first: bool) -> SequenceDelta:
        params = self.request.params
        leads = is_first and index == 0
        return SequenceDelta(
            self.request.request_id,
            index,
            ids,
            tuple(logprob_of(token_id, params.logprobs, self._script.logprob) for token_id in ids)
            if params.logprobs is not None
            else None,
            self._finish if self._done else None,
            cached_tokens=self._script.cached_tokens if leads else 0,
            prompt_logprobs=self._prompt_logprobs() if leads else None,
        )

    def _prompt_logprobs(self) -> tuple[TokenLogprob | None, ...] | None:
        num_top = self.request.params.prompt_logprobs
        if num_top is None:
            return None
        rest = [logprob_of(token_id, num_top) for token_id in self.request.prompt_token_ids[1:]]
        return (None, *rest)


def logprob_of(token_id: int, num_top: int, logprob: float = -0.5) -> TokenLogprob:
    """A made-up but repeatable entry: the chosen token is the best one."""
    top = tuple(
        ((token_id + offset) % 1000 if offset else token_id, -0.5 - offset) for offset in range(num_top)
    )
    return TokenLogprob(token_id, logprob, 1, top)


class ScriptedClient:
    """An InferenceClient without engines. `generations` keeps what was submitted."""

    def __init__(self, cards: Sequence[ModelCard], script: Script) -> None:
        self._cards = {card.name: card for card in cards}
        self.script = script
        # Of models that play another one.
        self.scripts: dict[str, Script] = {}
        self.generations: list[ScriptedGeneration] = []
        self.journeys: list[Journey] = []
        self.asked: list[str] = []  # the model of each generation
        self.engine_stats: dict[tuple[str, str], EngineStats] = {}
        self.coming: list[ModelNames] = []  # models that no replica serves yet

    @property
    def requests(self) -> list[EngineRequest]:
        return [generation.request for generation in self.generations]

    async def submit(
        self, model: str, request: EngineRequest, journey: Journey | None = None
    ) -> ScriptedGeneration:
        assert model in self._cards, "the gateway resolves aliases"
        script = self.scripts.get(model, self.script)
        if journey is not None:
            journey.placements.append(Placement(script.engine, time.monotonic(), begun=script.begun))
            self.journeys.append(journey)
        if script.refusal is not None:
            raise script.refusal
        generation = ScriptedGeneration(request, script)
        self.generations.append(generation)
        self.asked.append(model)
        return generation

    def models(self) -> Mapping[str, ModelCard]:
        return self._cards

    def starting(self) -> Collection[ModelNames]:
        return self.coming

    def stats(self) -> Mapping[tuple[str, str], EngineStats]:
        return self.engine_stats


@dataclass(slots=True)
class KnownKeys:
    """An Authenticator over a fixed table."""

    principals: dict[str, Principal] = field(default_factory=dict)

    async def authenticate(self, key: str) -> Principal | None:
        return self.principals.get(key)

    async def find(self, key_id: str) -> Principal | None:
        """As `ports.KeyFinder`."""
        found = [each for each in self.principals.values() if each.key_id == key_id]
        return found[0] if found else None
