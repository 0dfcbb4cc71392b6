"""Sums of months from rollups in PostgreSQL; see `MonthReader`."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Select, func, select

from footplate.billing.adapters.postgres.books import Books, reading
from footplate.billing.adapters.postgres.tables import (
    AMOUNT_COLUMNS,
    TOKEN_COLUMNS,
    UNPRICED,
    dimensions,
    price_versions,
    rollups_day,
)
from footplate.billing.periods import Period
from footplate.billing.prices import PriceVersionId
from footplate.billing.rating import ClassAmounts, UsageTotal
from footplate.billing.statements import MonthUsage
from footplate.billing.usage import ModelName, TenantId

_KEPT = rollups_day.c
_OF = dimensions.c
_TOKENS = [func.sum(_KEPT[name]) for name in TOKEN_COLUMNS[:3]]
_AMOUNTS = [func.sum(_KEPT[name]) for name in AMOUNT_COLUMNS]


class PostgresMonthReader:
    """Safe from any thread."""

    def __init__(self, books: Books) -> None:
        self._books = books

    def month_usage(self, period: Period, tenant_id: TenantId) -> list[MonthUsage]:
        """As `MonthReader.month_usage`."""
        key = (
            _OF.served_model,
            _KEPT.price_version,
            price_versions.c.currency,
            _OF.is_batch,
            _KEPT.is_adjustment,
        )
        query = (
            self._query(period, tenant_id, *key, func.sum(_KEPT.requests), *_TOKENS, *_AMOUNTS)
            .join(price_versions, price_versions.c.id == _KEPT.price_version)
            .group_by(*key)
            .order_by(*key)
        )
        with reading(self._books.engine) as connection:
            return [_as_usage(row) for row in connection.execute(query)]

    def num_unpriced(self, period: Period, tenant_id: TenantId | None = None) -> int:
        """As `MonthReader.num_unpriced`."""
        query = self._query(period, tenant_id, func.sum(_KEPT.requests)).where(
            _KEPT.price_version == UNPRICED
        )
        with reading(self._books.engine) as connection:
            return int(connection.execute(query).scalar() or 0)

    def usage_totals(self, period: Period, tenant_id: TenantId | None = None) -> list[UsageTotal]:
        """As `MonthReader.usage_totals`."""
        key = (_OF.served_model, _OF.is_batch)
        query = self._query(period, tenant_id, *key, *_TOKENS).group_by(*key).order_by(*key)
        with reading(self._books.engine) as connection:
            return [
                UsageTotal(ModelName(model), is_batch, ClassAmounts(*map(int, tokens)))
                for model, is_batch, *tokens in connection.execute(query)
            ]

    def _query(self, period: Period, tenant_id: TenantId | None, *columns: Any) -> Select[Any]:
        end_day = self._books.calendar.day(period.ends_at)
        query = (
            select(*columns)
            .select_from(rollups_day.join(dimensions, _OF.id == _KEPT.dimension_id))
            .where(_KEPT.bucket >= period.first_day, _KEPT.bucket < end_day)
        )
        return query if tenant_id is None else query.where(_OF.tenant_id == tenant_id)


def _as_usage(row: Any) -> MonthUsage:
    model, version, currency, is_batch, is_adjustment, *sums = row
    numbers = [int(number) for number in sums]
    return MonthUsage(
        ModelName(model),
        PriceVersionId(version),
        currency,
        is_batch,
        is_adjustment,
        numbers[0],
        ClassAmounts(*numbers[1:4]),
        ClassAmounts(*numbers[4:7]),
        ClassAmounts(*numbers[7:10]),
    )
