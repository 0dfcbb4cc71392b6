"""What cascades did, for `/metrics` and the admin API: who answered, why, and what that saved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric

from footplate.billing.errors import PriceMissing
from footplate.billing.prices import PriceBook
from footplate.billing.rating import rate_tokens
from footplate.billing.usage import ModelName, TokenClass, TokenCounts, UsageEvent
from footplate.routing.cascade import Cascade, Decision, Target

_PICO = 10**12


@dataclass(slots=True)
class RouteMoney:
    """Sums of a route's requests since this gateway's start, in pico."""

    # At the prices of the model that answered: what tenants owe.
    billed: int = 0
    # What the same tokens would have cost at the large model's prices.
    at_large: int = 0
    # What the platform's own attempts that were thrown away would have cost, at the small model's prices.
    attempts: int = 0
    num_priced: int = 0
    num_unpriced: int = 0

    @property
    def saved(self) -> int:
        """Net of the attempts; negative where they cost more than what was kept has saved."""
        return self.at_large - self.billed - self.attempts


class CascadeMetrics:
    """Counts of one gateway. One event loop owns it."""

    def __init__(self) -> None:
        self._decisions: Counter[tuple[str, str, str]] = Counter()
        self._tokens: Counter[tuple[str, str, str, str]] = Counter()
        self._money: dict[str, RouteMoney] = {}

    def decided(self, cascade: Cascade, decision: Decision) -> None:
        """A request's model is fixed."""
        model = cascade.small if decision.target is Target.SMALL else cascade.large
        self._decisions[cascade.name, model, decision.reason.value] += 1

    def ended(self, cascade: Cascade, event: UsageEvent, prices: PriceBook | None) -> None:
        """A request of a route has become an event. Tokens of attempts at other models stand apart."""
        self._count(cascade.name, event.served_model, "answer", event.tokens)
        for attempt in event.attempts:
            if attempt.model != event.served_model:
                self._count(cascade.name, attempt.model, "attempt", attempt.tokens)
        money = self._money.setdefault(cascade.name, RouteMoney())
        try:
            billed, at_large, attempts = _costs(cascade, event, prices or PriceBook())
        except PriceMissing:
            money.num_unpriced += 1
            return
        money.num_priced += 1
        money.billed += billed
        money.at_large += at_large
        money.attempts += attempts

    def decisions(self, route: str) -> dict[tuple[str, str], int]:
        """How many requests of a route went to a model for a reason."""
        return {
            (model, reason): count
            for (name, model, reason), count in self._decisions.items()
            if name == route
        }

    def money(self, route: str) -> RouteMoney:
        """What a route has saved."""
        return self._money.get(route, RouteMoney())

    def families(self) -> Iterator[Metric]:
        """As Prometheus wants them."""
        requests = CounterMetricFamily(
            "footplate_route_requests", "Requests of routes, by the model that answers",
            labels=["route", "model_name", "reason"],
        )  # fmt: skip
        for labels, count in self._decisions.items():
            requests.add_metric(labels, count)
        yield requests
        tokens = CounterMetricFamily(
            "footplate_route_tokens", "Tokens of routes: of answers, and of attempts thrown away",
            labels=["route", "model_name", "use", "token_class"],
        )  # fmt: skip
        for of_tokens, count in self._tokens.items():
            tokens.add_metric(of_tokens, count)
        yield tokens
        for name, text in (
            ("billed", "What answers of routes cost, in the billing currency"),
            ("at_large", "What the same tokens would have cost at the large model's prices"),
            ("attempts", "What attempts thrown away would have cost: to be taken off what is saved"),
        ):
            money = CounterMetricFamily(f"footplate_route_{name}_cost", text, labels=["route"])
            for route, sums in self._money.items():
                money.add_metric([route], getattr(sums, name) / _PICO)
            yield money

    def _count(self, route: str, model: str, use: str, tokens: TokenCounts) -> None:
        for token_class, count in (
            (TokenClass.INPUT, tokens.input_uncached),
            (TokenClass.CACHED_INPUT, tokens.input_cached),
            (TokenClass.OUTPUT, tokens.output),
        ):
            if count:
                self._tokens[route, model, use, token_class.value] += count


def _costs(cascade: Cascade, event: UsageEvent, prices: PriceBook) -> tuple[int, int, int]:
    """Billed, at the large model's prices, and of attempts; all in pico. Raises PriceMissing."""
    at, is_batch = event.started_at, event.skeleton.is_batch

    def cost(tokens: TokenCounts, model: str) -> int:
        name = ModelName(model)
        return rate_tokens(tokens, name, prices.version_for(name, at), is_batch=is_batch).net

    attempts = [attempt for attempt in event.attempts if attempt.model != event.served_model]
    return (
        cost(event.tokens, event.served_model),
        cost(event.tokens, cascade.large),
        sum(cost(attempt.tokens, attempt.model) for attempt in attempts),
    )
