"""Sums of the ledger in PostgreSQL; see `LedgerReader`."""

from __future__ import annotations

from datetime import datetime, timedelta

from sqlalchemy import func, select

from footplate.billing.adapters.postgres.books import Books, reading
from footplate.billing.adapters.postgres.tables import dimensions, entries, month_spend, rollups_day
from footplate.billing.ledger import Account
from footplate.billing.usage import TenantId


class PostgresLedgerReader:
    """Safe from any thread."""

    def __init__(self, books: Books) -> None:
        self._books = books

    def month_spend(self, tenant_id: TenantId, at: datetime) -> int:
        """As `LedgerReader.month_spend`."""
        kept = month_spend.c
        query = select(kept.amount).where(
            kept.tenant_id == tenant_id,
            kept.month == self._books.calendar.month(at),
            kept.currency == self._books.currency,
        )
        with reading(self._books.engine) as connection:
            return int(connection.execute(query).scalar() or 0)

    def month_spend_of_key(self, tenant_id: TenantId, key_id: str, at: datetime) -> int:
        """The part of `month_spend` that one key has used: a sum of its rows of a month by day."""
        begin = self._books.calendar.month(at)
        end = (begin.replace(day=28) + timedelta(days=4)).replace(day=1)
        kept, of = rollups_day.c, dimensions.c
        gross = kept.gross_input + kept.gross_cached_input + kept.gross_output
        discount = kept.discount_input + kept.discount_cached_input + kept.discount_output
        query = (
            select(func.sum(gross - discount))
            .join(dimensions, of.id == kept.dimension_id)
            .where(of.tenant_id == tenant_id, of.key_id == key_id, kept.bucket >= begin, kept.bucket < end)
        )
        with reading(self._books.engine) as connection:
            return int(connection.execute(query).scalar() or 0)

    def balances(self, tenant_id: TenantId | None = None) -> dict[tuple[Account, str], int]:
        """As `LedgerReader.balances`."""
        kept = entries.c
        query = select(kept.account, kept.currency, func.sum(kept.amount)).group_by(
            kept.account, kept.currency
        )
        if tenant_id is not None:
            query = query.where(kept.tenant_id == tenant_id)
        with reading(self._books.engine, is_long=True) as connection:
            return {
                (Account(account), currency): int(amount)
                for account, currency, amount in connection.execute(query)
            }
