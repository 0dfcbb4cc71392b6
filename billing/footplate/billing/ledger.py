"""Double-entry postings: what each event does to the accounts. Pure.

Signs: a positive entry is owed by the tenant or given away, a negative one is earned. So the entries of a
posting, of a month or of all time sum to zero in every currency, and balances are sums of entries.

    account     usage of 10.00 in a batch at half price     a later count that is 1.00 more
    tenant      + 5.00                                      + 0.50
    discount    + 5.00                                      + 0.50
    revenue     - 10.00
    adjustment                                              - 1.00
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from footplate.billing.errors import LedgerUnbalanced
from footplate.billing.rating import RatedUsage
from footplate.billing.usage import EventId, TenantId


class Account(StrEnum):
    """The accounts. Each entry also names the tenant that it is about."""

    TENANT = "tenant"
    REVENUE = "revenue"
    DISCOUNT = "discount"
    ADJUSTMENT = "adjustment"


class PostingKind(StrEnum):
    """Why something is posted. `late` and `recount` are adjustments."""

    USAGE = "usage"
    # The event came when its month was closed: it counts in the open one.
    LATE = "late"
    # A better count of an event that was posted before: the difference.
    RECOUNT = "recount"

    @property
    def is_adjustment(self) -> bool:
        """Whether it goes against the adjustment account rather than revenue."""
        return self is not PostingKind.USAGE


# An event's own posting, and that of its one better count: exact mends estimated, and nothing mends exact.
# Where the better count is of another model, the first is taken back and the whole new one posted.
EVENT_SEQ = 0
RECOUNT_SEQ = 1
REBOOKED_SEQ = 2


@dataclass(frozen=True, slots=True)
class PostingKey:
    """What makes a posting the same one: a second with this key is refused."""

    event_id: EventId
    seq: int


@dataclass(frozen=True, slots=True)
class Entry:
    """One side of a posting, in pico."""

    account: Account
    tenant_id: TenantId
    currency: str
    amount: int


@dataclass(frozen=True, slots=True)
class Posting:
    """What one count of one event does to the ledger; tokens of a recount are differences."""

    key: PostingKey
    kind: PostingKind
    tenant_id: TenantId
    # The moment that it counts at; when it was written is another.
    effective_at: datetime
    rated: RatedUsage

    def entries(self) -> list[Entry]:
        """Two or three entries that sum to zero; none for an amount of zero."""
        gross, discount = self.rated.gross.total, self.rated.discount.total
        earned = Account.ADJUSTMENT if self.kind.is_adjustment else Account.REVENUE
        amounts = ((Account.TENANT, gross - discount), (earned, -gross), (Account.DISCOUNT, discount))
        currency = self.rated.currency
        return [Entry(account, self.tenant_id, currency, amount) for account, amount in amounts if amount]


def check_balanced(entries: Iterable[Entry]) -> None:
    """Raises LedgerUnbalanced unless entries sum to zero in every currency."""
    sums: defaultdict[str, int] = defaultdict(int)
    for entry in entries:
        sums[entry.currency] += entry.amount
    off = {currency: amount for currency, amount in sums.items() if amount}
    if off:
        raise LedgerUnbalanced(f"entries don't sum to zero: {off}")


def balances(entries: Iterable[Entry]) -> dict[tuple[Account, TenantId, str], int]:
    """Sums of entries by account, tenant and currency, in pico."""
    sums: defaultdict[tuple[Account, TenantId, str], int] = defaultdict(int)
    for entry in entries:
        sums[entry.account, entry.tenant_id, entry.currency] += entry.amount
    return dict(sums)


def difference(earlier: RatedUsage, later: RatedUsage) -> RatedUsage:
    """What must be added to the earlier cost to get the later; both by one version.

    Raises:
        LedgerUnbalanced: they were rated by different versions.
    """
    if (earlier.version_id, earlier.currency) != (later.version_id, later.currency):
        raise LedgerUnbalanced("two counts of one event must be rated by one version of its prices")
    return RatedUsage(
        later.version_id, later.currency, later.gross + -earlier.gross, later.discount + -earlier.discount
    )


def reversal(rated: RatedUsage) -> RatedUsage:
    """What takes a cost back."""
    return RatedUsage(rated.version_id, rated.currency, -rated.gross, -rated.discount)
