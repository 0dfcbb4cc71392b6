"""Whether a request may run, on what terms, and how much of its tenant's limits is held for it meanwhile."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn, TypeVar

from footplate.billing.errors import PriceMissing
from footplate.engine.types import BATCH_PRIORITY, ModelCard, TokenUsage
from footplate.platform.budgets import Budgets, HolderBudget, LedgerAway, budgets_of, exceeded_soft, shown
from footplate.platform.cascade_metrics import CascadeMetrics
from footplate.platform.errors import LimitRefused, ModelNotFound
from footplate.platform.idempotency import RequestClaims
from footplate.platform.metering import Metering
from footplate.platform.metrics import LimitMetrics
from footplate.platform.models import NO_SUCH_MODEL
from footplate.platform.ports import ModelNames, Principal
from footplate.platform.settlement import Hold, Running, Settlement
from footplate.tenancy.errors import SpendUnknown
from footplate.tenancy.limiter.decisions import (
    Amounts,
    BudgetState,
    Decision,
    LimitState,
    Refusal,
    RefusalKind,
    Spending,
)
from footplate.tenancy.limiter.limits import TOKEN_KINDS, Limit, LimitKind, Scope, limits_for
from footplate.tenancy.limiter.local import LocalLimiter
from footplate.tenancy.limiter.reservations import Limiter
from footplate.tenancy.quotas import MAX_PRIORITY, MAX_WEIGHT, UNLIMITED, LimitMode, Quota

MAX_CACHED_TERMS = 10_000
# When to try again what only requests that run keep from its budget.
BUDGET_RETRY_S = 2
_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True, slots=True)
class Terms:
    """What the quotas of a tenant and of its key come to for one model.

    A key's quota narrows its tenant's and never widens it: whoever may set a key's can't set the tenant's.
    """

    tenant_id: str
    limits: tuple[Limit, ...] = ()
    # Prompt and answer together; None: as much as the model holds.
    max_context_tokens: int | None = None
    # The smallest whole token limit: a request that needs more can never run.
    max_reserved_tokens: int | None = None
    is_out_of_budget: bool = False
    budgets: tuple[HolderBudget, ...] = ()
    priority: int = 0  # as the engine has it: lower runs first
    weight: float = 1.0
    cached_token_weight: float = 1.0

    def count(self, usage: TokenUsage) -> int:
        """What a usage counts for in token limits: cached input by its weight, rounded up."""
        cached = math.ceil(usage.cached_tokens * self.cached_token_weight)
        return usage.total_tokens - usage.cached_tokens + cached


def terms_of(principal: Principal, card: ModelCard) -> Terms:
    """The terms on which a principal uses a model that it may use.

    An alias in a quota means its model; where the name and an alias both have limits, all of them hold.
    """
    tenant, key = principal.tenant_quota, principal.key_quota or UNLIMITED
    quotas = (tenant, key)
    names = _names(card)
    limits = tuple(
        dict.fromkeys(
            limit
            for name in names
            for limit in limits_for(
                principal.tenant_id,
                principal.key_id,
                name,
                tenant_quota=tenant,
                key_quota=principal.key_quota,
            )
        )
    )
    of_model = [quota.per_model[name] for quota in quotas for name in names if name in quota.per_model]
    enforced = [quota for quota in (*quotas, *of_model) if quota.mode is LimitMode.ENFORCE]
    token_limits = [limit for limit in limits if limit.is_enforced and limit.kind in TOKEN_KINDS]
    return Terms(
        principal.tenant_id,
        limits,
        max_context_tokens=_least(quota.max_context_tokens for quota in enforced),
        max_reserved_tokens=_least(limit.max_amount for limit in token_limits),
        # Of nothing everything is spent, whatever the prices are.
        is_out_of_budget=any(quota.monthly_budget_pico == 0 for quota in enforced),
        budgets=budgets_of(tenant, principal.key_quota, principal.key_id),
        # What a tenant leaves unset is the default, and that too is narrowed only.
        priority=max(_given(0, tenant.priority), _given(-MAX_PRIORITY, key.priority)),
        weight=min(_given(1.0, tenant.weight), _given(MAX_WEIGHT, key.weight)),
        cached_token_weight=max(
            _given(1.0, tenant.cached_token_weight),
            _given(0.0, key.cached_token_weight),
        ),
    )


def terms_of_either(first: Terms, second: Terms) -> Terms:
    """The terms of one request that either of two models may answer: what limits one of them limits it.

    A limit of one model's own counts the request whichever answers. All else is of the caller, not the model.
    """
    return replace(
        first,
        limits=tuple(dict.fromkeys((*first.limits, *second.limits))),
        max_context_tokens=None,  # each model's prompt was held to its own
        max_reserved_tokens=_least((first.max_reserved_tokens, second.max_reserved_tokens)),
        is_out_of_budget=first.is_out_of_budget or second.is_out_of_budget,
    )


def authorise(principal: Principal, card: ModelCard) -> None:
    """Raises ModelNotFound unless both quotas let the principal use the model that finally answers.

    This is access, so it holds for quotas in shadow mode too; and it looks like a model that is not there.
    """
    if not may_use(principal, card):
        raise ModelNotFound(NO_SUCH_MODEL)


def may_use(principal: Principal, card: ModelCard | ModelNames) -> bool:
    """Whether a principal may know of a model."""
    quotas = (principal.tenant_quota, principal.key_quota or UNLIMITED)
    return all(quota.allows(*_names(card)) for quota in quotas)


def _names(card: ModelCard | ModelNames) -> tuple[str, ...]:
    return (card.name, *card.aliases)


def _least(values: Iterable[int | None]) -> int | None:
    return min((value for value in values if value is not None), default=None)


def _given(default: _Number, value: _Number | None) -> _Number:
    return default if value is None else value


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request that may run: the limits as they stand, for its headers, and what is held of them."""

    states: tuple[LimitState, ...] = ()
    hold: Hold | None = None
    # A soft budget is passed: somebody should know, and nothing is refused.
    is_over_soft_budget: bool = False


@dataclass(frozen=True, slots=True)
class Needed:
    """What a request uses at most: its prompts, and every answer as long as it may be."""

    num_prompt: int
    num_output: int

    @property
    def num_tokens(self) -> int:
        """Both together."""
        return self.num_prompt + self.num_output


class Admission:
    """Takes what a request needs from every limit, or refuses it. One event loop owns it.

    Without `metering` nothing is recorded: a gateway alone, for tests of other things.
    """

    def __init__(
        self,
        limiter: Limiter,
        settlement: Settlement,
        metrics: LimitMetrics,
        metering: Metering | None = None,
        budgets: Budgets | None = None,
        claims: RequestClaims | None = None,
    ) -> None:
        self.cascades = CascadeMetrics()
        self.claims = claims
        self.limiter = limiter
        self.budgets = budgets
        self.metering = metering
        self.settlement = settlement
        self.metrics = metrics
        self._terms: dict[tuple[str, tuple[str, ...]], tuple[Quota, Quota | None, Terms]] = {}

    def terms(self, principal: Principal, card: ModelCard) -> Terms:
        """The terms for a model, once the principal is authorised for it.

        Raises:
            ModelNotFound: as `authorise`.
        """
        authorise(principal, card)
        name = (principal.key_id, _names(card))
        found = self._terms.get(name)
        # Quotas are values that change as a whole: the same ones mean the same terms.
        if found is not None and found[0] is principal.tenant_quota and found[1] is principal.key_quota:
            return found[2]
        if len(self._terms) >= MAX_CACHED_TERMS:
            self._terms.clear()
        terms = terms_of(principal, card)
        self._terms[name] = (principal.tenant_quota, principal.key_quota, terms)
        return terms

    def refuse_at_once(self, principal: Principal) -> None:
        """Refuse whoever may use nothing of any model, before anything of the request is read.

        Raises:
            LimitRefused: an enforced limit or budget of the tenant or the key is 0.
        """
        for key_id, quota in (
            (None, principal.tenant_quota),
            (principal.key_id, principal.key_quota or UNLIMITED),
        ):
            if quota.mode is not LimitMode.ENFORCE:
                continue
            if quota.monthly_budget_pico == 0:
                self._refuse_for_budget()
            for kind in LimitKind:
                if getattr(quota, kind.value) == 0:
                    limit = Limit(Scope(principal.tenant_id, key_id), kind, 0)
                    self.metrics.refused(RefusalKind.TOO_LARGE.value)
                    state = LimitState(limit, used=0, reset_ms=0, is_exceeded=True)
                    raise refused(Refusal(RefusalKind.TOO_LARGE, limit), (state,), 1)

    def _refuse_for_budget(self) -> NoReturn:
        self.metrics.refused("budget")
        raise LimitRefused(
            "The monthly budget is 0, so nothing can be spent. Ask an administrator to raise it.",
            "insufficient_quota",
        )

    async def reserve(self, terms: Terms, needed: Mapping[str, Needed], running: Running) -> Admitted:
        """Hold what is needed, and one request. `running` is asked how far it is, until the hold ends.

        `needed`: by the models of which one will answer; the most that any of them uses is held. Without
        limits there is nothing to wait for: the lease is made while the work begins.

        Raises:
            LimitRefused: a limit or a budget does not admit it; nothing is held.
        """
        if terms.is_out_of_budget:
            self._refuse_for_budget()
        money = self._spending(terms, needed)
        num_tokens = max(each.num_tokens for each in needed.values())
        hold = Hold(
            terms.tenant_id,
            running.request_id,
            terms.limits,
            num_tokens,
            running,
            running.note(),
            money,
        )
        note = hold.note
        if not terms.limits and money is None:
            if not note:
                return Admitted()
            self.settlement.open_beside(hold)
            return Admitted((), hold)
        decision = await self._decide(terms, hold)
        self._count(decision)
        if decision.refusal is not None:
            if decision.refusal.budget is not None:
                assert money is not None
                raise self._over_budget(decision.refusal.budget, money.cost)
            raise refused(decision.refusal, decision.states, num_tokens)
        self.settlement.open(hold, is_local=decision.is_local)
        over_soft = exceeded_soft(terms.budgets, decision.budgets) if decision.budgets else ()
        for _ in over_soft:
            self.metrics.soft_budget_exceeded()
        return Admitted(decision.states, hold, bool(over_soft))

    def _spending(self, terms: Terms, needed: Mapping[str, Needed]) -> Spending | None:
        if self.budgets is None or self.metering is None or not terms.budgets:
            return None
        budgets, now = self.budgets, self.metering.now()
        try:
            return max(
                (
                    budgets.spending(
                        terms.budgets,
                        model,
                        (each.num_prompt, each.num_output),
                        now,
                        is_batch=terms.priority >= BATCH_PRIORITY,
                    )
                    for model, each in needed.items()
                ),
                key=lambda spending: spending.cost,
            )
        except PriceMissing:
            self.metrics.refused("budget")
            message = "There is a budget, and this model has no price to hold it to. Ask an administrator."
            raise LimitRefused(message, "insufficient_quota") from None
        except LedgerAway:
            raise self._unknown_spend() from None

    def _unknown_spend(self) -> LimitRefused:
        self.metrics.refused("budget_unknown")
        message = "What is spent of a budget can't be read at the moment; try again."
        return LimitRefused(message, "server_is_overloaded", 1)

    def _over_budget(self, state: BudgetState, cost: int) -> LimitRefused:
        assert self.budgets is not None and state.budget.max_amount is not None
        whose = "tenant" if state.budget.name.startswith("tenant") else "key"
        most, spent, held = (shown(amount) for amount in (state.budget.max_amount, state.spent, state.held))
        if state.spent + cost <= state.budget.max_amount:
            # Others hold what it lacks, and most give some back: it may well pass when they have ended.
            return LimitRefused(
                f"This {whose}'s budget for the month is {most} {self.budgets.currency}; {spent} are spent, "
                f"and what runs may cost {held} with this request at its longest. Try again when others have "
                "ended, or with a smaller max_tokens.",
                "rate_limit_exceeded",
                BUDGET_RETRY_S,
            )
        return LimitRefused(
            f"This {whose}'s budget for the month is {most} {self.budgets.currency}; {spent} are spent, and "
            f"what runs may cost {held} with this request at its longest. Lower max_tokens, or ask an "
            "administrator to raise the budget.",
            "insufficient_quota",
        )

    async def _decide(self, terms: Terms, hold: Hold) -> Decision:
        """As the limiter says, once it knows what is spent."""
        try:
            return await self._ask(hold)
        except SpendUnknown:
            assert self.budgets is not None and self.metering is not None
        try:
            seeds = await self.budgets.seeds(terms.tenant_id, terms.budgets, self.metering.now())
            await self.limiter.seed(terms.tenant_id, seeds)
            return await self._ask(hold)
        except (LedgerAway, SpendUnknown):
            raise self._unknown_spend() from None

    async def _ask(self, hold: Hold) -> Decision:
        """In a task of its own: what is taken for a client that leaves meanwhile must be given back."""
        asking = asyncio.ensure_future(
            self.limiter.reserve(
                hold.tenant_id,
                hold.request_id,
                hold.limits,
                Amounts(hold.num_tokens),
                hold.note,
                hold.money,
            )
        )
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            self.settlement.release_when_decided(asking, hold.tenant_id, hold.request_id)
            raise

    def _count(self, decision: Decision) -> None:
        if decision.refusal is not None:
            self.metrics.refused(decision.refusal.kind.value)
        for state in decision.states:
            if state.is_exceeded and not state.limit.is_enforced:
                self.metrics.shadow_exceeded(state.limit.kind.value)


_WHAT = {
    LimitKind.REQUESTS_PER_MINUTE: "requests a minute",
    LimitKind.TOKENS_PER_MINUTE: "tokens a minute",
    LimitKind.TOKENS_PER_DAY: "tokens a day",
    LimitKind.MAX_CONCURRENT_REQUESTS: "requests at a time",
}


def refused(refusal: Refusal, states: Sequence[LimitState], num_tokens: int) -> LimitRefused:
    """The refusal in words: which limit, how much of it is left, what was asked, and what to do."""
    if refusal.kind is RefusalKind.UNAVAILABLE:
        return LimitRefused("Limits can't be checked at the moment; try again.", "server_is_overloaded", 1)
    limit = refusal.limit
    assert limit is not None, "an id of our own is never used twice"
    whose = "key" if limit.scope.key_id is not None else "tenant"
    which = f"This {whose}'s limit" + ("" if limit.scope.model is None else " for this model")
    which = f"{which} is {limit.max_amount} {_WHAT[limit.kind]}"
    asked = num_tokens if limit.kind in TOKEN_KINDS else 1
    if refusal.kind is RefusalKind.TOO_LARGE:
        mend = (
            "Shorten the prompt, lower max_tokens or n, or ask for a higher limit."
            if limit.max_amount and limit.kind in TOKEN_KINDS
            else "Ask an administrator to raise it."
        )
        return LimitRefused(
            f"{which}, and this request needs {asked}. {mend}", "insufficient_quota", states=tuple(states)
        )
    left = next(
        (s.remaining for s in states if s.limit.kind is limit.kind and s.limit.scope == limit.scope), 0
    )
    retry = refusal.retry_after_s
    when = "when another ends" if refusal.kind is RefusalKind.CONCURRENCY else f"in {retry} s"
    needs, mend = f"{asked}", f"Try again {when}."
    if limit.kind in TOKEN_KINDS:
        # Without max_tokens a request holds all that the model may answer; its number alone doesn't tell.
        needs, mend = (
            f"{asked}, its longest answer included",
            f"Try again {when}, or with a smaller max_tokens.",
        )
    return LimitRefused(
        f"{which}; {left} are left and this request needs {needs}. {mend}",
        "rate_limit_exceeded",
        retry,
        about="tokens" if limit.kind in TOKEN_KINDS else "requests",
        states=tuple(states),
    )


def local_admission() -> Admission:
    """For one gateway alone: limits are held in this process's memory."""
    limiter = LocalLimiter()
    return Admission(limiter, Settlement(limiter), LimitMetrics())
