"""What the endpoints share: the ports, the pipelines, the metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from starlette.requests import Request

from footplate.engine.text.pipeline import TextPipeline
from footplate.engine.types import BATCH_PRIORITY, ModelCard
from footplate.platform.access import INFERENCE_ROLES, authenticate
from footplate.platform.admission import Admission, Terms, authorise
from footplate.platform.admitted_run import AdmittedRun
from footplate.platform.errors import UnsupportedParameter
from footplate.platform.generation import PromptRun, Run
from footplate.platform.http.edge import note_model
from footplate.platform.http.in_process import CALLER, InProcessCaller
from footplate.platform.idempotency import checked_key
from footplate.platform.large_work import TenantThreads
from footplate.platform.metering import RequestFacts
from footplate.platform.metrics import GatewayMetrics
from footplate.platform.models import PipelineProvider, find_model
from footplate.platform.ports import Authenticator, InferenceClient, Principal


@dataclass(frozen=True, slots=True)
class Gateway:
    """The gateway's parts, as the endpoints need them."""

    client: InferenceClient
    authenticator: Authenticator
    pipelines: PipelineProvider
    metrics: GatewayMetrics
    admission: Admission
    clock: Callable[[], float] = field(default=time.perf_counter)
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
        return await authenticate(request.headers, self.authenticator, roles)

    async def model(
        self, request: Request, principal: Principal, name: str
    ) -> tuple[ModelCard, TextPipeline]:
        """A served model that the principal may use, and its text pipeline.

        Raises:
            ModelNotFound: no such name or alias, or the principal may not use what finally answers.
            LoadError: its tokenizer can't be used.
        """
        card = find_model(self.client.models(), name)
        authorise(principal, card)
        note_model(request.scope, card.name)
        return card, self.pipelines.loaded(card) or await self.pipelines.get(card)

    def terms(self, request: Request, principal: Principal, card: ModelCard) -> Terms:
        """As `Admission.terms`; a batch's lines come after all that somebody waits for."""
        terms = self.admission.terms(principal, card)
        if _in_process(request) is None:
            return terms
        return replace(terms, priority=BATCH_PRIORITY + max(0, terms.priority))

    def run(
        self,
        request: Request,
        principal: Principal,
        requested_model: str,
        card: ModelCard,
        terms: Terms,
        prompts: Sequence[PromptRun],
    ) -> AdmittedRun:
        """A request's run under its tenant's limits, not yet begun."""
        find_latencies = partial(self.metrics.latencies, card.name)
        run = Run(self.client, card.name, prompts, find_latencies, self.clock)
        scope, caller = request.scope, _in_process(request)
        endpoint: str = scope["route"].path
        facts = RequestFacts(
            scope["footplate.request_id"],
            principal,
            requested_model,
            card,
            endpoint,
            request.headers.get("idempotency-key"),
            None if caller is None else caller.line,
        )
        admitted = AdmittedRun(run, self.admission, terms, facts)
        if caller is not None:
            caller.run = admitted
        return admitted


def _in_process(request: Request) -> InProcessCaller | None:
    return request.scope.get(CALLER)
