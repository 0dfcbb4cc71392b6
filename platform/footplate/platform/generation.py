"""One request's run at the engines: submit, decode, end, give back. Knows no HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from footplate.engine.errors import EngineDead, EngineOverloaded
from footplate.engine.text.choice import ChoiceDecoder, TextPiece
from footplate.engine.types import EngineRequest, FinishReason, SequenceDelta, TokenLogprob, TokenUsage
from footplate.platform.metrics import EngineLatencies
from footplate.platform.ports import Generation, InferenceClient, Journey

_FAILED = (FinishReason.ERROR, FinishReason.ABORT)


class Choice:
    """One answer of a response, numbered over all its prompts."""

    __slots__ = ("decoder", "index")

    def __init__(self, index: int, decoder: ChoiceDecoder) -> None:
        self.index = index
        self.decoder = decoder


class PromptRun:
    """One prompt of a request, its choices, and what is known of it so far."""

    def __init__(self, request: EngineRequest, choices: Sequence[Choice], text: str | None = None) -> None:
        self.request = request
        self.choices = choices
        self.text = text  # as the client wrote it; None when it sent ids
        self.cached_tokens = 0
        self.prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
        self.num_open = len(choices)
        self.has_begun = False
        self.last_token_at: float | None = None


class Sink(Protocol):
    """Where a run's text goes. `begin` comes once for each prompt, before its first piece."""

    def begin(self, prompt: PromptRun) -> None: ...

    def piece(self, choice: Choice, piece: TextPiece) -> None: ...

    def end(self, choice: Choice) -> None: ...


@dataclass(frozen=True, slots=True)
class PromptUsage:
    """Tokens of one prompt that an engine has begun; `cached` is part of `prompt`."""

    engine: str
    prompt: int
    cached: int
    output: int
    # None: the model that the request was led to.
    model: str | None = None
    # Why this model was asked, or left, where a route decided that.
    reason: str = ""
    # Its answer was thrown away, or broke off, and another model was asked.
    is_left: bool = False
    has_failed: bool = False
    # Whether `output` is all that was made.
    is_exact: bool = True


class RequestRun(Protocol):
    """What an admitted request runs: `Run`, or a `CascadeRun` of two. See there."""

    @property
    def prompts(self) -> Sequence[PromptRun]: ...

    @property
    def alternatives(self) -> Sequence[tuple[str, Sequence[EngineRequest]]]:
        """The models of which one answers, and what each would be asked for; the first is asked first."""
        ...

    @property
    def served_model(self) -> str:
        """The model that answers, as far as that is decided."""
        ...

    @property
    def has_begun(self) -> bool: ...

    @property
    def first_token_s(self) -> float | None: ...

    @property
    def journeys(self) -> Sequence[Journey]: ...

    async def open(self) -> None: ...

    async def drain(self, sink: Sink, flush: Callable[[], Awaitable[None]] = ...) -> None: ...

    async def cancel(self) -> bool: ...

    async def close(self) -> None: ...

    def usage(self) -> TokenUsage: ...

    def usages(self) -> list[PromptUsage]: ...


@dataclass(slots=True)
class _Submitted:
    prompt: PromptRun
    generation: Generation
    latencies: EngineLatencies
    journey: Journey
    first: Sequence[SequenceDelta] = ()


async def _nothing() -> None:
    return None


class Run:
    """All prompts of one request. `open`, then `drain`, and `close` whatever happened.

    A drain that a `flush` has ended by an exception goes on where it was when it is called again.
    """

    def __init__(
        self,
        client: InferenceClient,
        model: str,
        prompts: Sequence[PromptRun],
        find_latencies: Callable[[str], EngineLatencies],
        clock: Callable[[], float] = time.perf_counter,
        reason: str = "",
        trace: bytes = b"",
        *,
        may_wait: bool = True,
    ) -> None:
        self._prompts = prompts
        self._trace = trace
        # Not where another model answers in this one's place.
        self._may_wait = may_wait
        self._journeys: list[Journey] = []
        self._reason = reason
        self._client = client
        self._model = model
        self._find_latencies = find_latencies
        self._clock = clock
        self._begin = clock()
        self._submitted: list[_Submitted] = []
        self._has_begun = False
        self._first_token_s: float | None = None

    @property
    def prompts(self) -> Sequence[PromptRun]:
        """The prompts, in the order of their choices."""
        return self._prompts

    @property
    def first_token_s(self) -> float | None:
        """Since the request came; None before the first token."""
        return self._first_token_s

    @property
    def journeys(self) -> Sequence[Journey]:
        """Which replicas were asked for each prompt, and what became of it."""
        return self._journeys

    @property
    def alternatives(self) -> Sequence[tuple[str, Sequence[EngineRequest]]]:
        """As `RequestRun.alternatives`: the one model."""
        return ((self._model, [prompt.request for prompt in self._prompts]),)

    @property
    def served_model(self) -> str:
        """The model that answers."""
        return self._model

    @property
    def has_begun(self) -> bool:
        """Whether an engine has accepted any of it."""
        return self._has_begun

    async def open(self) -> None:
        """Submit every prompt and wait for the first tokens, so that what is refused is refused here.

        Raises:
            InvalidRequest, EngineOverloaded: as the engines say.
            EngineDead: the replica failed before the first token.
        """
        for prompt in self.prompts:
            journey = Journey(self._model, self._trace, self._may_wait)
            self._journeys.append(journey)
            generation = await self._submit(prompt.request, journey)
            self._has_begun = True
            latencies = self._find_latencies(generation.engine)
            self._submitted.append(_Submitted(prompt, generation, latencies, journey))
        first = self._submitted[0]
        first.first = await self._next(first)
        for delta in first.first:
            if delta.finish_reason in _FAILED:
                raise EngineDead(delta.error or "the engine gave the request up")

    async def _submit(self, request: EngineRequest, journey: Journey) -> Generation:
        try:
            return await self._client.submit(self._model, request, journey)
        except EngineDead:
            # Nothing has run yet, so this is a matter of waiting for a replica.
            raise EngineOverloaded("No replica of this model is running now; try again.", 5) from None

    async def drain(self, sink: Sink, flush: Callable[[], Awaitable[None]] = _nothing) -> None:
        """Give everything to `sink`; `flush` is awaited after each batch of deltas.

        Raises:
            EngineDead: a replica failed before all choices had ended.
        """
        if len(self._submitted) == 1:
            await self._drain_one(self._submitted[0], sink, flush)
            return
        lock = asyncio.Lock()

        async def flush_alone() -> None:
            async with lock:
                await flush()

        try:
            async with asyncio.TaskGroup() as group:
                for submitted in self._submitted:
                    group.create_task(self._drain_one(submitted, sink, flush_alone))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def cancel(self) -> bool:
        """Abort what still runs, and count all that was made of it; whether that is known exactly."""
        return all(await asyncio.gather(*(self._cancel_one(entry) for entry in self._submitted)))

    async def close(self) -> None:
        """Abort what still runs and note how long the request took. Safe at any time."""
        submitted, self._submitted = self._submitted, []
        if submitted:
            submitted[0].latencies.request.observe(self._clock() - self._begin)
        for entry in submitted:
            _note_begin(entry)
            await entry.generation.close()

    def usage(self) -> TokenUsage:
        """Tokens so far: prompts once each, and every token delivered or that ended an answer."""
        return TokenUsage(
            prompt_tokens=sum(len(prompt.request.prompt_token_ids) for prompt in self.prompts),
            completion_tokens=sum(
                choice.decoder.num_tokens for prompt in self.prompts for choice in prompt.choices
            ),
            cached_tokens=sum(prompt.cached_tokens for prompt in self.prompts),
        )

    def usages(self) -> list[PromptUsage]:
        """What engines have begun, a prompt each; to be asked before `close`."""
        return [
            PromptUsage(
                entry.generation.engine,
                len(entry.prompt.request.prompt_token_ids),
                entry.prompt.cached_tokens,
                sum(choice.decoder.num_tokens for choice in entry.prompt.choices),
                self._model,
                self._reason,
            )
            for entry in self._submitted
        ]

    async def _cancel_one(self, submitted: _Submitted) -> bool:
        prompt = submitted.prompt
        deltas = await submitted.generation.cancel() if prompt.num_open else ()
        if not prompt.has_begun:
            # What came while the client left.
            self._count(submitted, submitted.first)
        if deltas is None:
            return False
        self._count(submitted, deltas)
        # Without a word from the engine nobody knows how much of the prompt was in its cache.
        return prompt.has_begun

    def _count(self, submitted: _Submitted, deltas: Sequence[SequenceDelta]) -> None:
        """Tokens that nobody will read."""
        prompt = submitted.prompt
        if deltas and not prompt.has_begun:
            self._note_prompt(prompt, deltas)
        for delta in deltas:
            decoder = prompt.choices[delta.index].decoder
            if decoder.finish_reason is None:
                decoder.push(delta)
                self._stop_if_decided(submitted, delta.index, delta)

    def _stop_if_decided(self, submitted: _Submitted, index: int, delta: SequenceDelta) -> None:
        """Tell the engine where an answer ended that it did not end itself, or ended only later."""
        decoder = submitted.prompt.choices[index].decoder
        if decoder.finish_reason is not None and (
            delta.finish_reason is None or isinstance(decoder.stop_reason, str)
        ):
            submitted.generation.stop(index, decoder.num_tokens)

    async def _next(self, submitted: _Submitted) -> Sequence[SequenceDelta]:
        deltas = await submitted.generation.next()
        if not deltas:
            raise EngineDead("the engine ended the request before its answers were complete")
        return deltas

    async def _drain_one(
        self, submitted: _Submitted, sink: Sink, flush: Callable[[], Awaitable[None]]
    ) -> None:
        while submitted.prompt.num_open:
            deltas = submitted.first or await self._next(submitted)
            submitted.first = ()
            self._take(submitted, deltas, sink)
            await flush()

    def _take(self, submitted: _Submitted, deltas: Sequence[SequenceDelta], sink: Sink) -> None:
        prompt = submitted.prompt
        if not prompt.has_begun:
            self._begin_prompt(prompt, deltas, sink)
        num_tokens = 0
        for delta in deltas:
            choice = prompt.choices[delta.index]
            decoder = choice.decoder
            if decoder.finish_reason is not None:
                continue  # tokens that were on their way when a stop string ended the choice
            num_tokens += len(delta.token_ids)
            for piece in decoder.push(delta):
                sink.piece(choice, piece)
            if decoder.finish_reason is not None:
                self._end_choice(submitted, choice, delta, sink)
        if num_tokens:
            self._note_tokens(submitted, num_tokens)

    def _begin_prompt(self, prompt: PromptRun, deltas: Sequence[SequenceDelta], sink: Sink) -> None:
        self._note_prompt(prompt, deltas)
        sink.begin(prompt)

    def _note_prompt(self, prompt: PromptRun, deltas: Sequence[SequenceDelta]) -> None:
        prompt.has_begun = True
        for delta in deltas:
            prompt.cached_tokens = max(prompt.cached_tokens, delta.cached_tokens)
            if delta.prompt_logprobs is not None:
                prompt.prompt_logprobs = delta.prompt_logprobs

    def _end_choice(self, submitted: _Submitted, choice: Choice, delta: SequenceDelta, sink: Sink) -> None:
        if choice.decoder.finish_reason in _FAILED:
            raise EngineDead(choice.decoder.error or "the engine gave the request up")
        self._stop_if_decided(submitted, delta.index, delta)
        submitted.prompt.num_open -= 1
        sink.end(choice)

    def _note_tokens(self, submitted: _Submitted, num_tokens: int) -> None:
        now = self._clock()
        prompt, latencies = submitted.prompt, submitted.latencies
        if prompt.last_token_at is None:
            latencies.first_token.observe(now - self._begin)
            if self._first_token_s is None:
                self._first_token_s = now - self._begin
        else:
            latencies.token_gap.observe((now - prompt.last_token_at) / num_tokens, num_tokens)
        prompt.last_token_at = now


def _note_begin(entry: _Submitted) -> None:
    """How long the engine took until the first token, as it says itself."""
    placements = entry.journey.placements
    begun = placements[-1].begun if placements else None
    if begun is not None:
        entry.latencies.queue.observe(begun.queue_s)
        entry.latencies.prefill.observe(begun.prefill_s)
