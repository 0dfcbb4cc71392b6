"""What routes to a small and a large model have saved, from the ledger. Pure.

Saved is what the answers' tokens would have cost at the large model's prices, less what they cost, less what
the attempts that were thrown away would have cost at the prices of the models that made them. Nobody is
billed for an attempt: it is the platform's own cost, and the saving is told net of it. Tokens are taken as
they were counted: the large model would have counted, and said, its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from footplate.billing.prices import PriceBook, PriceList, PriceVersionId
from footplate.billing.rating import ClassAmounts
from footplate.billing.time_ranges import TimeRange
from footplate.billing.usage import ModelName, TokenClass


@dataclass(frozen=True, slots=True)
class RouteUse:
    """Requests of one route at one model, by one price version; `version` None: they wait for a price.

    `cost`: what they are billed, in pico; 0 for attempts that were thrown away.
    """

    route: str
    model: ModelName
    version: PriceVersionId | None
    is_batch: bool
    requests: int
    tokens: ClassAmounts
    cost: int = 0


@dataclass(frozen=True, slots=True)
class RouteUsage:
    """Answers by the models that gave them, and attempts by the models whose answers were thrown away."""

    answers: Sequence[RouteUse] = ()
    attempts: Sequence[RouteUse] = ()


class RouteReader(Protocol):
    """Reads what routes did from the ledger. May block."""

    def usage(self, span: TimeRange, routes: Sequence[str]) -> RouteUsage:
        """Of a range, by the moment that events count at. Raises StoreUnavailable."""
        ...


@dataclass(frozen=True, slots=True)
class RouteSaving:
    """A route's sums. Money in pico, over the requests that have prices."""

    requests: int = 0
    # By the model that answered.
    by_model: Mapping[str, int] = field(default_factory=dict)
    attempts_left: int = 0
    billed: int = 0
    at_large: int = 0
    attempts_cost: int = 0
    # Requests and attempts without a price, which no sum of money holds.
    unpriced: int = 0

    @property
    def saved(self) -> int:
        """Net of the attempts; below 0 where they cost more than keeping has saved."""
        return self.at_large - self.billed - self.attempts_cost


def saving_of(route: str, large: ModelName, usage: RouteUsage, book: PriceBook) -> RouteSaving:
    """The sums of one route."""
    requests = attempts_left = billed = at_large = attempts_cost = unpriced = 0
    by_model: dict[str, int] = {}
    for use in _of(route, usage.answers):
        requests += use.requests
        by_model[use.model] = by_model.get(use.model, 0) + use.requests
        cost = _cost(use, large, book)
        if cost is None:
            unpriced += use.requests
            continue
        billed += use.cost
        at_large += cost
    for use in _of(route, usage.attempts):
        attempts_left += use.requests
        cost = _cost(use, use.model, book)
        if cost is None:
            unpriced += use.requests
            continue
        attempts_cost += cost
    return RouteSaving(requests, by_model, attempts_left, billed, at_large, attempts_cost, unpriced)


def _of(route: str, uses: Iterable[RouteUse]) -> Iterable[RouteUse]:
    return (use for use in uses if use.route == route)


def _cost(use: RouteUse, model: ModelName, book: PriceBook) -> int | None:
    """What tokens cost at a model's prices in the version that the requests were rated by."""
    version = None if use.version is None else book.by_id.get(use.version)
    if version is None or model not in version.prices.models:
        return None
    return sum(
        count * _price(version.prices, model, token_class, is_batch=use.is_batch)
        for token_class, count in (
            (TokenClass.INPUT, use.tokens.input),
            (TokenClass.CACHED_INPUT, use.tokens.cached_input),
            (TokenClass.OUTPUT, use.tokens.output),
        )
    )


def _price(prices: PriceList, model: ModelName, token_class: TokenClass, *, is_batch: bool) -> int:
    return prices.batch_price(model, token_class) if is_batch else prices.models[model].of(token_class)
