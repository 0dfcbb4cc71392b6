"""One request at two models: the small one is asked, and the large one answers in its place where need be.

Nothing of the small model's answer leaves before it is known to be kept, so that the large one's is a plain
first answer. Which of the two it is stands fixed when `open` returns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from footplate.engine.errors import EngineError
from footplate.engine.text.choice import TextPiece
from footplate.engine.types import EngineRequest, TokenUsage
from footplate.platform.generation import Choice, PromptRun, PromptUsage, Run, Sink
from footplate.platform.ports import Journey
from footplate.routing.cascade import CascadeReason, ConfidenceGate, Decision, Target


class _Decided(Exception):
    """Enough was heard of the small model's answer."""


class _HeardSink:
    """Gives an answer on to its sink, and the log-probabilities of its tokens to the gate."""

    def __init__(self, sink: Sink, gate: ConfidenceGate) -> None:
        self._sink = sink
        self._gate = gate

    def begin(self, prompt: PromptRun) -> None:
        self._sink.begin(prompt)

    def piece(self, choice: Choice, piece: TextPiece) -> None:
        self._gate.hear(choice.index, [entry.logprob for entry in piece.logprobs])
        self._sink.piece(choice, piece)

    def end(self, choice: Choice) -> None:
        self._gate.end(choice.index)
        self._sink.end(choice)


async def _nothing() -> None:
    return None


class CascadeRun:
    """As `Run`, of two. `small_sink` gets the small model's answer from the start; `drain` goes on with it.

    `planned` is what the prompt alone has decided. `gate` None: the small model answers whatever it says, and
    the large one only where it can't. `told` hears of the decision, once.
    """

    def __init__(
        self,
        small: Run,
        small_sink: Sink,
        large: Run,
        planned: Decision,
        gate: ConfidenceGate | None,
        told: Callable[[Decision], None],
    ) -> None:
        self._small = small
        self._large = large
        self._gate = gate
        self._sink = small_sink if gate is None else _HeardSink(small_sink, gate)
        self._planned = planned
        self._told = told
        self._answering = small
        self._decision: Decision | None = None
        # While what the small model made before it was left is still being counted.
        self._leaving: asyncio.Task[None] | None = None
        # What it had made, and whether that is all.
        self._left: list[PromptUsage] | None = None
        self._is_left_known = False

    @property
    def prompts(self) -> Sequence[PromptRun]:
        """As `Run.prompts`, of the model that answers."""
        return self._answering.prompts

    @property
    def alternatives(self) -> Sequence[tuple[str, Sequence[EngineRequest]]]:
        """As `RequestRun.alternatives`."""
        return (*self._small.alternatives, *self._large.alternatives)

    @property
    def served_model(self) -> str:
        """As `RequestRun.served_model`."""
        return self._answering.served_model

    @property
    def has_begun(self) -> bool:
        """Whether an engine has accepted any of it."""
        return self._small.has_begun or self._large.has_begun

    @property
    def first_token_s(self) -> float | None:
        """Since the request came, with all that was tried before; None before the answer's first token."""
        return self._answering.first_token_s

    @property
    def journeys(self) -> Sequence[Journey]:
        """As `Run.journeys`, of both; what the small model was left for, or failed at, is said there."""
        journeys = (*self._small.journeys, *self._large.journeys)
        if self._decision is not None and self._answering is self._large:
            for journey in self._small.journeys:
                for placement in journey.placements:
                    if placement.outcome == "answered":
                        placement.outcome, placement.reason = "left", self._decision.reason.value
        return journeys

    async def open(self) -> None:
        """Ask the small model, decide, and wait for the first tokens of the one that answers.

        Raises:
            EngineError: as `Run.open`, of the large model.
        """
        self._decision = decision = await self._ask_small()
        self._told(decision)
        if decision.target is Target.SMALL:
            return
        self._answering = self._large
        self._leaving = asyncio.create_task(self._leave_small())
        try:
            await self._large.open()
        except EngineError:
            # What was tried belongs to the event of the failure.
            await self._until_left()
            raise

    async def drain(self, sink: Sink, flush: Callable[[], Awaitable[None]] = _nothing) -> None:
        """As `Run.drain`. `sink` is that of the model that answers."""
        try:
            if self._answering is self._small:
                # What was kept back, which may be all.
                await flush()
            await self._answering.drain(sink, flush)
        except Exception:
            await self._until_left()
            raise
        await self._until_left()

    async def cancel(self) -> bool:
        """As `Run.cancel`, of the model that answers; the other one's count is its own."""
        await self._until_left()
        return await self._answering.cancel()

    async def close(self) -> None:
        """As `Run.close`."""
        await self._until_left()
        await self._small.close()
        await self._large.close()

    def usage(self) -> TokenUsage:
        """As `Run.usage`, of the model that answers."""
        return self._answering.usage()

    def usages(self) -> list[PromptUsage]:
        """As `Run.usages`, of both; those of a model that was left are marked."""
        reason = (self._decision or self._planned).reason
        if self._answering is self._small:
            return [replace(usage, reason=reason.value) for usage in self._small.usages()]
        left = [
            replace(
                usage,
                reason=reason.value,
                is_left=True,
                has_failed=reason in (CascadeReason.SMALL_FAILED, CascadeReason.SMALL_REFUSED),
                is_exact=self._is_left_known,
            )
            for usage in (self._small.usages() if self._left is None else self._left)
        ]
        return [*left, *(replace(usage, reason=reason.value) for usage in self._large.usages())]

    async def _ask_small(self) -> Decision:
        try:
            await self._small.open()
            if self._gate is None:
                return self._planned
            await self._small.drain(self._sink, self._stop_when_decided)
        except _Decided:
            pass
        except EngineError:
            has_begun = self._small.has_begun
            reason = CascadeReason.SMALL_FAILED if has_begun else CascadeReason.SMALL_REFUSED
            return Decision(Target.LARGE, reason)
        assert self._gate is not None and self._gate.decision is not None, "every choice has ended"
        return self._gate.decision

    async def _stop_when_decided(self) -> None:
        assert self._gate is not None
        if self._gate.decision is not None:
            raise _Decided

    async def _leave_small(self) -> None:
        """End the small model's answer and count it, beside the large one's work."""
        try:
            self._is_left_known = await self._small.cancel()
        except EngineError:
            self._is_left_known = False
        self._left = self._small.usages()
        await self._small.close()

    async def _until_left(self) -> None:
        if self._leaving is not None:
            await asyncio.shield(self._leaving)
