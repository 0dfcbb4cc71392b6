"""Events are recorded, rated and posted once, whoever sends them, in whatever order and how often."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from fractions import Fraction

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import text

from footplate.billing.adapters.postgres.books import Books, committing, connect
from footplate.billing.adapters.postgres.event_store import PostgresEventStore
from footplate.billing.errors import BooksDiffer, EventsRefused, InvalidPrice, PriceInForce, StoreUnavailable
from footplate.billing.ledger import Account
from footplate.billing.money import PICO, parse_amount
from footplate.billing.prices import ModelPrices
from footplate.billing.store import CommitOutcome
from footplate.billing.usage import (
    Attempt,
    AttemptOutcome,
    EventId,
    ModelName,
    TenantId,
    TokenCounts,
    UsageEvent,
)
from tests.billing.builders import NOON, NOVEMBER, USUAL, OpenBooks, event, open_books, price_list, skeleton
from tests.billing.conftest import NewBooks
from tests.postgres_server import PostgresServer

A = TenantId("tnt_a")
RECORDED, REPEATED, RECOUNTED = CommitOutcome.RECORDED, CommitOutcome.REPEATED, CommitOutcome.RECOUNTED
QUARANTINED, CONFLICTING = CommitOutcome.QUARANTINED, CommitOutcome.CONFLICTING


def spend(books: OpenBooks, tenant: str = A) -> int:
    """Of November."""
    return books.ledger.month_spend(TenantId(tenant), NOON)


def counts(books: OpenBooks, tenant: str = A) -> tuple[object, ...]:
    """Requests and tokens of a tenant, as reports sum them."""
    rows = books.rows(
        "select sum(requests)::int, sum(input_uncached)::int, sum(input_cached)::int, sum(output)::int "
        "from billing.rollups_day r join billing.dimensions d on d.id = r.dimension_id "
        "where tenant_id = :tenant",
        tenant=tenant,
    )
    return rows[0]


def until_somebody_waits(books: OpenBooks) -> None:
    """Until a transaction of these books waits for another one's lock."""
    query = text(
        "select count(*) from pg_locks l join pg_stat_activity a using (pid) "
        "where not granted and datname = current_database()"
    )
    deadline = time.monotonic() + 20
    with books.engine.connect() as watch:
        while not watch.execute(query).scalar():
            assert time.monotonic() < deadline, "nobody waits"
            watch.rollback()


def test_an_event_comes_back_as_it_was(books: OpenBooks) -> None:
    tokens = TokenCounts(200, 800, 50, 20, 3)
    attempts = (
        Attempt(ModelName("m"), "r1", AttemptOutcome.FAILED),
        Attempt(ModelName("m"), 'r"2\\{,}', AttemptOutcome.COMPLETED, tokens),
    )
    told = event(
        tokens=tokens,
        attempts=attempts,
        num_prompt_tokens=1000,
        labels=(("team", 'a "quoted" \\ {label}, NULL'), ("ünï", "☃")),
        batch_id="batch_1",
        cost_center="",
        started_at=NOON + timedelta(microseconds=123457),
    )
    assert books.events.commit([told]) == [RECORDED]
    found = books.events.find(told.event_id)
    assert found is not None
    assert found.event == told
    assert found.net_amount == parse_amount("0.00019")  # half of 200 + 80 + 100 millionths
    assert (found.currency, found.is_quarantined, found.is_recounted) == ("USD", False, False)
    assert books.events.find(EventId("nobody")) is None


def test_an_event_that_is_sent_again_is_there_once_at_once(books: OpenBooks) -> None:
    """The acknowledgement was lost, or two processes settle at the same time."""
    told = event(tokens=(10, 0, 0))
    assert books.events.commit([told, told]) == [RECORDED, REPEATED]
    with ThreadPoolExecutor(4) as pool:
        again = list(pool.map(lambda _: books.events.commit([told])[0], range(20)))
    assert set(again) == {REPEATED}
    assert (spend(books), counts(books)) == (10_000_000, (1, 10, 0, 0))


def test_one_request_of_many_attempts_counts_once(books: OpenBooks) -> None:
    tokens = TokenCounts(100, 0, 10)
    failed = Attempt(ModelName("m"), "r1", AttemptOutcome.FAILED)
    done = Attempt(ModelName("m"), "r2", AttemptOutcome.COMPLETED, tokens)
    books.events.commit([event(tokens=tokens, attempts=(failed, failed, done))])
    assert counts(books) == (1, 100, 0, 10)
    assert spend(books) == 120_000_000


def test_another_tenants_event_of_the_same_id_is_kept_apart_and_billed_to_nobody(books: OpenBooks) -> None:
    mine, other = event("req_1"), event("req_1", tenant_id="tnt_b")
    assert books.events.commit([mine, other]) == [RECORDED, CONFLICTING]
    assert books.events.commit([other]) == [CONFLICTING]
    assert spend(books, "tnt_b") == 0
    kept = books.rows("select tenant_id, event from billing.conflicting_events")
    assert [tenant for tenant, _ in kept] == ["tnt_b"]
    assert UsageEvent.from_bytes(bytes(kept[0][1])) == other  # type: ignore[arg-type]


def test_a_better_count_is_posted_as_the_difference_and_the_first_state_stays(books: OpenBooks) -> None:
    guess = event(tokens=(100, 0, 7), is_estimated=True, batch_id="b")
    exact = replace(guess, tokens=TokenCounts(20, 80, 10), is_estimated=False)
    assert books.events.commit([guess]) == [RECORDED]
    assert books.events.commit([exact]) == [RECOUNTED]
    assert books.events.commit([exact, guess]) == [REPEATED, REPEATED]
    net = (20 * 1_000_000 + 80 * 100_000 + 10 * 2_000_000) // 2
    assert (spend(books), counts(books)) == (net, (1, 20, 80, 10))
    rows = books.rows("select seq, kind, requests, output from billing.postings order by seq")
    assert rows == [(0, "usage", 1, 7), (1, "recount", 0, 3)]
    balance = books.ledger.balances(A)
    assert balance[Account.REVENUE, "USD"] == -114_000_000
    assert balance[Account.ADJUSTMENT, "USD"] == 66_000_000
    assert sum(balance.values()) == 0
    found = books.events.find(guess.event_id)
    assert found is not None and found.is_recounted and found.event.tokens == exact.tokens
    states = books.rows("select state, is_estimated from billing.events")
    assert states == [(guess.state.value, True)]


def test_a_better_count_of_another_model_takes_the_first_back(books: OpenBooks) -> None:
    books.prices.add(price_list(NOVEMBER, m=USUAL, big=ModelPrices(10**7, 10**7, 10**7)), imported_by="t")
    guess = event(is_estimated=True, tokens=(100, 0, 0))
    books.events.commit([guess])
    exact = replace(guess, served_model=ModelName("big"), tokens=TokenCounts(90, 0, 5), is_estimated=False)
    assert books.events.commit([exact]) == [RECOUNTED]
    assert (spend(books), counts(books)) == (95 * 10**7, (1, 90, 0, 5))
    by_model = books.rows(
        "select served_model, sum(requests)::int, sum(input_uncached)::int from billing.rollups_day r "
        "join billing.dimensions d on d.id = r.dimension_id group by 1 order by 1"
    )
    assert by_model == [("big", 1, 90), ("m", 0, 0)]


def test_an_exact_count_is_never_changed_by_a_later_estimate_or_another_count(books: OpenBooks) -> None:
    exact = event(tokens=(5, 0, 0))
    books.events.commit([exact])
    for later in (
        replace(exact, is_estimated=True, tokens=TokenCounts(9)),
        replace(exact, tokens=TokenCounts(9)),
    ):
        assert books.events.commit([later]) == [REPEATED]
    assert spend(books) == 5_000_000


def test_a_million_calls_of_a_token_cost_one_unit_in_the_ledger(books: OpenBooks) -> None:
    books.events.commit([event(tokens=(1, 0, 0)) for _ in range(1000)])
    assert spend(books) * 1000 == PICO


def test_events_without_a_price_wait_and_are_rated_when_one_comes(books: OpenBooks) -> None:
    guess = event(served="new", is_estimated=True, tokens=(9, 0, 0))
    waiting = [event(served="new", tokens=(10, 0, 1)), guess]
    never = event(served="never")
    assert books.events.commit([*waiting, never]) == [QUARANTINED] * 3
    # A better count meanwhile waits with its event.
    exact = replace(guess, is_estimated=False, tokens=TokenCounts(30))
    assert books.events.commit([exact]) == [RECOUNTED]
    found = books.events.find(never.event_id)
    assert found is not None and found.is_quarantined and found.net_amount is None
    assert (spend(books), counts(books)) == (0, (3, 119, 0, 11))  # used all the same
    assert books.events.rate_quarantined() == 0
    books.prices.add(price_list(NOVEMBER, m=USUAL, new=USUAL), imported_by="test")
    assert (spend(books), counts(books)) == (42_000_000, (3, 140, 0, 11))
    assert books.rows("select model from billing.quarantine") == [("never",)]
    assert books.events.rate_quarantined() == 0


def test_a_better_count_of_a_model_without_a_price_waits_beside_the_first(books: OpenBooks) -> None:
    guess = event(is_estimated=True, tokens=(100, 0, 0))
    books.events.commit([guess])
    exact = replace(guess, served_model=ModelName("new"), tokens=TokenCounts(90), is_estimated=False)
    assert books.events.commit([exact]) == [RECOUNTED]
    assert spend(books) == 100_000_000
    books.prices.add(price_list(NOVEMBER, m=USUAL, new=USUAL), imported_by="test")
    assert (spend(books), counts(books)) == (90_000_000, (1, 90, 0, 0))


def test_quarantined_events_beyond_a_page_are_all_rated(books: OpenBooks) -> None:
    # The first page can't be rated: its time is before the version that names the model.
    early = [event(served="new", started_at=NOVEMBER) for _ in range(5)]
    books.events.commit([*early, *(event(served="new") for _ in range(7))])
    books.prices.add(price_list(NOON, m=USUAL, new=USUAL), imported_by="test")
    assert len(books.rows("select 1 from billing.quarantine")) == 5
    assert books.events.rate_quarantined(page_size=2) == 0
    books.prices.add(price_list(NOVEMBER, m=USUAL, new=USUAL), imported_by="test")
    assert books.rows("select 1 from billing.quarantine") == []


def test_a_new_price_changes_nothing_that_was_rated(books: OpenBooks) -> None:
    """The version is on each row; a version that would change rows is refused."""
    morning = event(tokens=(10, 0, 0), started_at=NOON - timedelta(hours=1))
    books.events.commit([morning])
    dearer = ModelPrices(3_000_000, 3_000_000, 3_000_000)
    books.prices.add(price_list(NOON, m=dearer), imported_by="test")
    # It began before noon: its price is that of when it was admitted.
    across = event(tokens=(10, 0, 0), started_at=NOON - timedelta(seconds=1), lasts=timedelta(hours=1))
    evening = event(tokens=(10, 0, 0), started_at=NOON)
    books.events.commit([across, evening])
    rows = books.rows(
        "select p.price_version, p.gross_input::bigint from billing.postings p "
        "join billing.events e on e.seq = p.event_seq order by e.started_at"
    )
    assert rows == [(1, 10_000_000), (1, 10_000_000), (2, 30_000_000)]
    for begin in (NOVEMBER, NOON - timedelta(hours=2), NOON - timedelta(minutes=1), NOON):
        with pytest.raises(PriceInForce, match="let the version begin later"):
            books.prices.add(price_list(begin, m=USUAL if begin == NOON else dearer), imported_by="test")
    assert len(books.prices.book().versions) == 2
    # What nobody has used yet may still be mended, in the past as well.
    books.prices.add(price_list(NOON + timedelta(seconds=1), m=USUAL), imported_by="test")
    books.prices.add(price_list(NOVEMBER, m=USUAL, other=dearer), imported_by="test")
    assert books.prices.book().version_for(ModelName("other"), NOVEMBER).id == 4


def test_prices_of_another_currency_are_refused(books: OpenBooks) -> None:
    with pytest.raises(InvalidPrice, match="prices are in EUR, the books in USD"):
        books.prices.add(price_list(NOON, currency="EUR"), imported_by="test")


def test_a_version_comes_back_as_it_was(books: OpenBooks) -> None:
    listed = price_list(NOON, multiplier=Fraction(1, 4), m=USUAL, zwei=ModelPrices(0, 4, 8))
    added = books.prices.add(listed, imported_by="key_1")
    assert books.prices.book().by_id[added.id] == added
    assert added.prices == listed


def test_books_of_another_currency_or_timezone_are_not_written_to(books: OpenBooks) -> None:
    with pytest.raises(BooksDiffer, match="kept in USD and UTC"):
        Books(books.engine, "USD", "Europe/Berlin").open()
    with pytest.raises(BooksDiffer, match="kept in USD and UTC"):
        PostgresEventStore(Books(books.engine, "EUR", "UTC")).commit([event()])


def test_a_database_that_is_away_is_told_from_one_that_refuses(
    books: OpenBooks, postgres: PostgresServer
) -> None:
    nowhere = connect(postgres.url.replace("@/postgres?", "@/nowhere?"))
    with pytest.raises(StoreUnavailable):
        PostgresEventStore(Books(nowhere)).commit([event()])
    nowhere.dispose()
    good, bad = event(), event()
    object.__setattr__(bad.skeleton, "endpoint", "a\x00b")
    with pytest.raises(EventsRefused):
        books.events.commit([good, bad])
    assert books.events.find(good.event_id) is None


def test_connections_of_before_a_restart_are_replaced(books: OpenBooks) -> None:
    books.events.commit([event()])
    with books.engine.connect() as connection:
        connection.execute(
            text(
                "select pg_terminate_backend(pid) from pg_stat_activity "
                "where datname = current_database() and pid <> pg_backend_pid()"
            )
        )
    assert books.events.commit([event()]) == [RECORDED]


def test_writers_of_the_same_rows_in_opposite_order_lose_nothing(books: OpenBooks) -> None:
    """Two writers, overlapping tenants, keys and events; groups in opposite orders."""
    tenants = [f"tnt_{number}" for number in range(8)]
    told = [
        event(f"req_{number:04d}", tenant_id=tenants[number % 8], tokens=(1, 0, 0)) for number in range(160)
    ]
    start = threading.Barrier(4)

    def write(turn: int) -> list[CommitOutcome]:
        mine = told if turn % 2 else told[::-1]
        start.wait()
        return [
            outcome
            for begin in range(0, len(mine), 16)
            for outcome in books.events.commit(mine[begin : begin + 16])
        ]

    with ThreadPoolExecutor(4) as pool:
        outcomes = [outcome for part in pool.map(write, range(4)) for outcome in part]
    assert outcomes.count(RECORDED) == 160
    assert outcomes.count(REPEATED) == 480
    assert [spend(books, tenant) for tenant in tenants] == [20_000_000] * 8


def test_a_transaction_that_was_the_victim_of_a_deadlock_is_tried_again(books: OpenBooks) -> None:
    books.events.commit([event(tokens=(1, 0, 0)), event(tenant_id="tnt_b", tokens=(1, 0, 0))])
    lock = "update billing.month_spend set amount = amount where tenant_id = :tenant"
    with books.engine.connect() as other, ThreadPoolExecutor(1) as pool:
        other.execute(text("set deadlock_timeout = '10s'"))  # the other one finds it, and loses
        other.execute(text(lock), {"tenant": "tnt_b"})
        group = [event(tokens=(1, 0, 0)), event(tenant_id="tnt_b", tokens=(1, 0, 0))]
        writing = pool.submit(books.events.commit, group)
        until_somebody_waits(books)  # it holds tnt_a, and waits for tnt_b
        other.execute(text(lock), {"tenant": "tnt_a"})
        other.rollback()
        assert writing.result() == [RECORDED, RECORDED]
    assert (spend(books), spend(books, "tnt_b")) == (2_000_000, 2_000_000)


def test_prices_and_closings_wait_for_commits_that_have_begun(books: OpenBooks) -> None:
    """A commit knows every version and every closed month that there is when it ends."""
    told = [event(tokens=(1, 0, 0), started_at=NOON)]
    for change in (
        lambda: books.prices.add(price_list(NOON, m=ModelPrices(4, 4, 4)), imported_by="test"),
        lambda: books.periods.close(books.books.calendar.period("2026-11"), closed_by="test"),
    ):
        books.clock.now = NOVEMBER + timedelta(days=40)
        with ThreadPoolExecutor(1) as pool:
            with committing(books.engine):
                changing = pool.submit(change)
                until_somebody_waits(books)
                assert not changing.done()
            changing.result()
    assert books.events.commit(told) == [RECORDED]
    found = books.events.find(told[0].event_id)
    assert found is not None and (found.net_amount, found.effective_at) == (4, books.clock.now)


def test_a_better_count_waits_for_whoever_rates_its_event(books: OpenBooks) -> None:
    guess = event(served="new", is_estimated=True, tokens=(9, 0, 0))
    books.events.commit([guess])
    exact = replace(guess, is_estimated=False, tokens=TokenCounts(7))
    with ThreadPoolExecutor(1) as pool:
        with books.engine.begin() as rater:
            rater.execute(text("select 1 from billing.quarantine for update"))
            counting = pool.submit(books.events.commit, [exact])
            until_somebody_waits(books)
            assert not counting.done()
        assert counting.result() == [RECOUNTED]


# Any events in any order.


@pytest.fixture(scope="module")
def shared(new_books: NewBooks) -> Iterator[OpenBooks]:
    """Books that many examples write to, each under tenants of its own."""
    with open_books(new_books(), timezone="Asia/Kathmandu") as opened:
        opened.prices.add(price_list(), imported_by="test")
        opened.prices.add(
            price_list(NOON, m=ModelPrices(2_000_002, 4, 0), n=USUAL, multiplier=Fraction(1, 2)),
            imported_by="t",
        )
        yield opened


PLANS = st.lists(
    st.tuples(
        st.integers(0, 12),  # which request
        st.integers(0, 2),  # which tenant of the example
        st.sampled_from(["m", "n"]),
        st.booleans(),  # in a batch
        st.integers(-40, 40),  # hours from noon
        st.tuples(*[st.integers(0, 10**6)] * 3),
    ),
    min_size=1,
    max_size=12,
    unique_by=lambda plan: plan[0],
)


Plan = tuple[int, int, str, bool, int, tuple[int, ...]]


def events_of(plans: Sequence[Plan], name: str) -> list[UsageEvent]:
    return [
        event(
            f"{name}_{number}",
            tokens=tokens,
            tenant_id=f"{name}_tnt_{tenant}",
            model=model,
            batch_id="b" if is_batch else None,
            started_at=NOON + timedelta(hours=hours),
        )
        for number, tenant, model, is_batch, hours, tokens in plans
    ]


def ledger(books: OpenBooks, name: str) -> dict[str, list[tuple[object, ...]]]:
    """All that an example's events have left, under names without the example's."""
    queries = {
        "entries": "select event_id, n.seq, account, n.tenant_id, n.currency, amount::text "
        "from billing.entries n join billing.events e on e.seq = n.event_seq where e.event_id like :like",
        "postings": "select event_id, f.kind, f.price_version, f.effective_at::text, f.requests, "
        "f.input_uncached, f.input_cached, f.output, gross_input::text, discount_output::text "
        "from billing.usage_facts f join billing.events e on e.seq = f.event_seq where event_id like :like",
        "spend": "select tenant_id, month, amount::text from billing.month_spend where tenant_id like :like",
        "rollups": "select tenant_id, bucket::text, served_model, is_batch, price_version, requests, "
        "input_uncached, input_cached, output, gross_output::text, discount_input::text "
        "from billing.rollups_day r join billing.dimensions d on d.id = r.dimension_id "
        "where tenant_id like :like",
    }
    found = {key: books.rows(query, like=f"{name}\\_%") for key, query in queries.items()}
    plain = {
        key: [tuple(str(v).replace(name, "") for v in row) for row in rows] for key, rows in found.items()
    }
    return {key: sorted(rows) for key, rows in plain.items()}


_EXAMPLES = iter(range(10**9))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(PLANS, st.data())
def test_any_events_in_any_order_again_and_by_two_writers_give_the_same_ledger(
    shared: OpenBooks, plans: list[Plan], data: st.DataObject
) -> None:
    straight, mixed = (f"x{next(_EXAMPLES)}" for _ in range(2))
    shared.events.commit(events_of(plans, straight))
    told = events_of(plans, mixed)
    order = data.draw(st.permutations(told + data.draw(st.lists(st.sampled_from(told), max_size=6))))
    cut = data.draw(st.integers(0, len(order)))
    size = data.draw(st.integers(1, 5))
    parts = (order[:cut] + order[: cut // 2], order[cut:] + order[: len(order) // 3])

    def write(part: Sequence[UsageEvent]) -> None:
        for begin in range(0, len(part), size):
            shared.events.commit(part[begin : begin + size])

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(write, parts))
    assert ledger(shared, mixed) == ledger(shared, straight)
    for tenant in range(3):
        names = [TenantId(f"{name}_tnt_{tenant}") for name in (straight, mixed)]
        assert sum(shared.ledger.balances(names[1]).values()) == 0
        assert shared.ledger.month_spend(names[0], NOON) == shared.ledger.month_spend(names[1], NOON)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.permutations(["guess", "exact", "guess", "exact"]), st.booleans())
def test_whichever_count_comes_first_the_tenant_owes_the_exact_one(
    shared: OpenBooks, order: list[str], is_known: bool
) -> None:
    name = f"x{next(_EXAMPLES)}"
    exact = event(f"{name}_1", tokens=(3, 4, 5), tenant_id=f"{name}_t", model="m" if is_known else "z")
    told = {"exact": exact, "guess": replace(exact, is_estimated=True, tokens=TokenCounts(9, 9, 9))}
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda kind: shared.events.commit([told[kind]]), order))
    found = shared.events.find(exact.event_id)
    assert found is not None and found.event.tokens == exact.tokens
    expected = 3 * 2_000_002 + 4 * 4 if is_known else 0
    assert shared.ledger.month_spend(exact.tenant_id, NOON) == expected


def test_a_skeleton_found_after_its_gateways_death_becomes_an_event(books: OpenBooks) -> None:
    begun = skeleton(num_prompt_tokens=7)
    kept = type(begun).from_bytes(begun.to_bytes())
    lost = kept.lost(None, NOON + timedelta(minutes=1))
    assert books.events.commit([lost]) == [RECORDED]
    # The gateway was only slow: its own count comes after all.
    late = begun.end(lost.state, TokenCounts(7, 0, 3), NOON + timedelta(minutes=2))
    assert books.events.commit([late]) == [RECOUNTED]
    assert (spend(books), counts(books)) == (13_000_000, (1, 7, 0, 3))
