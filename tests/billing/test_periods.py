"""Months of the billing timezone; a closed one no longer changes, what comes late counts in the open one."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from datetime import UTC, date, datetime, timedelta
from html.parser import HTMLParser
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Connection, text

from footplate.billing.adapters.postgres.month_reader import PostgresMonthReader
from footplate.billing.errors import NotFound, PeriodClosed, PeriodNotClosable
from footplate.billing.ledger import Account
from footplate.billing.money import coin_text, parse_amount
from footplate.billing.periods import BillingCalendar, bucket_of
from footplate.billing.prices import ModelPrices
from footplate.billing.rating import simulate
from footplate.billing.statement_html import statement_html
from footplate.billing.statements import Statement, StatementHead, StatementKind, make_statement
from footplate.billing.store import CommitOutcome
from footplate.billing.usage import TenantId, TokenCounts
from tests.billing.builders import NOON, NOVEMBER, USUAL, OpenBooks, event, open_books, price_list

A = TenantId("tnt_a")
DECEMBER = datetime(2026, 12, 2, tzinfo=UTC)
ZONES = (
    "UTC",
    "America/Los_Angeles",
    "Asia/Kolkata",
    "Asia/Kathmandu",
    "Australia/Lord_Howe",
    "America/Santiago",
)


@pytest.mark.parametrize("zone", ZONES)
def test_every_moment_lies_in_one_day_that_begins_at_a_bucket(zone: str) -> None:
    """Days of 23, 24 and 25 hours, half-open; and none begins inside a quarter of an hour."""
    calendar = BillingCalendar(zone)
    day = date(2026, 1, 1)
    lengths = set()
    while day < date(2027, 1, 1):
        begin, end = calendar.midnight(day), calendar.midnight(day + timedelta(days=1))
        assert calendar.day(begin) == day == calendar.day(end - timedelta(microseconds=1))
        assert calendar.day(begin - timedelta(microseconds=1)) == day - timedelta(days=1)
        assert bucket_of(begin) == begin
        lengths.add((end - begin) / timedelta(hours=1))
        day += timedelta(days=1)
    shifts = {"America/Los_Angeles": {23, 24, 25}, "America/Santiago": {23, 24, 25}}
    assert lengths == shifts.get(zone, {23.5, 24, 24.5} if "Lord_Howe" in zone else {24})


@given(st.datetimes(datetime(2000, 1, 1), datetime(2100, 1, 1)), st.sampled_from(ZONES))
def test_a_moment_lies_in_its_month_and_its_day_is_that_of_its_bucket(naive: datetime, zone: str) -> None:
    calendar, at = BillingCalendar(zone), naive.replace(tzinfo=UTC)
    period = calendar.period_of(at)
    assert period.begins_at <= at < period.ends_at
    assert calendar.period(period.id) == period
    assert calendar.next_period(period).begins_at == period.ends_at
    assert period.id == f"{at.astimezone(ZoneInfo(zone)):%Y-%m}"
    assert calendar.day(bucket_of(at)) == calendar.day(at)


@pytest.mark.parametrize(
    "name", ["2026-13", "2026-1", "202611", "2026-11-01", "", "\u0662026-11", "0001-01", "9999-12"]
)
def test_what_names_no_month_is_not_found(name: str) -> None:
    with pytest.raises(NotFound, match="no period"):
        BillingCalendar().period(name)


@pytest.mark.parametrize("zone", ["America/Los_Angeles", "Asia/Kolkata"])
def test_events_count_in_the_day_and_month_of_the_billing_timezone(books_url: str, zone: str) -> None:
    calendar = BillingCalendar(zone)
    begin, end = calendar.period("2026-11").begins_at, calendar.period("2026-11").ends_at
    tick = timedelta(microseconds=1000)
    with open_books(books_url, timezone=zone) as books:
        books.prices.add(price_list(begin - timedelta(days=1)), imported_by="test")
        for at in (begin - tick, begin, end - tick, end):
            books.events.commit([event(started_at=at, tokens=(1, 0, 0))])
        days = books.rows("select bucket::text, requests from billing.rollups_day order by 1")
        assert days == [("2026-10-31", 1), ("2026-11-01", 1), ("2026-11-30", 1), ("2026-12-01", 1)]
        assert books.ledger.month_spend(A, begin) == 2_000_000
        assert books.ledger.month_spend(A, end) == 1_000_000


def close(books: OpenBooks, month: str = "2026-11") -> None:
    books.periods.close(books.books.calendar.period(month), closed_by="key_finance")


def test_a_closed_month_does_not_change_and_what_comes_late_is_an_adjustment_of_the_open_one(
    books: OpenBooks,
) -> None:
    guess = event(tokens=(100, 0, 0), is_estimated=True)
    books.events.commit([guess, event(batch_id="b", tokens=(0, 0, 100))])
    books.clock.now = DECEMBER
    close(books)
    closed = books.periods.closed()
    assert [(each.period.id, each.closed_by, each.totals.requests) for each in closed] == [
        ("2026-11", "key_finance", 2)
    ]
    assert closed[0].totals.amounts == {"USD": 200_000_000}
    before = books.rows("select * from billing.rollups_day where bucket < '2026-12-01' order by 1, 2, 3, 4")

    late = event(tokens=(7, 0, 0))
    exact = event(guess.event_id, tokens=(90, 0, 0))
    assert books.events.commit([late, exact]) == [CommitOutcome.RECORDED, CommitOutcome.RECOUNTED]
    after = books.rows("select * from billing.rollups_day where bucket < '2026-12-01' order by 1, 2, 3, 4")
    assert after == before
    assert books.ledger.month_spend(A, NOON) == 200_000_000
    assert books.ledger.month_spend(A, DECEMBER) == 7_000_000 - 10_000_000
    kinds = books.rows(
        "select kind, effective_at = :now from billing.postings where kind <> 'usage'", now=DECEMBER
    )
    assert sorted(kinds) == [("late", True), ("recount", True)]
    assert books.ledger.balances(A)[Account.ADJUSTMENT, "USD"] == 3_000_000
    found = books.events.find(late.event_id)
    assert found is not None and (found.event.started_at, found.effective_at) == (NOON, DECEMBER)


def test_what_comes_late_counts_after_the_closed_month_even_while_the_clock_is_behind(
    books: OpenBooks,
) -> None:
    books.events.commit([event()])
    books.clock.now = DECEMBER
    close(books)
    books.clock.now = NOON
    late = event()
    books.events.commit([late])
    found = books.events.find(late.event_id)
    assert found is not None and found.effective_at == datetime(2026, 12, 1, tzinfo=UTC)


def test_a_late_event_whose_model_had_no_price_takes_that_of_the_open_month(books: OpenBooks) -> None:
    books.events.commit([event()])
    books.clock.now = DECEMBER
    close(books)
    with pytest.raises(PeriodClosed, match="let the version begin then or later"):
        books.prices.add(price_list(NOON, m=USUAL, new=USUAL), imported_by="test")
    assert books.events.commit([event(served="new", tokens=(5, 0, 0))]) == [CommitOutcome.QUARANTINED]
    books.prices.add(price_list(DECEMBER - timedelta(days=1), m=USUAL, new=USUAL), imported_by="test")
    assert books.ledger.month_spend(A, DECEMBER) == 5_000_000
    assert books.rows("select 1 from billing.quarantine") == []


def test_a_crash_before_the_commit_leaves_neither_the_change_nor_what_stands_beside_it(
    books: OpenBooks, books_url: str
) -> None:
    """The audit record of closing a month or importing prices is written in its transaction."""
    books.events.commit([event()])

    def die(transaction: object, done: object) -> None:
        assert isinstance(transaction, Connection)
        transaction.execute(text("create table public.beside (id int)"))
        os._exit(9)

    month = books.books.calendar.period("2026-11")
    for is_closing in (True, False):
        child = os.fork()
        if not child:
            with suppress(BaseException), open_books(books_url) as own:
                own.clock.now = DECEMBER
                if is_closing:
                    own.periods.close(month, closed_by="k", beside=die)
                own.prices.add(price_list(DECEMBER), imported_by="k", beside=die)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    with books.engine.begin() as connection:
        assert connection.execute(text("select to_regclass('public.beside')")).scalar() is None
    assert books.periods.closed() == [] and len(books.prices.book().versions) == 1


def test_a_month_is_closed_once_it_is_over_in_order_and_with_nothing_open(books: OpenBooks) -> None:
    first = event(started_at=datetime(2026, 11, 3, tzinfo=UTC))
    books.events.commit([first, event(served="new")])
    books.events.report_journal("gateway-1", holds_events=True)
    with pytest.raises(PeriodNotClosable) as refusal:
        close(books, "2026-12")
    told = " / ".join(refusal.value.reasons)
    for reason in ("not over", "period 2026-11 is still open", "1 events have no price", "(gateway-1)"):
        assert reason in told
    books.clock.now = datetime(2026, 12, 1, 0, 59, tzinfo=UTC)
    books.events.report_journal("gateway-1", holds_events=False)
    books.prices.add(price_list(NOVEMBER, m=USUAL, new=USUAL), imported_by="test")
    with pytest.raises(PeriodNotClosable, match="not over, or only just"):
        close(books)
    first_open = books.periods.first_open()
    assert first_open is not None and first_open.id == "2026-11"
    books.clock.now += timedelta(minutes=1)
    close(books)
    for month in ("2026-11", "2026-10"):
        with pytest.raises(PeriodClosed):
            close(books, month)
    first_open = books.periods.first_open()
    assert first_open is not None and first_open.id == "2026-12"


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ("update billing.rollups_day set output = output + 1", "1 rows of rollups differ"),
        ("update billing.rollups_quarter_hour set gross_input = 0", "1 rows of rollups differ"),
        ("update billing.month_spend set amount = amount + 1", "1 rows of rollups differ"),
        ("delete from billing.rollups_day", "1 rows of rollups differ"),
        ("update billing.entries set amount = amount + 1 where account = 'tenant'", "don't sum to zero"),
        ("update billing.entries set amount = amount * 2", "1 events and postings differ|2 events and"),
        ("delete from billing.entries", "2 events and postings differ"),
        ("delete from billing.postings", "1 events and postings differ"),
        ("update billing.postings set gross_output = gross_output + 1", "events and postings differ"),
        ("update billing.events set output = output + 1", "1 events and postings differ"),
        ("delete from billing.events", "1 events and postings differ"),
    ],
)
def test_no_month_is_closed_whose_sums_are_not_those_of_its_events(
    books_url: str, damage: str, reason: str
) -> None:
    with open_books(books_url) as books:
        books.prices.add(price_list(), imported_by="test")
        books.events.commit([event()])
        books.clock.now = DECEMBER
        with books.engine.begin() as connection:
            # Only who owns the tables can do this.
            connection.execute(text("set local session_replication_role = replica"))
            connection.execute(text(damage))
        with pytest.raises(PeriodNotClosable, match=reason):
            close(books)
        with books.engine.begin() as connection:
            connection.execute(text("set local session_replication_role = replica"))
            for table in (
                "events",
                "postings",
                "entries",
                "rollups_day",
                "rollups_quarter_hour",
                "month_spend",
            ):
                connection.execute(text(f"delete from billing.{table}"))


# Statements.


def statement_of(books: OpenBooks, month: str = "2026-11", *, currency: str = "USD") -> Statement:
    period = books.books.calendar.period(month)
    reader = PostgresMonthReader(books.books)
    head = StatementHead(A, period, books.books.timezone, currency, books.clock.now, is_final=False)
    usage = reader.month_usage(period, A)
    return make_statement(head, usage, books.prices.book(), num_unpriced=reader.num_unpriced(period, A))


def test_a_statement_shows_the_discount_of_batches_and_adds_up(books: OpenBooks) -> None:
    books.events.commit(
        [
            event(tokens=(200_000, 800_000, 0)),
            event(tokens=(0, 0, 12_345), batch_id="b"),
            event(tokens=(1, 0, 0), tenant_id="tnt_b"),
            event(served="new"),
        ]
    )
    made = statement_of(books)
    rows = [
        (line.kind, line.token_class.value, line.quantity, coin_text(line.rounded_amount, "USD"))
        for line in made.lines
    ]
    assert rows == [
        (StatementKind.USAGE, "input", 200_000, "0.20"),
        (StatementKind.USAGE, "cached_input", 800_000, "0.08"),
        (StatementKind.BATCH_USAGE, "output", 12_345, "0.02"),
        (StatementKind.BATCH_DISCOUNT, "output", 12_345, "-0.01"),
    ]
    assert made.exact_total == parse_amount("0.292345") == books.ledger.month_spend(A, NOON)
    assert (coin_text(made.total, "USD"), coin_text(made.rounding, "USD")) == ("0.29", "0.00")
    assert (made.num_requests, made.num_unpriced) == (2, 1)
    for line in made.lines:
        assert line.quantity * line.unit_price == line.exact_amount


def test_small_lines_are_not_lost_to_rounding(books: OpenBooks) -> None:
    """Ten models of 0.004 each are 0.04, not 0.00."""
    names = [f"m{number}" for number in range(10)]
    books.prices.add(price_list(NOVEMBER, **dict.fromkeys(names, USUAL)), imported_by="test")
    books.events.commit([event(model=name, tokens=(4_000, 0, 0)) for name in names])
    made = statement_of(books)
    assert [line.rounded_amount for line in made.lines] == [0] * 10
    assert coin_text(made.rounding, "USD") == coin_text(made.total, "USD") == "0.04"


def test_adjustments_stand_apart_on_a_statement(books: OpenBooks) -> None:
    guess = event(tokens=(1_000_000, 0, 0), is_estimated=True, batch_id="b")
    books.events.commit([guess])
    books.events.commit([event(guess.event_id, tokens=(900_000, 0, 0), batch_id="b")])
    made = statement_of(books)
    rows = [(line.kind, line.quantity, coin_text(line.rounded_amount, "USD")) for line in made.lines]
    assert rows == [
        (StatementKind.BATCH_USAGE, 1_000_000, "1.00"),
        (StatementKind.BATCH_DISCOUNT, 1_000_000, "-0.50"),
        (StatementKind.BATCH_ADJUSTMENT, -100_000, "-0.10"),
        (StatementKind.BATCH_ADJUSTMENT_DISCOUNT, -100_000, "0.05"),
    ]
    assert coin_text(made.total, "USD") == "0.45"


class Page(HTMLParser):
    """Collects tags, addresses and text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str | None] = []
        self.open: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in ("href", "src", "style")]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_prints_what_the_statement_says_and_needs_nothing_from_elsewhere(books: OpenBooks) -> None:
    books.events.commit([event(tokens=(1_234_567, 0, 0)), event(served="<script>")])
    page = statement_html(statement_of(books), "A <b>&</b> Söhne")
    parsed = Page(page)
    assert (
        parsed.open == []
        and parsed.addresses == []
        and "script" not in parsed.tags
        and "b" not in parsed.tags
    )
    assert not re.search(r"https?:|url\(|@import", page)
    for shown in (
        "1,234,567",
        "1.23",
        "A &lt;b&gt;&amp;&lt;/b&gt; Söhne",
        "Statement 2026-11",
        "v1",
        "UTC",
        "1.234567",
    ):
        assert shown in page
    assert "The period is open" in page and "1 requests wait for a price" in page


def test_last_month_by_another_book_costs_what_its_tokens_cost_there(books: OpenBooks) -> None:
    books.events.commit(
        [event(tokens=(100, 0, 10)), event(tokens=(100, 0, 0), batch_id="b"), event(served="new")]
    )
    totals = PostgresMonthReader(books.books).usage_totals(books.books.calendar.period("2026-11"))
    same = simulate(totals, price_list())
    assert (same.total, same.unpriced) == (books.ledger.month_spend(A, NOON), ("new",))
    twice = simulate(totals, price_list(m=ModelPrices(2_000_000, 0, 4_000_000), new=USUAL))
    assert twice.by_model == {"m": 2 * same.total, "new": 120_000_000}


def test_token_counts_of_a_month_are_those_of_its_closing(books: OpenBooks) -> None:
    books.events.commit([event(tokens=TokenCounts(1, 2, 3, 1, 9))])
    books.clock.now = DECEMBER
    close(books)
    totals = books.periods.closed()[0].totals
    assert (totals.input_uncached, totals.input_cached, totals.output) == (1, 2, 3)
