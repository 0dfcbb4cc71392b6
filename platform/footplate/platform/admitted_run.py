"""A run under its tenant's limits: reserve, run, settle, whatever happens. Knows no HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from footplate.engine.types import EngineRequest, TokenUsage
from footplate.platform.admission import Admission, Admitted, Terms
from footplate.platform.generation import PromptRun, Run, Sink
from footplate.tenancy.limiter.decisions import LimitState

# Tokens of a choice that an engine may still make before it hears that the client has left.
MAX_UNSEEN_TOKENS = 2


def tokens_needed(requests: Sequence[EngineRequest]) -> int:
    """What requests use at most: every prompt, and for each choice all that it may answer."""
    return sum(
        len(request.prompt_token_ids) + request.params.n * (request.params.max_tokens or 0)
        for request in requests
    )


class AdmittedRun:
    """`open`, then `drain` once, and `close` whatever happened; see `Run`."""

    def __init__(self, run: Run, admission: Admission, terms: Terms, request_id: str) -> None:
        self._run = run
        self._admission = admission
        self._terms = terms
        self._request_id = request_id
        self._admitted = Admitted()
        self._is_cancelled = False

    @property
    def prompts(self) -> Sequence[PromptRun]:
        """The prompts, in the order of their choices."""
        return self._run.prompts

    @property
    def states(self) -> tuple[LimitState, ...]:
        """The limits as they stood when the request was admitted."""
        return self._admitted.states

    def usage(self) -> TokenUsage:
        """As `Run.usage`."""
        return self._run.usage()

    async def open(self) -> None:
        """Reserve, submit, and wait for the first tokens.

        Raises:
            LimitRefused: a limit does not admit it.
            EngineError: as `Run.open`.
        """
        needed = tokens_needed([prompt.request for prompt in self._run.prompts])
        try:
            self._admitted = await self._admission.reserve(
                self._terms, self._request_id, needed, self._used_so_far
            )
            await self._run.open()
        except asyncio.CancelledError:
            self._is_cancelled = True
            raise

    async def drain(self, sink: Sink, flush: Callable[[], Awaitable[None]] | None = None) -> None:
        """Give everything to `sink`, and settle: the usage is exact. Raises as `Run.drain`."""
        try:
            await (self._run.drain(sink) if flush is None else self._run.drain(sink, flush))
        except asyncio.CancelledError:
            self._is_cancelled = True
            raise
        if self._admitted.hold is not None:
            self._admission.settlement.settle(self._admitted.hold, self._used_so_far())

    async def close(self) -> None:
        """End what still runs and what is still held. Safe at any time."""
        hold = self._admitted.hold
        if hold is not None and hold.is_open:
            self._end_early()
        await self._run.close()

    def _end_early(self) -> None:
        """Nothing was promised and little is known: a request that did not begin counts for nothing."""
        hold = self._admitted.hold
        assert hold is not None
        usage = self._run.usage()
        # A client that leaves has had its prompt computed; one that the engine fails gets nothing for it.
        if not self._run.has_begun or not (usage.completion_tokens or self._is_cancelled):
            self._admission.settlement.release(hold)
            return
        seen = self._used_so_far()
        unseen = MAX_UNSEEN_TOKENS * sum(prompt.num_open for prompt in self._run.prompts)
        self._admission.settlement.settle(hold, max(seen, min(seen + unseen, hold.num_tokens)))

    def _used_so_far(self) -> int:
        return self._terms.count(self._run.usage())
