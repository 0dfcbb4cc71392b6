"""Calendar months of the billing timezone, and what must hold before one is closed. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import NewType
from zoneinfo import ZoneInfo

from footplate.billing.errors import NotFound

PeriodId = NewType("PeriodId", str)

BUCKET = timedelta(minutes=15)
_ID = re.compile(r"([0-9]{4})-(0[1-9]|1[0-2])", re.ASCII)
# What a gateway that died held may still come, some leases later; journals may be replayed.
SETTLING = timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class Period:
    """A calendar month, half-open: it begins at local midnight and ends where the next begins."""

    id: PeriodId
    first_day: date
    begins_at: datetime
    ends_at: datetime


@dataclass(frozen=True, slots=True)
class ClosedPeriod:
    """A month that no longer changes, with the control totals that it was closed with."""

    period: Period
    closed_at: datetime
    closed_by: str
    totals: PeriodTotals


@dataclass(frozen=True, slots=True)
class PeriodTotals:
    """Control totals: every report of the month must sum to these. Amounts in pico, by currency."""

    requests: int
    input_uncached: int
    input_cached: int
    output: int
    amounts: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class ClosingState:
    """What was found about a month that somebody wants to close."""

    now: datetime
    # The month that must be closed first; None when nothing older is open.
    earlier_open: PeriodId | None
    num_quarantined: int
    # Names of journals that hold events, as far as gateways have said.
    journals: tuple[str, ...]
    # Rows of rollups and of the spend of tenants that differ from the events.
    num_rollup_differences: int
    # By currency, what entries sum to where it is not 0.
    unbalanced: Mapping[str, int]
    # Events without their posting, postings without their event, or whose tokens or entries differ.
    num_posting_differences: int


class BillingCalendar:
    """Days, months and buckets of a declared timezone. Days have 23, 24 or 25 hours."""

    def __init__(self, timezone: str = "UTC") -> None:
        self.timezone = timezone
        self._zone = ZoneInfo(timezone)

    def day(self, at: datetime) -> date:
        """The local date of a moment."""
        return at.astimezone(self._zone).date()

    def month(self, at: datetime) -> date:
        """The first day of the local month of a moment."""
        return self.day(at).replace(day=1)

    def midnight(self, day: date) -> datetime:
        """When a local day begins, in UTC: the first moment that has its date."""
        # Where clocks skip midnight, `fold=0` would name a moment that is an hour too late or not there.
        naive = datetime(day.year, day.month, day.day)
        begins = naive.replace(tzinfo=self._zone).astimezone(UTC)
        while self.day(begins) < day:
            begins += BUCKET
        while self.day(begins - BUCKET) >= day:
            begins -= BUCKET
        return begins

    def period_of(self, at: datetime) -> Period:
        """The month that a moment belongs to."""
        return self._period(self.month(at))

    def period(self, period_id: str) -> Period:
        """The month of an id such as `2026-11`. Raises NotFound."""
        matched = _ID.fullmatch(period_id)
        # A month on either side must have a date too.
        if matched is None or not 1 < int(matched[1]) < 9999:
            raise NotFound(f"{period_id[:20]!r} is no period; write a year and a month, such as 2026-11")
        return self._period(date(int(matched[1]), int(matched[2]), 1))

    def next_period(self, period: Period) -> Period:
        """The month after."""
        return self._period(_next_month(period.first_day))

    def _period(self, first_day: date) -> Period:
        begins, ends = self.midnight(first_day), self.midnight(_next_month(first_day))
        return Period(PeriodId(f"{first_day:%Y-%m}"), first_day, begins, ends)


def bucket_of(at: datetime) -> datetime:
    """The quarter of an hour, in UTC, that a moment lies in."""
    utc = at.astimezone(UTC)
    return utc.replace(minute=utc.minute - utc.minute % 15, second=0, microsecond=0)


def reasons_not_to_close(period: Period, state: ClosingState) -> list[str]:
    """All that stands against closing a month now, each with its mend; none when it can be closed."""
    reasons = []
    if state.now < period.ends_at + SETTLING:
        when = (period.ends_at + SETTLING).isoformat()
        reasons.append(f"it is not over, or only just; try again after {when}")
    if state.earlier_open is not None:
        reasons.append(f"period {state.earlier_open} is still open; close it first")
    if state.num_quarantined:
        reasons.append(f"{state.num_quarantined} events have no price; import prices for their models")
    if state.journals:
        names = ", ".join(state.journals)
        reasons.append(f"journals hold events that are not replayed ({names}); start their gateways")
    if state.num_rollup_differences:
        reasons.append(
            f"{state.num_rollup_differences} rows of rollups differ from the events; run a reconciliation"
        )
    if state.num_posting_differences:
        reasons.append(f"{state.num_posting_differences} events and postings differ; run a reconciliation")
    if state.unbalanced:
        reasons.append(f"entries don't sum to zero: {dict(state.unbalanced)}; run a reconciliation")
    return reasons


def _next_month(first_day: date) -> date:
    return (first_day + timedelta(days=32)).replace(day=1)
