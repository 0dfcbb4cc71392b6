"""Ranges are half-open in a declared zone; what sums are read from never changes what they sum."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from footplate.billing.errors import InvalidReport
from footplate.billing.periods import BillingCalendar, bucket_of
from footplate.billing.time_ranges import (
    KeptSums,
    TimeRange,
    days_of,
    hours_of,
    parse_range,
    range_parts,
)

NOW = datetime(2026, 11, 15, 12, 30, tzinfo=UTC)
ZONES = ("UTC", "America/Los_Angeles", "Asia/Kolkata", "Asia/Kathmandu", "Australia/Lord_Howe")


def test_dates_are_midnights_of_the_zone_and_times_are_what_they_say() -> None:
    span = parse_range("2026-11-01", "2026-11-02", "America/Los_Angeles", NOW)
    # Clocks go back on this day: 25 hours.
    assert (span.begin, span.end) == (
        datetime(2026, 11, 1, 7, tzinfo=UTC),
        datetime(2026, 11, 2, 8, tzinfo=UTC),
    )
    assert span.fields()["from"] == "2026-11-01T00:00:00-07:00"
    assert span.fields()["to"] == "2026-11-02T00:00:00-08:00"
    exact = parse_range("2026-11-01T00:00:00+05:45", "2026-11-02T10:07:33.25Z", "Asia/Kathmandu", NOW)
    assert exact.begin == datetime(2026, 10, 31, 18, 15, tzinfo=UTC)
    assert exact.end == datetime(2026, 11, 2, 10, 7, 33, 250_000, tzinfo=UTC)


def test_without_ends_a_range_is_the_month_up_to_the_end_of_today() -> None:
    span = parse_range(None, None, "Asia/Kolkata", NOW)
    assert span.fields()["from"] == "2026-11-01T00:00:00+05:30"
    assert span.fields()["to"] == "2026-11-16T00:00:00+05:30"


@pytest.mark.parametrize(
    ("begin", "end", "zone", "field"),
    [
        ("2026-11-02", "2026-11-02", "UTC", "to"),
        ("2026-11-03", "2026-11-02", "UTC", "to"),
        ("2026-11-01T00:00:00", "2026-11-02", "UTC", "from"),
        ("2026-13-01", "2026-11-02", "UTC", "from"),
        ("yesterday", "2026-11-02", "UTC", "from"),
        ("2026-11-01", "9999-12-31", "UTC", "to"),
        ("1999-12-31", "2026-11-02", "UTC", "from"),
        ("2001-01-01", "2026-11-02", "UTC", "to"),
        ("2026-11-01", "2026-11-02", "Mars/Olympus", "timezone"),
        ("2026-11-01", "2026-11-02", "../../etc/passwd", "timezone"),
        ("2026-11-01", "2026-11-02", "", "timezone"),
    ],
)
def test_what_is_no_range_names_its_field(begin: str, end: str, zone: str, field: str) -> None:
    with pytest.raises(InvalidReport) as refusal:
        parse_range(begin, end, zone, NOW)
    assert refusal.value.field == field


def test_days_have_23_24_and_25_hours_and_every_hour_has_a_name_of_its_own() -> None:
    for first, num_hours in (("2026-03-08", 23), ("2026-03-09", 24), ("2026-11-01", 25)):
        day = datetime.fromisoformat(first)
        following = (day + timedelta(days=1)).date().isoformat()
        span = parse_range(first, following, "America/Los_Angeles", NOW)
        hours = hours_of(span)
        assert len(hours) == len({name for _, name in hours}) == num_hours
        assert [name for _, name in days_of(span)] == [first]
    assert "2026-11-01T01:00:00-07:00" in dict((name, at) for at, name in hours)
    assert "2026-11-01T01:00:00-08:00" in dict((name, at) for at, name in hours)


def test_too_many_hours_are_refused() -> None:
    with pytest.raises(InvalidReport, match="by hours"):
        hours_of(parse_range("2025-01-01", "2026-11-02", "UTC", NOW))


@given(
    st.datetimes(datetime(2026, 1, 1), datetime(2026, 12, 31)),
    st.timedeltas(timedelta(microseconds=1), timedelta(days=70)),
    st.sampled_from(ZONES),
    st.sampled_from(ZONES),
    st.booleans(),
)
def test_parts_of_a_range_are_all_of_it_once_and_each_fits_its_sums(
    naive: datetime, lasts: timedelta, zone: str, billing_zone: str, by_local_time: bool
) -> None:
    begin = naive.replace(tzinfo=UTC)
    span, billing = TimeRange(begin, begin + lasts, zone), BillingCalendar(billing_zone)
    parts = range_parts(span, billing, by_local_time=by_local_time)
    assert parts[0].begin == span.begin and parts[-1].end == span.end
    for before, after in pairwise(parts):
        assert before.end == after.begin
    for part in parts:
        assert part.begin < part.end
        for at in (part.begin, part.end):
            if part.kept is not KeptSums.EVENTS:
                assert bucket_of(at) == at
            if part.kept is KeptSums.DAYS:
                assert billing.midnight(billing.day(at)) == at
                assert not by_local_time or zone == billing_zone
    # Events are read for ends alone, days wherever there is one.
    assert sum((p.end - p.begin for p in parts if p.kept is KeptSums.EVENTS), timedelta()) < timedelta(
        minutes=30
    )
    if lasts > timedelta(days=3) and (not by_local_time or zone == billing_zone):
        assert any(part.kept is KeptSums.DAYS for part in parts)
