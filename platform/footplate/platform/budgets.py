"""Budgets of a calendar month: what the ledger says is spent, and what running requests may still cost.

The limiter's store holds both, so that all gateways decide together and a request costs no query. It is a
view: what it does not know is read from the ledger first, and all it knows is read anew each minute.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime
from typing import Protocol, TypeVar

from footplate.billing.errors import BillingError, PriceMissing
from footplate.billing.money import decimal_text
from footplate.billing.prices import PriceBook
from footplate.billing.rating import rate
from footplate.billing.usage import ModelName, TenantId, TokenClass, UsageEvent
from footplate.tenancy.limiter.decisions import Budget, BudgetSeed, BudgetState, Spending
from footplate.tenancy.quotas import LimitMode, Quota

_LOGGER = logging.getLogger(__name__)
_Found = TypeVar("_Found")
# Amounts in the limiter's store are 10⁻⁹ of the unit: its numbers are exact up to nine million units so.
NANO_DIGITS = 9
_PICO_PER_NANO = 1_000
READ_S = 1.5
REFRESH_S = 15.0


class SpendReader(Protocol):
    """What the ledger says, in pico; may block. Raises StoreUnavailable."""

    def month_spend(self, tenant_id: TenantId, at: datetime) -> int:
        """What a tenant owes for the month of `at`, so far."""
        ...

    def month_spend_of_key(self, tenant_id: TenantId, key_id: str, at: datetime) -> int:
        """The part of it that one key has used."""
        ...


class PriceReader(Protocol):
    """Where prices are; may block. Raises StoreUnavailable."""

    def book(self) -> PriceBook:
        """All versions."""
        ...


@dataclass(frozen=True, slots=True)
class HolderBudget:
    """The budgets of a tenant, or of one of its keys; in pico, None where there is none."""

    key_id: str | None
    hard: int | None
    soft: int | None

    def name(self, month: date) -> str:
        """Of its counters in the store."""
        who = "tenant" if self.key_id is None else f"key={self.key_id}"
        return f"{who}:{month:%Y-%m}"


def budgets_of(tenant: Quota, key: Quota | None, key_id: str) -> tuple[HolderBudget, ...]:
    """The budgets that a request meets. In shadow mode a hard one refuses nothing."""
    found = []
    for holder, quota in ((None, tenant), (key_id, key)):
        if quota is None:
            continue
        hard = quota.monthly_budget_pico if quota.mode is LimitMode.ENFORCE else None
        soft = quota.monthly_soft_budget_pico
        if hard is not None or soft is not None:
            found.append(HolderBudget(holder, hard, soft))
    return tuple(found)


class LedgerAway(Exception):
    """The ledger gives no answer in time; budgets are closed meanwhile."""


class Budgets:
    """What a gateway needs to hold requests to budgets; one event loop owns it.

    `month` says which month a moment belongs to, in the billing timezone.
    """

    def __init__(
        self,
        ledger: SpendReader,
        prices: PriceReader,
        month: Callable[[datetime], date],
        currency: str,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.currency = currency
        self._ledger = ledger
        self._prices = prices
        self._month = month
        self._clock = clock
        # None: not read yet.
        self._book: PriceBook | None = None
        self._refreshing: asyncio.Task[None] | None = None

    @property
    def book(self) -> PriceBook | None:
        """The prices that requests are held to; None: not read yet."""
        return self._book

    def start(self) -> None:
        """Keep the prices that requests are held to."""
        self._refreshing = asyncio.create_task(self._keep_refreshed())

    async def close(self) -> None:
        """Stop that."""
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.gather(self._refreshing, return_exceptions=True)

    async def refresh(self) -> None:
        """Read the price book. Raises LedgerAway."""
        self._book = await self._read(self._prices.book)

    def spending(
        self,
        holders: tuple[HolderBudget, ...],
        model: str,
        num_tokens: tuple[int, int],
        at: datetime,
        *,
        is_batch: bool = False,
    ) -> Spending:
        """What a request may cost at most: nothing of it cached, every answer as long as allowed.

        `num_tokens`: of its prompts, and of its answers.

        Raises:
            PriceMissing: the model has no price, so nobody can say.
            LedgerAway: prices could not be read so far.
        """
        if self._book is None:
            raise LedgerAway("no price book was read so far")
        version = self._book.version_for(ModelName(model), at)
        prices = version.prices.models[ModelName(model)]
        dearest = max(prices.of(TokenClass.INPUT), prices.of(TokenClass.CACHED_INPUT))
        num_prompt, num_output = num_tokens
        cost = num_prompt * dearest + num_output * prices.output
        if is_batch:
            # Whole: a price list with a batch price that is none is refused.
            cost = int(cost * version.prices.batch_multiplier)
        month = self._month(at)
        budgets = tuple(
            Budget(holder.name(month), None if holder.hard is None else holder.hard // _PICO_PER_NANO)
            for holder in holders
        )
        return Spending(_nano(cost), budgets)

    def cost(self, event: UsageEvent) -> int:
        """What an event costs, in nano; 0 where it has no price yet."""
        try:
            return _nano(rate(event, self._book or PriceBook()).net)
        except PriceMissing:
            return 0

    async def seeds(
        self, tenant_id: str, holders: tuple[HolderBudget, ...], at: datetime
    ) -> list[BudgetSeed]:
        """What the ledger says of each budget. Raises LedgerAway."""
        month = self._month(at)

        def read() -> list[BudgetSeed]:
            found = []
            for holder in holders:
                # What is committed after this moment may not be in the sum.
                read_at_ms = self.now_ms()
                if holder.key_id is None:
                    spent = self._ledger.month_spend(TenantId(tenant_id), at)
                else:
                    spent = self._ledger.month_spend_of_key(TenantId(tenant_id), holder.key_id, at)
                found.append(BudgetSeed(holder.name(month), _nano(max(0, spent)), read_at_ms))
            return found

        return await self._read(read)

    def now_ms(self) -> int:
        """Of the clock that seeds and commits are told apart by."""
        return round(self._clock() * 1000)

    async def _read(self, do: Callable[[], _Found]) -> _Found:
        try:
            async with asyncio.timeout(READ_S):
                return await asyncio.to_thread(do)
        except (BillingError, TimeoutError) as error:
            raise LedgerAway(type(error).__name__) from error

    async def _keep_refreshed(self) -> None:
        while True:
            try:
                await self.refresh()
            except LedgerAway:
                _LOGGER.warning("the price book can't be read; the one that is known holds")
            await asyncio.sleep(REFRESH_S)


def exceeded_soft(holders: tuple[HolderBudget, ...], states: tuple[BudgetState, ...]) -> list[HolderBudget]:
    """The holders whose soft budget is passed by what is spent and held."""
    return [
        holder
        for holder, state in zip(holders, states, strict=True)
        if holder.soft is not None and (state.spent + state.held) * _PICO_PER_NANO > holder.soft
    ]


def shown(nano: int) -> str:
    """As a decimal text."""
    return decimal_text(nano, NANO_DIGITS, at_least=2)


def _nano(pico: int) -> int:
    """Rounded up: a budget is never passed by what was too small to count."""
    return -(-pico // _PICO_PER_NANO)
