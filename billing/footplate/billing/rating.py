"""What an event costs: (event, price version) → lines, exactly. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from footplate.billing.errors import PriceMissing
from footplate.billing.prices import PriceBook, PriceList, PriceVersion, PriceVersionId
from footplate.billing.usage import ModelName, TokenClass, TokenCounts, UsageEvent


class LineKind(StrEnum):
    """What a line is for."""

    USAGE = "usage"
    BATCH_DISCOUNT = "batch_discount"


@dataclass(frozen=True, slots=True)
class RatedLine:
    """`quantity` tokens at `unit_price` pico each; both their product and a discount may be negative."""

    kind: LineKind
    token_class: TokenClass
    quantity: int
    unit_price: int

    @property
    def amount(self) -> int:
        """Pico, exactly."""
        return self.quantity * self.unit_price


@dataclass(frozen=True, slots=True)
class ClassAmounts:
    """A number for each class of tokens: pico where it is an amount of money."""

    input: int = 0
    cached_input: int = 0
    output: int = 0

    @property
    def total(self) -> int:
        """Of all classes."""
        return self.input + self.cached_input + self.output

    def __add__(self, other: ClassAmounts) -> ClassAmounts:
        return ClassAmounts(
            self.input + other.input, self.cached_input + other.cached_input, self.output + other.output
        )

    def __neg__(self) -> ClassAmounts:
        return ClassAmounts(-self.input, -self.cached_input, -self.output)


@dataclass(frozen=True, slots=True)
class RatedUsage:
    """What some tokens cost by one version: at list prices, and what a batch takes off that."""

    version_id: PriceVersionId
    currency: str
    gross: ClassAmounts
    # Taken off: 0 outside batches.
    discount: ClassAmounts

    @property
    def net(self) -> int:
        """What the tenant owes, in pico."""
        return self.gross.total - self.discount.total


# Token classes beside the field of TokenCounts that counts them.
QUANTITY_FIELDS = {
    TokenClass.INPUT: "input_uncached",
    TokenClass.CACHED_INPUT: "input_cached",
    TokenClass.OUTPUT: "output",
}


def quantity(tokens: TokenCounts, token_class: TokenClass) -> int:
    """The tokens of one class."""
    count: int = getattr(tokens, QUANTITY_FIELDS[token_class])
    return count


def rate(event: UsageEvent, book: PriceBook, effective_at: datetime | None = None) -> RatedUsage:
    """What an event costs by the version in force when it was admitted.

    One that came when its month was closed, and whose model had no price there, costs what it does at
    `effective_at`, the moment that it counts at: no price can be added to a closed month.

    Raises:
        PriceMissing: there is no price for the model that served it.
    """
    at = event.skeleton.started_at
    try:
        version = book.version_for(event.served_model, at)
    except PriceMissing:
        if effective_at is None or effective_at == at:
            raise
        version = book.version_for(event.served_model, effective_at)
    return rate_tokens(
        event.tokens, event.served_model, version, is_batch=event.skeleton.batch_id is not None
    )


def rate_tokens(
    tokens: TokenCounts, model: ModelName, version: PriceVersion, *, is_batch: bool
) -> RatedUsage:
    """What tokens cost by a version that has a price for the model."""
    prices = version.prices.models[model]
    uncached, cached, output = tokens.input_uncached, tokens.input_cached, tokens.output
    gross = ClassAmounts(uncached * prices.input, cached * prices.cached_input, output * prices.output)
    return RatedUsage(
        version.id, version.prices.currency, gross, _discount(gross, version.prices) if is_batch else NOTHING
    )


def rated_lines(
    tokens: TokenCounts, model: ModelName, prices: PriceList, *, is_batch: bool
) -> list[RatedLine]:
    """The same cost as lines that can be shown; a class without tokens has none."""
    lines = []
    for token_class in TokenClass:
        count = quantity(tokens, token_class)
        if not count:
            continue
        price = prices.models[model].of(token_class)
        lines.append(RatedLine(LineKind.USAGE, token_class, count, price))
        off = price - prices.batch_price(model, token_class)
        if is_batch and off:
            lines.append(RatedLine(LineKind.BATCH_DISCOUNT, token_class, count, -off))
    return lines


@dataclass(frozen=True, slots=True)
class UsageTotal:
    """Tokens by class of one model, in or outside batches, summed over any events."""

    model: ModelName
    is_batch: bool
    tokens: ClassAmounts


@dataclass(frozen=True, slots=True)
class Simulation:
    """What usage would have cost by a list; models that it has no price for are named and not counted."""

    currency: str
    by_model: dict[ModelName, int]
    unpriced: tuple[ModelName, ...]

    @property
    def total(self) -> int:
        """Pico."""
        return sum(self.by_model.values())


def simulate(usage: Iterable[UsageTotal], prices: PriceList) -> Simulation:
    """What usage would have cost had the list been in force all the time. Exact: cost is linear in tokens."""
    by_model: dict[ModelName, int] = {}
    unpriced = set()
    for part in usage:
        if part.model not in prices.models:
            unpriced.add(part.model)
            continue
        price = prices.models[part.model]
        tokens = part.tokens
        gross = ClassAmounts(
            tokens.input * price.input, tokens.cached_input * price.cached_input, tokens.output * price.output
        )
        cost = gross.total - (_discount(gross, prices).total if part.is_batch else 0)
        by_model[part.model] = by_model.get(part.model, 0) + cost
    return Simulation(prices.currency, by_model, tuple(sorted(unpriced)))


NOTHING = ClassAmounts()


def _discount(gross: ClassAmounts, prices: PriceList) -> ClassAmounts:
    # A price list holds only prices whose batch price is whole, so nothing is cut off here.
    up, down = prices.batch_multiplier.numerator, prices.batch_multiplier.denominator
    return ClassAmounts(
        gross.input - gross.input * up // down,
        gross.cached_input - gross.cached_input * up // down,
        gross.output - gross.output * up // down,
    )
