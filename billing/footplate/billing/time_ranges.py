"""Ranges of time in a declared zone: read, cut into days and hours, matched with what sums are kept. Pure.

All ranges are half-open. A day is a local date and has 23, 24 or 25 hours; an hour is named with its offset,
so that the two hours of one name when clocks go back are two.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from enum import StrEnum
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from footplate.billing.errors import InvalidReport
from footplate.billing.periods import BUCKET, BillingCalendar, bucket_of

_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", re.ASCII)
# Further back zones have offsets that no quarter of an hour fits; further on, dates end.
FIRST_YEAR, LAST_YEAR = 2000, 9000
MAX_DAYS = 3_700
MAX_HOURLY_DAYS = 400


@dataclass(frozen=True, slots=True)
class TimeRange:
    """From `begin`, up to and without `end`; both in UTC. The zone says what days and hours are."""

    begin: datetime
    end: datetime
    timezone: str = "UTC"

    @property
    def calendar(self) -> BillingCalendar:
        """The zone's days."""
        return BillingCalendar(self.timezone)

    def fields(self) -> dict[str, str]:
        """As answers and files show it: local times with their offsets."""
        zone = ZoneInfo(self.timezone)
        return {
            "from": self.begin.astimezone(zone).isoformat(),
            "to": self.end.astimezone(zone).isoformat(),
            "timezone": self.timezone,
        }


def check_timezone(name: str) -> str:
    """The name itself. Raises InvalidReport for what the IANA database doesn't have."""
    try:
        # A name that is a path would be opened.
        if not name or not re.fullmatch(r"[A-Za-z0-9_+\-/]{1,64}", name, re.ASCII):
            raise ValueError
        ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise InvalidReport(
            "there is no such time zone in the IANA database; write UTC or Europe/Berlin", "timezone"
        ) from None
    return name


def parse_range(begin: str | None, end: str | None, timezone: str, now: datetime) -> TimeRange:
    """A range from dates (midnight in the zone) or RFC 3339 times with their offsets.

    Without `begin` it is the local month of `now`; without `end` it goes up to the end of today.

    Raises:
        InvalidReport: one of them can't be read, they are the wrong way round, or the zone is unknown.
    """
    calendar = BillingCalendar(check_timezone(timezone))
    today = calendar.day(now)
    begins = calendar.midnight(today.replace(day=1)) if begin is None else _moment(begin, calendar, "from")
    ends = calendar.midnight(today + timedelta(days=1)) if end is None else _moment(end, calendar, "to")
    if begins >= ends:
        raise InvalidReport(
            f"the range is empty: from {begins.isoformat()} up to and without {ends.isoformat()}", "to"
        )
    if ends - begins > timedelta(days=MAX_DAYS):
        raise InvalidReport(f"the range has more than {MAX_DAYS} days; ask for less at a time", "to")
    return TimeRange(begins, ends, timezone)


def _moment(text: str, calendar: BillingCalendar, field: str) -> datetime:
    message = "write a date, such as 2026-11-01, or a time with its offset, such as 2026-11-01T00:00:00Z"
    try:
        if _DATE.fullmatch(text):
            at = calendar.midnight(_checked(date.fromisoformat(text), field))
        else:
            at = datetime.fromisoformat(text)
            if at.tzinfo is None:
                raise InvalidReport(f"the time has no offset: {message}", field)
            _checked(at.date(), field)
            at = at.astimezone(UTC)
    except ValueError:
        raise InvalidReport(f"it can't be read: {message}", field) from None
    return at


def _checked(day: date, field: str) -> date:
    if not FIRST_YEAR <= day.year <= LAST_YEAR:
        raise InvalidReport(f"the year must be from {FIRST_YEAR} to {LAST_YEAR}", field)
    return day


def days_of(span: TimeRange) -> list[tuple[datetime, str]]:
    """When each local day of a range begins, and its date. The first may begin before the range."""
    calendar = span.calendar
    day, last = calendar.day(span.begin), calendar.day(span.end - timedelta(microseconds=1))
    days = []
    while day <= last:
        days.append((calendar.midnight(day), day.isoformat()))
        day += timedelta(days=1)
    return days


def hours_of(span: TimeRange) -> list[tuple[datetime, str]]:
    """When each local hour of a range begins, and its name, such as `2026-11-01T01:00:00-07:00`.

    Raises:
        InvalidReport: the range is too long to be shown by hours.
    """
    if span.end - span.begin > timedelta(days=MAX_HOURLY_DAYS):
        raise InvalidReport(f"by hours a range has at most {MAX_HOURLY_DAYS} days", "to")
    zone = ZoneInfo(span.timezone)
    hours: list[tuple[datetime, str]] = []
    at, before = bucket_of(span.begin), None
    while at < span.end:
        local = at.astimezone(zone)
        name = local.replace(minute=0, second=0, microsecond=0).isoformat()
        if name != before:
            hours.append((at, name))
            before = name
        at += BUCKET
    return hours


class KeptSums(StrEnum):
    """Where the sums of a part of a range are read from."""

    DAYS = "days"
    QUARTER_HOURS = "quarter_hours"
    # For ends of a range that lie inside a quarter of an hour.
    EVENTS = "events"


@dataclass(frozen=True, slots=True)
class RangePart:
    """A piece of a range that one kind of sums can answer."""

    kept: KeptSums
    begin: datetime
    end: datetime


def range_parts(span: TimeRange, billing: BillingCalendar, *, by_local_time: bool) -> list[RangePart]:
    """Cut a range so that as much as can be is read from days, then quarters of an hour, then events.

    `billing`: the calendar that kept days are of. `by_local_time`: rows are told apart by days of the range's
    zone, so kept days help only where both zones are the same.
    """
    parts: list[RangePart] = []
    inner_begin, inner_end = _next_bucket(span.begin), bucket_of(span.end)
    if inner_begin >= inner_end:
        # No whole quarter of an hour lies inside.
        return [RangePart(KeptSums.EVENTS, span.begin, span.end)]
    _add(parts, KeptSums.EVENTS, span.begin, inner_begin)
    day_begin = day_end = inner_end
    if not by_local_time or billing.timezone == span.timezone:
        day_begin = billing.midnight(billing.day(inner_begin))
        if day_begin < inner_begin:
            day_begin = billing.midnight(billing.day(inner_begin) + timedelta(days=1))
        day_end = billing.midnight(billing.day(inner_end))
    if day_begin >= day_end:
        day_begin = day_end = inner_end
    _add(parts, KeptSums.QUARTER_HOURS, inner_begin, day_begin)
    _add(parts, KeptSums.DAYS, day_begin, day_end)
    _add(parts, KeptSums.QUARTER_HOURS, day_end, inner_end)
    _add(parts, KeptSums.EVENTS, inner_end, span.end)
    return parts


def _add(parts: list[RangePart], kept: KeptSums, begin: datetime, end: datetime) -> None:
    if begin < end:
        parts.append(RangePart(kept, begin, end))


def _next_bucket(at: datetime) -> datetime:
    """The first quarter of an hour that begins then or later."""
    begins = bucket_of(at)
    return begins if begins == at else begins + BUCKET
