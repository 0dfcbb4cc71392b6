"""One query layer: every grouping, zone and way of paging sums to the same totals, those of the events."""

from __future__ import annotations

import random
from collections import defaultdict
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import text

from footplate.billing.adapters.postgres.report_reader import PostgresReportReader
from footplate.billing.errors import InvalidReport
from footplate.billing.money import as_decimal, parse_amount
from footplate.billing.prices import ModelPrices
from footplate.billing.reports import (
    GroupBy,
    Report,
    ReportQuery,
    ReportRow,
    UsageFilter,
    UsageSums,
    cursor,
    parse_cursor,
    parse_groups,
    report_fields,
    total_of,
)
from footplate.billing.time_ranges import TimeRange, parse_range
from footplate.billing.usage import ModelName, TenantId, UsageEvent
from tests.billing.builders import NOON, NOVEMBER, USUAL, OpenBooks, event, open_books, price_list
from tests.billing.conftest import NewBooks

MONTH = TimeRange(NOVEMBER, datetime(2026, 12, 1, tzinfo=UTC))
ALL_GROUPS = [each.value for each in GroupBy if each is not GroupBy.LABEL] + ["label:app", "label:none"]


def report(books: OpenBooks, group_by: str = "", span: TimeRange = MONTH, **options: object) -> Report:
    query = ReportQuery(span, parse_groups(group_by), **options)  # type: ignore[arg-type]
    return PostgresReportReader(books.books).report(query)


def table(books: OpenBooks, group_by: str, span: TimeRange = MONTH) -> dict[tuple[str, ...], UsageSums]:
    return {row.values: row.sums for row in report(books, group_by, span).rows}


def test_cached_tokens_are_inside_input_and_cost_their_own_price(books: OpenBooks) -> None:
    """1,000 in, 800 of them cached; reasoning inside output: 200 at 1.00, 800 at 0.10, 50 at 2.00."""
    books.events.commit([event(tokens=(200, 800, 50, 20, 3))])
    [row] = report(books, "tenant,model").rows
    assert row.values == ("tnt_a", "m")
    assert row.sums.fields() == {
        "requests": 1,
        "input_tokens": 1000,
        "cached_input_tokens": 800,
        "output_tokens": 50,
        "total_tokens": 1050,
        "cost": "0.00038",
    }
    by_class = table(books, "class")
    assert by_class["input",].fields()["input_tokens"] == 200
    assert by_class["cached_input",].fields() == {
        "requests": 0,
        "input_tokens": 800,
        "cached_input_tokens": 800,
        "output_tokens": 0,
        "total_tokens": 800,
        "cost": "0.00008",
    }
    assert by_class["output",] == UsageSums(0, 0, 0, 50, 100_000_000)


def test_what_has_no_price_is_counted_and_said_to_have_none(books: OpenBooks) -> None:
    books.events.commit([event(), event(served="new", tokens=(5, 0, 0))])
    found = report(books, "model")
    assert found.unpriced_requests == 1
    assert found.totals == UsageSums(2, 105, 0, 10, 120_000_000)
    assert report(books, "class").unpriced_requests == 1


def test_a_million_calls_of_one_token_cost_what_they_cost(books: OpenBooks) -> None:
    """As 1,000 commits of the same dimension: sums of rollups, no rounding anywhere."""
    books.events.commit([event(tokens=(1, 0, 0)) for _ in range(1_000)])
    with books.engine.begin() as connection:
        # A thousandfold month, for the sums alone.
        for name in ("rollups_day", "rollups_quarter_hour"):
            connection.execute(
                text(
                    f"update billing.{name} set requests = requests * 1000, gross_input = gross_input * 1000"
                )
            )
    assert as_decimal(report(books).totals.cost) == 1
    with books.engine.begin() as connection:
        for name in ("rollups_day", "rollups_quarter_hour"):
            connection.execute(
                text(
                    f"update billing.{name} set requests = requests / 1000, gross_input = gross_input / 1000"
                )
            )


@pytest.mark.parametrize("zone", ["UTC", "America/Los_Angeles", "Asia/Kolkata", "Asia/Kathmandu"])
def test_the_last_and_first_instants_of_days_lie_in_their_own(books: OpenBooks, zone: str) -> None:
    """On days of 24 and 25 hours; books in UTC, reports in any zone."""
    tick = timedelta(milliseconds=1)
    for day in ("2026-11-01", "2026-11-02", "2026-11-15"):
        span = parse_range(day, f"2026-11-{int(day[-2:]) + 1:02d}", zone, NOON)
        at = [span.begin - tick, span.begin, span.end - tick, span.end]
        books.events.commit(
            [
                event(started_at=each, tokens=(1, 0, 0), key_id=f"{day}/{index}")
                for index, each in enumerate(at)
            ]
        )
        rows = report(books, "key", span).rows
        mine = [row.values[0] for row in rows if row.values[0].startswith(day)]
        assert mine == [f"{day}/1", f"{day}/2"]
        [shown] = [values for values in table(books, "day", span)]
        assert shown == (day,)


def test_two_zones_cut_the_same_use_into_other_days_and_equal_totals(books: OpenBooks) -> None:
    books.events.commit(
        [
            event(started_at=datetime(2026, 11, 10, hour, tzinfo=UTC), tenant_id=tenant, tokens=(10, 0, 0))
            for hour in range(24)
            for tenant in ("tnt_a", "tnt_b")
        ]
    )
    span = TimeRange(datetime(2026, 11, 9, tzinfo=UTC), datetime(2026, 11, 12, tzinfo=UTC))
    west = table(books, "tenant,day", TimeRange(span.begin, span.end, "America/Los_Angeles"))
    east = table(books, "tenant,day", TimeRange(span.begin, span.end, "Asia/Kolkata"))
    assert {key: sums.requests for key, sums in west.items() if key[0] == "tnt_a"} == {
        ("tnt_a", "2026-11-09"): 8,
        ("tnt_a", "2026-11-10"): 16,
    }
    assert {key: sums.requests for key, sums in east.items() if key[0] == "tnt_b"} == {
        ("tnt_b", "2026-11-10"): 19,
        ("tnt_b", "2026-11-11"): 5,
    }
    assert total_of(west.values()) == total_of(east.values()) == report(books, span=span).totals


def test_hours_that_have_one_name_are_two_rows(books: OpenBooks) -> None:
    first, second = datetime(2026, 11, 1, 8, 30, tzinfo=UTC), datetime(2026, 11, 1, 9, 30, tzinfo=UTC)
    books.events.commit([event(started_at=first), event(started_at=second), event(started_at=second)])
    span = parse_range("2026-11-01", "2026-11-02", "America/Los_Angeles", NOON)
    shown = {values[0]: sums.requests for values, sums in table(books, "hour", span).items()}
    assert shown == {"2026-11-01T01:00:00-07:00": 1, "2026-11-01T01:00:00-08:00": 2}


TENANTS, MODELS = ("tnt_a", "tnt_b"), ("m", "n", "unpriced")


def some_events(draw: random.Random, begin: datetime, num: int) -> list[UsageEvent]:
    made = []
    for _ in range(num):
        # Close to midnights and quarters of hours as often as not.
        at = begin + timedelta(hours=draw.randrange(80), minutes=draw.choice([0, 15, 30, 44]))
        at += timedelta(microseconds=draw.choice([-1, 0, 1, 500_000]))
        labels = (("app", draw.choice("xy")),) if draw.random() < 0.5 else ()
        made.append(
            event(
                model=draw.choice(["alias", "m"]),
                served=draw.choice(MODELS),
                tenant_id=draw.choice(TENANTS),
                key_id=draw.choice("kl"),
                cost_center=draw.choice(["", "7"]),
                labels=labels,
                batch_id=draw.choice([None, "b"]),
                started_at=at,
                is_estimated=draw.random() < 0.3,
                tokens=tuple(draw.randrange(50) for _ in range(3)),
            )
        )
    return made


@pytest.fixture(scope="module")
def filled(new_books: NewBooks) -> OpenBooks:
    """Books of Kathmandu with some hundred events in them, some of them counted twice."""
    with open_books(new_books(), timezone="Asia/Kathmandu") as books:
        books.prices.add(
            price_list(NOVEMBER - timedelta(days=9), m=USUAL, n=ModelPrices(3_000_000, 2, 5_000_000)),
            imported_by="test",
        )
        draw = random.Random(7)
        events = some_events(draw, datetime(2026, 10, 30, tzinfo=UTC), 300)
        books.events.commit(events)
        better = [
            event(each.event_id, tokens=(9, 9, 9), served=each.served_model, **_same(each))
            for each in events
            if each.is_estimated and draw.random() < 0.5
        ]
        books.events.commit(better)
        yield books  # type: ignore[misc]


def _same(first: UsageEvent) -> dict[str, object]:
    names = ("tenant_id", "key_id", "cost_center", "labels", "batch_id", "started_at")
    return {"model": first.skeleton.requested_model} | {name: getattr(first.skeleton, name) for name in names}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(ALL_GROUPS), unique=True, max_size=4),
    st.sampled_from(["UTC", "America/Los_Angeles", "Asia/Kathmandu", "Asia/Kolkata"]),
    st.integers(-10, 5_000),
    st.integers(1, 6_000),
    st.sampled_from([0, 1, 333_333_333]),
)
def test_every_grouping_of_any_range_sums_to_its_events(
    filled: OpenBooks, groups: list[str], zone: str, begin_min: int, lasts_min: int, odd_us: int
) -> None:
    begin = datetime(2026, 10, 30, tzinfo=UTC) + timedelta(minutes=begin_min, microseconds=odd_us)
    span = TimeRange(begin, begin + timedelta(minutes=lasts_min), zone)
    [(requests, uncached, cached, output, cost)] = filled.rows(
        """
        select coalesce(sum(requests), 0), coalesce(sum(input_uncached), 0), coalesce(sum(input_cached), 0),
               coalesce(sum(output), 0), coalesce(sum(gross_input + gross_cached_input + gross_output
                   - discount_input - discount_cached_input - discount_output), 0)
        from billing.usage_facts where effective_at >= :begin and effective_at < :end
        """,
        begin=span.begin,
        end=span.end,
    )
    expected = UsageSums(*map(int, (requests, uncached, cached, output, cost)))  # type: ignore[call-overload]
    found = report(filled, ",".join(groups), span)
    assert found.totals == expected
    assert total_of(row.sums for row in found.rows) == expected
    assert not found.has_more


def test_rows_are_those_that_the_events_say(filled: OpenBooks) -> None:
    span = TimeRange(datetime(2026, 10, 30, tzinfo=UTC), datetime(2026, 11, 4, tzinfo=UTC), "Asia/Kolkata")
    zone = ZoneInfo("Asia/Kolkata")
    expected: defaultdict[tuple[str, ...], int] = defaultdict(int)
    for app, key, at, num in filled.rows(
        "select coalesce(d.labels ->> 'app', ''), d.key_id, f.effective_at, f.requests "
        "from billing.usage_facts f join billing.dimensions d on d.id = f.dimension_id"
    ):
        expected[str(app), str(key), at.astimezone(zone).date().isoformat()] += int(str(num))  # type: ignore[attr-defined]
    shown = table(filled, "label:app,key,day", span)
    assert {key: sums.requests for key, sums in shown.items() if sums.requests} == {
        key: num for key, num in expected.items() if num
    }


def test_a_filter_leaves_the_others_out(filled: OpenBooks) -> None:
    span = TimeRange(datetime(2026, 10, 25, tzinfo=UTC), datetime(2026, 11, 9, tzinfo=UTC))
    by_tenant = table(filled, "tenant", span)
    for tenant in TENANTS:
        only = UsageFilter(tenant_id=TenantId(tenant))
        assert report(filled, "key,day", span, filter=only).totals == by_tenant[tenant,]
    only = UsageFilter(TenantId("tnt_a"), None, ModelName("m"))
    assert report(filled, span=span, filter=only).totals == table(filled, "tenant,model", span)["tnt_a", "m"]
    assert report(filled, span=span, filter=UsageFilter(TenantId("nobody"))).rows == []


def test_pages_lose_and_double_no_row_while_rows_are_added(books: OpenBooks) -> None:
    keys = [f"key_{number:04d}" for number in range(0, 500, 2)]
    books.events.commit([event(key_id=key, tokens=(1, 0, 0)) for key in keys])
    seen: list[ReportRow] = []
    after: tuple[str, ...] | None = None
    num_pages = 0
    while True:
        page = report(books, "key", limit=40, after=after)
        seen += page.rows
        if not page.has_more:
            break
        after = page.rows[-1].values
        num_pages += 1
        # Before, between and behind what was read.
        books.events.commit(
            [event(key_id=f"key_{number:04d}") for number in (num_pages, 499 - 2 * num_pages)]
        )
    values = [row.values[0] for row in seen]
    assert len(values) == len(set(values))
    assert set(keys) <= set(values)


def test_every_page_tells_the_totals_of_all(books: OpenBooks) -> None:
    books.events.commit([event(key_id=f"k{number}") for number in range(7)])
    whole = report(books)
    query = ReportQuery(MONTH, parse_groups("key"), limit=3)
    reader = PostgresReportReader(books.books)
    found: list[ReportRow] = []
    while True:
        page = reader.report(query)
        assert page.totals == whole.totals
        found += page.rows
        fields = report_fields(query, page, "USD")
        if fields["next"] is None:
            break
        query = ReportQuery(
            MONTH, query.groups, limit=3, after=parse_cursor(str(fields["next"]), query.groups)
        )
    assert len(found) == 7 and total_of(row.sums for row in found) == whole.totals


def test_an_empty_range_has_no_rows_and_totals_of_0(books: OpenBooks) -> None:
    for group_by in ("", "tenant", "class,day"):
        found = report(books, group_by)
        assert (list(found.rows), found.totals, found.has_more) == ([], UsageSums(), False)


def test_adjustments_count_where_they_were_posted(books: OpenBooks) -> None:
    guess = event(tokens=(100, 0, 0), is_estimated=True)
    books.events.commit([guess])
    books.events.commit([event(guess.event_id, tokens=(40, 0, 0))])
    assert report(books, "day").totals == UsageSums(1, 40, 0, 0, parse_amount("0.00004"))


@pytest.mark.parametrize(
    "group_by", ["tenants", "day,day", "label:", f"label:{'x' * 65}", "label:a\0", "a,b,c,d,e,f,g,h,i"]
)
def test_what_is_no_grouping_is_refused(group_by: str) -> None:
    with pytest.raises(InvalidReport) as refusal:
        parse_groups(group_by)
    assert refusal.value.field == "group_by"


@pytest.mark.parametrize("given_", ["", "x", "é", cursor(["a"]), cursor(["a", "\0"]), "[1]", "W10", "bnVsbA"])
def test_what_is_no_cursor_of_the_report_is_refused(given_: str) -> None:
    groups = parse_groups("tenant,model")
    assert parse_cursor(cursor(["é", ""]), groups) == ("é", "")
    with pytest.raises(InvalidReport) as refusal:
        parse_cursor(given_, groups)
    assert refusal.value.field == "after"


def test_batches_cost_their_share(books: OpenBooks) -> None:
    books.events.commit([event(tokens=(100, 0, 0), batch_id="b"), event(tokens=(100, 0, 0))])
    assert report(books, "model").totals.cost == int(Fraction(3, 2) * 100 * USUAL.input)
