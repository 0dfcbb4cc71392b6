"""A run under its tenant's limits: reserve, run, meter, settle, whatever happens. Knows no HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from footplate.billing.usage import EventSkeleton, EventState, UsageEvent
from footplate.engine.types import EngineRequest, TokenUsage
from footplate.platform.admission import Admission, Admitted, Needed, Terms
from footplate.platform.capture.recorder import Hearing
from footplate.platform.errors import AnswerNotRead
from footplate.platform.generation import PromptRun, RequestRun, Sink
from footplate.platform.metering import RequestFacts
from footplate.platform.telemetry.inference import InferenceRecord
from footplate.tenancy.limiter.decisions import LimitState


def needed_for(requests: Sequence[EngineRequest]) -> Needed:
    """What requests use at most: every prompt, and for each choice all that it may answer."""
    return Needed(
        sum(len(request.prompt_token_ids) for request in requests),
        sum(request.params.n * (request.params.max_tokens or 0) for request in requests),
    )


class AdmittedRun:
    """`open`, then `drain` once, and `close` whatever happened; see `Run`.

    Whatever an engine has begun ends as exactly one usage event. Nothing of it is waited for.
    """

    def __init__(
        self,
        run: RequestRun,
        admission: Admission,
        terms: Terms,
        facts: RequestFacts,
        record: InferenceRecord,
        hearing: Hearing | None = None,
    ) -> None:
        self._run = run
        self.record = record
        # Of a tenant whose prompts and answers may be kept.
        self._hearing = hearing
        self._admission = admission
        self._terms = terms
        self._facts = facts
        self._admitted = Admitted()
        self._skeleton: EventSkeleton | None = None
        # None: no more is known than that it did not come to its end.
        self._state: EventState | None = None
        self._is_over = False
        self._has_claim = False
        # What is made up of a client that left is ended by a task of its own.
        self._ending: asyncio.Task[None] | None = None

    @property
    def prompts(self) -> Sequence[PromptRun]:
        """The prompts, in the order of their choices."""
        return self._run.prompts

    @property
    def states(self) -> tuple[LimitState, ...]:
        """The limits as they stood when the request was admitted."""
        return self._admitted.states

    @property
    def is_over_soft_budget(self) -> bool:
        """Whether a soft budget is passed: the answer says so."""
        return self._admitted.is_over_soft_budget

    @property
    def served_model(self) -> str:
        """The model that answers; fixed once `open` has returned."""
        return self._run.served_model

    @property
    def is_routed(self) -> bool:
        """Whether a route has chosen that model: the answer says so."""
        return self._facts.cascade is not None

    @property
    def request_id(self) -> str:
        """As `settlement.Running.request_id`."""
        return self._facts.request_id

    def usage(self) -> TokenUsage:
        """As `Run.usage`."""
        return self._run.usage()

    async def open(self) -> None:
        """Reserve, submit, and wait for the first tokens.

        Raises:
            LimitRefused: a limit does not admit it.
            MeteringUnavailable: what it would use can't be recorded.
            RequestRepeated: another request came first under its Idempotency-Key.
            EngineError: as `Run.open`.
        """
        # Of several models one answers, and nobody pays for more than that.
        needed = {model: needed_for(requests) for model, requests in self._run.alternatives}
        metering = self._admission.metering
        try:
            if metering is not None:
                metering.check_room()
                self._skeleton = metering.begin(self._facts, needed[self._run.served_model].num_prompt)
            await self._claim()
            self._admitted = await self._admission.reserve(self._terms, needed, self)
            self.record.admitted_at = self.record.clock()
            await self._run.open()
            hold = self._admitted.hold
            if hold is not None and hold.leasing is not None:
                # No token leaves before somebody else could tell of it.
                await asyncio.shield(hold.leasing)
        except asyncio.CancelledError:
            self._state = EventState.CLIENT_CANCELLED
            raise
        except Exception as error:
            self.record.error = type(error).__name__
            raise

    async def _claim(self) -> None:
        claims, key = self._admission.claims, self._facts.idempotency_key
        if claims is not None and key is not None:
            # Also a claim whose answer nobody waits for any more is this request's, and freed with it.
            self._has_claim = True
            await claims.claim(self._terms.tenant_id, key, self.request_id)

    async def drain(self, sink: Sink, flush: Callable[[], Awaitable[None]] | None = None) -> None:
        """Give everything to `sink`. Raises as `Run.drain`."""
        if self._hearing is not None:
            sink = self._hearing.beside(sink)
        try:
            await (self._run.drain(sink) if flush is None else self._run.drain(sink, flush))
        except (asyncio.CancelledError, AnswerNotRead):
            self._state = EventState.CLIENT_CANCELLED
            raise
        except Exception as error:
            self.record.error = type(error).__name__
            raise
        self._state = EventState.COMPLETED

    async def close(self) -> None:
        """End what still runs and what is still held: after the last byte. Safe at any time."""
        if self._is_over:
            return
        self._is_over = True
        hold, settlement = self._admitted.hold, self._admission.settlement
        if not self._run.has_begun:
            if hold is not None:
                settlement.release(hold)
            claims, key = self._admission.claims, self._facts.idempotency_key
            if self._has_claim and claims is not None and key is not None:
                settlement.spawn(claims.release(self._terms.tenant_id, key, self.request_id))
            await self._close_run()
        elif self._state is EventState.CLIENT_CANCELLED:
            # What the engine made until it heard of it is on its way; nobody waits for that here.
            self._ending = settlement.spawn(self._end_cancelled())
        else:
            self._end(self._state or EventState.FAILED, is_exact=self._state is EventState.COMPLETED)
            await self._close_run()

    def completed_event(self) -> UsageEvent | None:
        """The event of its whole answer, to be kept with that answer; None where nothing is metered."""
        metering = self._admission.metering
        if metering is None or self._skeleton is None:
            return None
        return metering.end(self._skeleton, self._run, EventState.COMPLETED, is_exact=True)

    async def until_recorded(self) -> None:
        """After `close`: wait until its event, if it becomes one, is durable."""
        if self._ending is not None:
            await asyncio.shield(self._ending)
        hold = self._admitted.hold
        if hold is not None and hold.durable is not None:
            await asyncio.shield(hold.durable)

    async def _end_cancelled(self) -> None:
        is_exact = await self._run.cancel()
        self._end(EventState.CLIENT_CANCELLED, is_exact=is_exact)
        await self._close_run()

    async def _close_run(self) -> None:
        await self._run.close()
        # Behind it, since what engines said of their work is known by then; usage and choices stay.
        self.record.ended(self._run, self._state)
        if self._hearing is not None:
            self._hearing.ended(self._run, self.record, self._state)

    def _end(self, state: EventState, *, is_exact: bool) -> None:
        hold, metering = self._admitted.hold, self._admission.metering
        event = None
        if metering is not None and self._skeleton is not None:
            line = self._facts.line
            is_final = line is None or line.is_final
            event = metering.end(self._skeleton, self._run, state, is_exact=is_exact, is_final=is_final)
            self._tell_savings(event)
        settlement = self._admission.settlement
        if hold is None:
            return
        if state is EventState.FAILED and not self._run.usage().completion_tokens:
            # One that the engine fails gets nothing for it, and it counts for nothing.
            settlement.release(hold, event)
        else:
            settlement.settle(hold, self.used_so_far(), event)

    def _tell_savings(self, event: UsageEvent) -> None:
        cascade, budgets = self._facts.cascade, self._admission.budgets
        if cascade is None:
            return
        prices = None if budgets is None else budgets.book
        self._admission.cascades.ended(cascade, event, prices)

    def used_so_far(self) -> int:
        """As `settlement.Running.used_so_far`."""
        return self._terms.count(self._run.usage())

    def note(self) -> bytes:
        """As `settlement.Running.note`."""
        return b"" if self._skeleton is None else self._skeleton.to_bytes()

    def progress(self) -> bytes:
        """As `settlement.Running.progress`."""
        metering = self._admission.metering
        if metering is None or self._skeleton is None or not self._run.has_begun:
            return b""
        return metering.progress(self._skeleton, self._run)
