"""Price books: versions with a time from which they hold, complete and never edited. Pure.

Prices are given as decimals for a million tokens and kept as pico (10⁻¹²) of the currency's unit for one
token. So six digits after the point are exact, and quantity times unit price is the cost, exactly, in every
row that anybody exports. A finer price is refused rather than rounded, and so is a batch price that the
multiplier would make finer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from fractions import Fraction
from typing import NewType

from footplate.billing.errors import InvalidPrice, PriceMissing
from footplate.billing.money import check_currency, decimal_text, scaled
from footplate.billing.usage import MAX_ID_CHARS, ModelName, TokenClass

PriceVersionId = NewType("PriceVersionId", int)

# Digits after the point of a price for a million tokens: 10⁻⁶ for a million is 10⁻¹² for one.
PRICE_DIGITS = 6
MULTIPLIER_DIGITS = 6
# For one token: a million units for a million tokens. It keeps every amount far inside a database's numbers.
MAX_PICO_PER_TOKEN = 10**12
MAX_MODELS = 10_000


@dataclass(frozen=True, slots=True)
class ModelPrices:
    """What one token of each class costs, in pico. A price of 0 is one that somebody has written down."""

    input: int
    cached_input: int
    output: int

    def of(self, token_class: TokenClass) -> int:
        """Pico for one token."""
        price: int = getattr(self, token_class.value)
        return price

    def texts(self) -> dict[str, str]:
        """As decimal texts for a million tokens."""
        return {name.value: price_text(self.of(name)) for name in TokenClass}


@dataclass(frozen=True, slots=True)
class PriceList:
    """A book's content: all models that have a price from `effective_from` on, until the next one's."""

    effective_from: datetime
    currency: str
    models: Mapping[ModelName, ModelPrices]
    # What a token in a batch costs of its price: above 0, at most 1.
    batch_multiplier: Fraction = Fraction(1)

    def __post_init__(self) -> None:
        at = self.effective_from
        if at.tzinfo is None or at.utcoffset() != UTC.utcoffset(None):
            raise InvalidPrice("effective_from must be an aware time in UTC", "effective_from")
        _check_money(self.currency)
        if not 0 < self.batch_multiplier <= 1:
            raise InvalidPrice("batch_multiplier must be above 0 and at most 1", "batch_multiplier")
        if not 1 <= len(self.models) <= MAX_MODELS:
            raise InvalidPrice(f"models must name 1 to {MAX_MODELS} models", "models")
        for name, prices in self.models.items():
            if not 1 <= len(name) <= MAX_ID_CHARS or not name.isprintable():
                message = f"a model's name has 1 to {MAX_ID_CHARS} visible characters"
                raise InvalidPrice(message, "models")
            for token_class in TokenClass:
                self._check_price(name, token_class, prices.of(token_class))

    def _check_price(self, model: ModelName, token_class: TokenClass, pico: int) -> None:
        field = f"models.{model}.{token_class.value}"
        if not 0 <= pico <= MAX_PICO_PER_TOKEN:
            limit = price_text(MAX_PICO_PER_TOKEN)
            raise InvalidPrice(f"the price is {price_text(pico)}; it must be 0 to {limit}", field)
        if (pico * self.batch_multiplier).denominator != 1:
            product = (
                f"{price_text(pico)} times the batch_multiplier {multiplier_text(self.batch_multiplier)}"
            )
            raise InvalidPrice(
                f"{product} is finer than {price_text(1)} for a million tokens, so batches can not be billed "
                "exactly; round the price or choose another multiplier",
                field,
            )

    def batch_price(self, model: ModelName, token_class: TokenClass) -> int:
        """Pico for one token in a batch."""
        return int(self.models[model].of(token_class) * self.batch_multiplier)

    def fields(self) -> dict[str, object]:
        """As the API shows it."""
        return {
            "effective_from": self.effective_from.isoformat().replace("+00:00", "Z"),
            "currency": self.currency,
            "models": {name: self.models[name].texts() for name in sorted(self.models)},
            "batch_multiplier": multiplier_text(self.batch_multiplier),
        }


@dataclass(frozen=True, slots=True)
class PriceVersion:
    """A list that was imported; its number is on every row that it rated."""

    id: PriceVersionId
    prices: PriceList
    imported_at: datetime
    imported_by: str = ""

    @property
    def effective_from(self) -> datetime:
        """Of its list."""
        return self.prices.effective_from


class PriceBook:
    """All versions. Of two that begin at the same time the later import holds."""

    __slots__ = ("_begins", "_versions", "by_id")

    def __init__(self, versions: Iterable[PriceVersion] = ()) -> None:
        self._versions = sorted(versions, key=lambda version: (version.effective_from, version.id))
        self._begins = [version.effective_from for version in self._versions]
        self.by_id = {version.id: version for version in self._versions}

    @property
    def versions(self) -> Sequence[PriceVersion]:
        """By the time they begin."""
        return self._versions

    def in_force(self, at: datetime) -> PriceVersion | None:
        """The version that holds at a time: the last that began at it or before. None before the first."""
        index = bisect_right(self._begins, at)
        return self._versions[index - 1] if index else None

    def version_for(self, model: ModelName, at: datetime) -> PriceVersion:
        """The version in force, if it has a price for the model.

        Raises:
            PriceMissing: it has none, or there is no version yet. An older version's price is no substitute.
        """
        version = self.in_force(at)
        if version is None:
            raise PriceMissing(
                f"no price book is in force at {at.isoformat()}; import one that begins by then"
            )
        if model not in version.prices.models:
            raise PriceMissing(
                f"model {model!r} has no price in version {version.id}, in force at {at.isoformat()}; "
                "import a version that names it"
            )
        return version

    def missing(self, models: Iterable[ModelName], at: datetime) -> list[ModelName]:
        """The models that have no price at a time: what a configuration is refused for."""
        version = self.in_force(at)
        known: Mapping[ModelName, ModelPrices] = {} if version is None else version.prices.models
        return [model for model in models if model not in known]


class ChangeKind(StrEnum):
    """What a version does to a model."""

    ADDED = "added"
    REMOVED = "removed"
    CHANGED = "changed"


@dataclass(frozen=True, slots=True)
class PriceChange:
    """One price that differs; `model` is None for the batch multiplier, `token_class` then too."""

    kind: ChangeKind
    model: ModelName | None
    token_class: TokenClass | None
    before: str | None
    after: str | None


def diff(before: PriceList | None, after: PriceList) -> list[PriceChange]:
    """What changes from one list to another, in the order of models' names; prices for a million tokens."""
    old = {} if before is None else before.models
    changes = []
    for name in sorted({*old, *after.models}):
        was, now = old.get(name), after.models.get(name)
        kind = ChangeKind.ADDED if was is None else ChangeKind.REMOVED if now is None else ChangeKind.CHANGED
        for token_class in TokenClass:
            texts = [None if price is None else price_text(price.of(token_class)) for price in (was, now)]
            if texts[0] != texts[1]:
                changes.append(PriceChange(kind, name, token_class, texts[0], texts[1]))
    if before is not None and before.batch_multiplier != after.batch_multiplier:
        multipliers = [multiplier_text(each.batch_multiplier) for each in (before, after)]
        changes.append(PriceChange(ChangeKind.CHANGED, None, None, multipliers[0], multipliers[1]))
    return changes


def repriced_models(before: PriceList, after: PriceList) -> set[ModelName]:
    """Models of the first list whose requests would cost something else, or nothing known, by the second."""
    if before.batch_multiplier != after.batch_multiplier or before.currency != after.currency:
        return set(before.models)
    return {name for name, prices in before.models.items() if after.models.get(name) != prices}


def price_text(pico_per_token: int) -> str:
    """A price as people write it: for a million tokens."""
    return decimal_text(pico_per_token, PRICE_DIGITS)


def parse_price(text: str, field: str) -> int:
    """Pico for one token, of a decimal text for a million.

    Raises:
        InvalidPrice: it is no decimal, negative, or finer than can be billed exactly.
    """
    return _scaled(text, PRICE_DIGITS, field, "a price for a million tokens")


def parse_multiplier(text: str, field: str = "batch_multiplier") -> Fraction:
    """Raises InvalidPrice when it is no decimal, or finer than 10⁻⁶."""
    return Fraction(_scaled(text, MULTIPLIER_DIGITS, field, "a multiplier"), 10**MULTIPLIER_DIGITS)


def multiplier_text(multiplier: Fraction) -> str:
    """A decimal text; a multiplier that has no short one is shown as a fraction."""
    value = multiplier * 10**MULTIPLIER_DIGITS
    return decimal_text(int(value), MULTIPLIER_DIGITS) if value.denominator == 1 else str(multiplier)


def _scaled(text: str, digits: int, field: str, what: str) -> int:
    try:
        value = scaled(text, digits)
    except ValueError as error:
        finest = decimal_text(1, digits)
        raise InvalidPrice(f"{error}: {what} is a decimal of {finest} or more, or 0", field) from error
    if value < 0:
        raise InvalidPrice(f"{text} is negative; a price or multiplier is not", field)
    return value


def _check_money(currency: str) -> None:
    try:
        check_currency(currency)
    except ValueError as error:
        raise InvalidPrice(str(error), "currency") from error
