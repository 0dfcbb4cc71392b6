"""What the endpoints share: the ports, the pipelines, the metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from starlette.requests import Request

from footplate.engine.errors import EngineOverloaded, InvalidRequest, LoadError
from footplate.engine.text.pipeline import TextPipeline
from footplate.engine.types import BATCH_PRIORITY, ModelCard
from footplate.platform.access import INFERENCE_ROLES, authenticate
from footplate.platform.admission import Admission, Terms, authorise, may_use, terms_of_either
from footplate.platform.admitted_run import AdmittedRun
from footplate.platform.capture.recorder import CaptureRecorder, Hearing
from footplate.platform.cascade_run import CascadeRun
from footplate.platform.errors import ModelNotFound, UnsupportedParameter
from footplate.platform.generation import RequestRun, Run
from footplate.platform.http.edge import TRACE, note_caller, note_model
from footplate.platform.http.in_process import CALLER, InProcessCaller
from footplate.platform.http.routed import Leg, Plan, PreparedLeg, leg_numbers
from footplate.platform.idempotency import checked_key
from footplate.platform.large_work import TenantThreads
from footplate.platform.metering import RequestFacts
from footplate.platform.metrics import GatewayMetrics
from footplate.platform.models import NO_SUCH_MODEL, PipelineProvider, find_model
from footplate.platform.ports import Authenticator, InferenceClient, Principal
from footplate.platform.routes import targets_of, usable_targets
from footplate.platform.telemetry.genai_metrics import GenAiMetrics
from footplate.platform.telemetry.inference import InferenceRecord
from footplate.routing.cascade import Cascade, CascadeReason, ConfidenceGate, Decision, Target, decide
from footplate.routing.prompt_facts import PromptFacts

# A model starts within seconds, or reports why it can't.
STARTING_RETRY_S = 2.0


@dataclass(frozen=True, slots=True)
class Gateway:
    """The gateway's parts, as the endpoints need them."""

    client: InferenceClient
    authenticator: Authenticator
    pipelines: PipelineProvider
    metrics: GatewayMetrics
    admission: Admission
    # Virtual models, by name.
    cascades: Mapping[str, Cascade] = field(default_factory=dict)
    clock: Callable[[], float] = field(default=time.perf_counter)
    genai: GenAiMetrics = field(default_factory=GenAiMetrics)
    # None where no prompt and no answer is ever kept.
    captures: CaptureRecorder | None = None
    # Two, so that what the one refuses for is not what answers of models wait for.
    tokens: TenantThreads = field(default_factory=partial(TenantThreads, "tokens", max_waiting=8))
    answers: TenantThreads = field(default_factory=partial(TenantThreads, "answers"))

    async def caller(self, request: Request) -> Principal:
        """Who asks for an answer of a model.

        Raises:
            AuthenticationFailed, PermissionDenied: see `authenticate`.
            LimitRefused: it may use nothing at all.
            InvalidRequest: its Idempotency-Key can't be one.
            UnsupportedParameter: it has one, and this gateway keeps no account of requests.
        """
        caller = _in_process(request)
        principal = await self.authenticate(request) if caller is None else caller.principal
        self.admission.refuse_at_once(principal)
        key = checked_key(request.headers.get("idempotency-key"))
        if key is not None and self.admission.claims is None:
            raise UnsupportedParameter("Idempotency-Key needs a database of requests.", "Idempotency-Key")
        return principal

    async def authenticate(
        self, request: Request, roles: frozenset[str] | None = INFERENCE_ROLES
    ) -> Principal:
        """The caller; `roles` None takes any key. Raises AuthenticationFailed or PermissionDenied."""
        principal = await authenticate(request.headers, self.authenticator, roles)
        note_caller(request.scope, principal)
        return principal

    async def model(
        self, request: Request, principal: Principal, name: str
    ) -> tuple[ModelCard, TextPipeline]:
        """A served model that the principal may use, and its text pipeline.

        Raises:
            ModelNotFound: no such name or alias, or the principal may not use what finally answers.
            InvalidRequest: it is a route, which is no one model.
            LoadError: its tokenizer can't be used.
        """
        models = self.client.models()
        if name in self.cascades:
            if usable_targets(self.cascades[name], principal, models) is None:
                raise ModelNotFound(NO_SUCH_MODEL)
            raise InvalidRequest("This is a route, which has no tokenizer; name one of its models.", "model")
        card = self._served(principal, name)
        authorise(principal, card)
        note_model(request.scope, card.name)
        return card, await self._pipeline(card)

    async def plan(
        self, request: Request, principal: Principal, name: str, facts: Callable[[Cascade], PromptFacts]
    ) -> Plan:
        """The models that may answer a request, each authorised. `facts` is asked where a route decides.

        Raises:
            ModelNotFound, LoadError: as `model`, for any model that has to answer.
        """
        cascade = self.cascades.get(name)
        if cascade is None:
            card, pipeline = await self.model(request, principal, name)
            return Plan(name, (Leg(card, pipeline, self.terms(request, principal, card)),))
        targets = targets_of(cascade, decide(cascade, facts(cascade)), principal, self.client.models())
        decision = targets.decision
        note_model(request.scope, targets.cards[0].name)
        legs: list[Leg] = []
        for number, (card, first) in enumerate(
            zip(targets.cards, leg_numbers(len(targets.cards)), strict=True)
        ):
            is_heard = decision.target is Target.SMALL_FIRST and number == 0
            # Of two, one has to be there: the large one where it may have to answer.
            is_optional = len(targets.cards) > 1 and (number == 0 or decision.target is Target.SMALL)
            try:
                pipeline = await self._pipeline(card)
            except LoadError:
                if not is_optional or (number > 0 and not legs):
                    note_model(request.scope, card.name)
                    raise
                continue
            terms = self.terms(request, principal, card)
            legs.append(Leg(card, pipeline, terms, is_heard, is_optional, first))
        if legs[0].card is not targets.cards[0]:
            decision = Decision(Target.LARGE, CascadeReason.SMALL_REFUSED)
        return Plan(name, tuple(legs), cascade, decision)

    def _served(self, principal: Principal, name: str) -> ModelCard:
        """The model of that name or alias. Raises EngineOverloaded for one that is still to come."""
        try:
            return find_model(self.client.models(), name)
        except ModelNotFound:
            for coming in self.client.starting():
                if name in (coming.name, *coming.aliases) and may_use(principal, coming):
                    raise EngineOverloaded(
                        "no replica of this model serves yet; try again in a moment", STARTING_RETRY_S
                    ) from None
            raise

    async def _pipeline(self, card: ModelCard) -> TextPipeline:
        return self.pipelines.loaded(card) or await self.pipelines.get(card)

    def terms(self, request: Request, principal: Principal, card: ModelCard) -> Terms:
        """As `Admission.terms`; a batch's lines come after all that somebody waits for."""
        terms = self.admission.terms(principal, card)
        if _in_process(request) is None:
            return terms
        return replace(terms, priority=BATCH_PRIORITY + max(0, terms.priority))

    def run(
        self, request: Request, principal: Principal, plan: Plan, legs: Sequence[PreparedLeg]
    ) -> AdmittedRun:
        """A request's run under its tenant's limits, not yet begun."""
        scope, caller = request.scope, _in_process(request)
        endpoint: str = scope["route"].path
        first = legs[0].leg
        facts = RequestFacts(
            scope["footplate.request_id"],
            principal,
            plan.requested_model,
            first.card,
            endpoint,
            request.headers.get("idempotency-key"),
            None if caller is None else caller.line,
            plan.cascade,
        )
        terms = first.terms
        for other in legs[1:]:
            terms = terms_of_either(terms, other.leg.terms)
        record = InferenceRecord.begin(scope.get(TRACE), self.genai, facts)
        hearing = None
        if self.captures is not None and principal.captures_content:
            hearing = self.captures.begin(facts, {each.leg.card.name: each.leg.pipeline for each in legs})
        request_run = self._request_run(plan, legs, record.context, hearing)
        admitted = AdmittedRun(request_run, self.admission, terms, facts, record, hearing)
        if caller is not None:
            caller.run = admitted
        return admitted

    def _request_run(
        self, plan: Plan, legs: Sequence[PreparedLeg], trace: bytes, hearing: Hearing | None
    ) -> RequestRun:
        cascade, decision = plan.cascade, plan.decision
        reason = "" if decision is None else decision.reason.value
        runs = [
            Run(
                self.client,
                each.leg.card.name,
                each.prompts,
                partial(self.metrics.latencies, each.leg.card.name),
                self.clock,
                reason,
                trace,
                may_wait=each is legs[-1],
            )
            for each in legs
        ]
        if cascade is None or decision is None:
            return runs[0]
        told = partial(self.admission.cascades.decided, cascade)
        if len(runs) == 1:
            told(_final(decision))
            return runs[0]
        gate = None
        if legs[0].leg.is_heard:
            num_choices = sum(len(prompt.choices) for prompt in legs[0].prompts)
            gate = ConfidenceGate(num_choices, cascade.threshold, cascade.after_tokens)
        # What is kept back until the decision is heard too; of one that is left nothing is kept.
        sink = legs[0].sink if hearing is None else hearing.beside(legs[0].sink)
        return CascadeRun(runs[0], sink, runs[1], decision, gate, told)


def _final(decision: Decision) -> Decision:
    assert decision.target is not Target.SMALL_FIRST, "then there are two"
    return decision


def _in_process(request: Request) -> InProcessCaller | None:
    return request.scope.get(CALLER)
