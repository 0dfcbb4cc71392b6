"""What a tenant is told that it owes for a month: lines, a rounding row, a total. Pure.

A line is one model, version of prices, kind and class of tokens; it is rounded once, half away from zero, to
the currency's coin. The total is the exact sum, rounded once, and the rounding row is what the rounded lines
miss of it; so everything that is printed adds up, and no tenant pays for rounding twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from footplate.billing.money import rounding_row
from footplate.billing.periods import Period
from footplate.billing.prices import PriceBook, PriceVersionId
from footplate.billing.rating import ClassAmounts
from footplate.billing.usage import ModelName, TenantId, TokenClass


class StatementKind(StrEnum):
    """What a line is for."""

    USAGE = "usage"
    BATCH_USAGE = "batch usage"
    BATCH_DISCOUNT = "batch discount"
    ADJUSTMENT = "adjustment"
    BATCH_ADJUSTMENT = "batch adjustment"
    BATCH_ADJUSTMENT_DISCOUNT = "batch adjustment discount"


@dataclass(frozen=True, slots=True)
class MonthUsage:
    """Sums of a tenant's month by model, version, batch and adjustment; differences may be negative."""

    model: ModelName
    version_id: PriceVersionId
    currency: str
    is_batch: bool
    is_adjustment: bool
    num_requests: int
    # Tokens and pico by class.
    tokens: ClassAmounts
    gross: ClassAmounts
    discount: ClassAmounts


@dataclass(frozen=True, slots=True)
class StatementLine:
    """One printed line. `unit_price` is pico for one token, negative in a discount."""

    kind: StatementKind
    model: ModelName
    version_id: PriceVersionId
    token_class: TokenClass
    quantity: int
    unit_price: int
    exact_amount: int
    rounded_amount: int


@dataclass(frozen=True, slots=True)
class StatementHead:
    """What stands above the lines of a statement in one currency."""

    tenant_id: TenantId
    period: Period
    timezone: str
    currency: str
    made_at: datetime
    # Only that of a closed month is: it no longer changes.
    is_final: bool


@dataclass(frozen=True, slots=True)
class Statement:
    """What a tenant owes for a month. Amounts in pico; all but the exact ones are whole coins."""

    head: StatementHead
    num_requests: int
    # Requests whose models have no price yet; a month with such can't be closed.
    num_unpriced: int
    lines: tuple[StatementLine, ...]
    rounding: int
    total: int
    exact_total: int


def make_statement(
    head: StatementHead, usage: Iterable[MonthUsage], book: PriceBook, *, num_unpriced: int = 0
) -> Statement:
    """The statement of one currency; usage in others is left out, and has a statement of its own."""
    mine = [each for each in usage if each.currency == head.currency]
    exact = sorted(
        (line for each in mine for line in _lines(each, book)),
        key=lambda line: (line[1], line[2], _KINDS.index(line[0]), _CLASSES.index(line[3])),
    )
    amounts = [line[-1] for line in exact]
    rounded, rounding, total = rounding_row(amounts, head.currency)
    lines = tuple(StatementLine(*line, amount) for line, amount in zip(exact, rounded, strict=True))
    num_requests = sum(each.num_requests for each in mine)
    return Statement(head, num_requests, num_unpriced, lines, rounding, total, sum(amounts))


_KINDS = list(StatementKind)
_CLASSES = list(TokenClass)
_Line = tuple[StatementKind, ModelName, PriceVersionId, TokenClass, int, int, int]


def _lines(usage: MonthUsage, book: PriceBook) -> Sequence[_Line]:
    prices = book.by_id[usage.version_id].prices
    plain, off = _kinds(usage)
    lines: list[_Line] = []
    for token_class in TokenClass:
        count = getattr(usage.tokens, token_class.value)
        if not count:
            continue
        price = prices.models[usage.model].of(token_class)
        gross, discount = (getattr(part, token_class.value) for part in (usage.gross, usage.discount))
        lines.append((plain, usage.model, usage.version_id, token_class, count, price, gross))
        if discount:
            unit = price - prices.batch_price(usage.model, token_class)
            lines.append((off, usage.model, usage.version_id, token_class, count, -unit, -discount))
    return lines


def _kinds(usage: MonthUsage) -> tuple[StatementKind, StatementKind]:
    if usage.is_adjustment:
        plain = StatementKind.BATCH_ADJUSTMENT if usage.is_batch else StatementKind.ADJUSTMENT
        return plain, StatementKind.BATCH_ADJUSTMENT_DISCOUNT
    return (
        StatementKind.BATCH_USAGE if usage.is_batch else StatementKind.USAGE,
        StatementKind.BATCH_DISCOUNT,
    )
