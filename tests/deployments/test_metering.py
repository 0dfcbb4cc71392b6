"""Gateways over a real Valkey and PostgreSQL: every request becomes one row, whatever kills or leaves it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import Engine, text

from footplate.billing.adapters.postgres.books import Books, connect
from footplate.billing.adapters.postgres.event_store import PostgresEventStore
from footplate.billing.adapters.postgres.price_store import PostgresPriceStore
from footplate.billing.prices import ModelPrices
from footplate.billing.usage import EventState
from tests.billing.builders import USUAL, price_list
from tests.billing.conftest import NewBooks
from tests.deployments.gateways import MODEL, NUM_PROMPT, body, launch, running_gateways
from tests.deployments.test_gateway_replicas import read_some
from tests.postgres_server import PostgresServer
from tests.tenancy.limiter.valkey_server import ValkeyServer, running_valkey, wait_until

LEASE = {"lease_s": 1.0}
COMPLETED, CANCELLED = EventState.COMPLETED.value, EventState.CLIENT_CANCELLED.value
LOST = EventState.GATEWAY_LOST.value


@dataclass
class Row:
    """What stands in the ledger of one request."""

    event_id: str
    state: str
    is_estimated: bool
    input: int
    output: int
    amount: int | None


@dataclass
class Metered:
    """Books, and the options of gateways that keep them."""

    engine: Engine
    options: dict[str, Any]
    journal_dir: Path

    def rows(self) -> list[Row]:
        """All requests, as they are counted."""
        query = """
            select e.event_id, coalesce(r.state, e.state), coalesce(r.is_estimated, e.is_estimated),
                   coalesce(r.input_uncached + r.input_cached, e.input_uncached + e.input_cached),
                   coalesce(r.output, e.output),
                   (select sum(amount) from billing.entries n
                    where n.event_seq = e.seq and n.account = 'tenant')
            from billing.events e left join billing.recounts r on r.event_seq = e.seq order by e.seq"""
        with self.engine.connect() as connection:
            return [Row(*row) for row in connection.execute(text(query))]

    def await_rows(self, count: int) -> list[Row]:
        wait_until(lambda: len(self.rows()) == count, timeout_s=15)
        return self.rows()


@pytest.fixture(scope="module")
def valkey() -> Iterator[ValkeyServer]:
    with running_valkey() as server:
        yield server


@contextlib.contextmanager
def metered_books(url: str, journal_dir: Path, prices: ModelPrices | None = USUAL) -> Iterator[Metered]:
    engine = connect(url)
    books = Books(engine)
    books.open()
    if prices is not None:
        store = PostgresPriceStore(books, PostgresEventStore(books).rate_quarantined)
        store.add(price_list(**{MODEL: prices}), imported_by="test")
    try:
        yield Metered(engine, {"books_url": url, "journal_dir": str(journal_dir)}, journal_dir)
    finally:
        engine.dispose()


@pytest.fixture
def metered(new_books: NewBooks, tmp_path: Path, valkey: ValkeyServer) -> Iterator[Metered]:
    valkey.ask("FLUSHALL")
    with metered_books(new_books(), tmp_path / "journal") as found:
        yield found


def cost(num_input: int, num_output: int) -> int:
    return num_input * USUAL.input + num_output * USUAL.output


def test_one_call_of_each_kind_is_one_row_under_the_id_that_the_client_has(
    metered: Metered, valkey: ValkeyServer
) -> None:
    """FAULTS b1 5, 6, 8 and b2 12: streams with and without usage, both endpoints, limits or none."""
    for quota in ({}, {"tokens_per_minute": 10**6}):
        with running_gateways(1, valkey.url, quota, **metered.options) as [gateway], gateway.http() as http:
            before = len(metered.rows())
            told = set()
            chat = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}
            for path, asked in (("/v1/completions", body(5)), ("/v1/chat/completions", chat)):
                for extra in (
                    {},
                    {"stream": True},
                    {"stream": True, "stream_options": {"include_usage": True}},
                ):
                    answer = http.post(path, json={**asked, **extra})
                    assert answer.status_code == 200
                    told.add(answer.headers["x-request-id"])
            rows = metered.await_rows(before + 6)[before:]
            assert {row.event_id for row in rows} == told
            assert [(row.state, row.is_estimated, row.output) for row in rows] == [(COMPLETED, False, 5)] * 6
            assert {row.input for row in rows[:3]} == {NUM_PROMPT} and len(
                {row.input for row in rows[3:]}
            ) == 1
            assert [row.amount for row in rows] == [cost(row.input, 5) for row in rows]
            wait_until(lambda: gateway.metric("footplate_reservations_open") == 0)
            assert gateway.metric('footplate_usage_events_total{outcome="recorded"}') == 6
    assert valkey.ask("KEYS", "*:note:*") == []


def test_50_parallel_streams_are_50_rows(metered: Metered, valkey: ValkeyServer) -> None:
    """FAULTS b1 5."""
    with running_gateways(1, valkey.url, {}, step_s=0.002, **metered.options) as [gateway]:
        threads = [threading.Thread(target=lambda n=n: gateway.ask(n + 1)) for n in range(50)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        rows = metered.await_rows(50)
    assert sorted(row.output for row in rows) == list(range(1, 51))


def test_a_client_that_leaves_pays_its_prompt_and_what_was_made(
    metered: Metered, valkey: ValkeyServer
) -> None:
    """FAULTS b1 1 and 3: one row, neither free nor the full reservation, nothing held afterwards."""
    with running_gateways(1, valkey.url, {}, step_s=0.01, **metered.options) as [gateway]:
        with gateway.stream(1_000) as lines:
            read_some(lines, 10)
        [row] = metered.await_rows(1)
        assert (row.state, row.is_estimated, row.input) == (CANCELLED, False, NUM_PROMPT)
        assert 10 <= row.output < 200
        assert row.amount == cost(NUM_PROMPT, row.output)
        # And before the first byte, of an answer in one piece.
        with gateway.http(timeout_s=0.2) as http, pytest.raises(httpx.ReadTimeout):
            http.post("/v1/completions", json=body(1_000))
        rows = metered.await_rows(2)
        assert (rows[1].state, rows[1].input) == (CANCELLED, NUM_PROMPT) and rows[1].output > 0
        wait_until(lambda: gateway.metric("footplate_reservations_open") == 0)
    assert valkey.ask("ZCARD", "footplate:limits:{tenant-a}:leases") == 0


def test_a_killed_gateways_streams_are_billed_as_far_as_its_last_beat_said(
    metered: Metered, valkey: ValkeyServer
) -> None:
    """FAULTS b1 1 (kill -9) without any limit: one estimated row each, at most the last second is missing."""
    options = {"step_s": 0.01, "limits": LEASE, **metered.options}
    with running_gateways(2, valkey.url, {}, **options) as [victim, _]:
        num_read = 0
        with pytest.raises(httpx.TransportError), victim.stream(5_000) as lines:
            read_some(lines, 150)
            num_read = 150
            victim.kill()
            for _line in lines:
                num_read += 1
        [row] = metered.await_rows(1)
    assert (row.state, row.is_estimated, row.input) == (LOST, True, NUM_PROMPT)
    assert num_read - 100 <= row.output <= num_read + 5
    assert row.amount == cost(NUM_PROMPT, row.output)
    assert valkey.ask("KEYS", "*:lost") == valkey.ask("KEYS", "*:note:*") == []


def test_a_gateway_that_stood_still_mends_the_estimate_that_was_made_of_it(
    metered: Metered, valkey: ValkeyServer
) -> None:
    """First the reaper's estimate, then the gateway's own exact count as an adjustment."""
    options = {"step_s": 0.01, "limits": LEASE, **metered.options}
    with running_gateways(2, valkey.url, {}, **options) as [sleeper, _]:
        with sleeper.stream(150) as lines:
            read_some(lines, 20)
            sleeper.send(signal.SIGSTOP)
            [row] = metered.await_rows(1)
            assert (row.state, row.is_estimated) == (LOST, True) and row.output < 150
            sleeper.send(signal.SIGCONT)
            assert list(lines)[-1] == "data: [DONE]"
        wait_until(lambda: not metered.rows()[0].is_estimated)
        [row] = metered.rows()
    assert (row.state, row.output, row.amount) == (COMPLETED, 150, cost(NUM_PROMPT, 150))


def test_nothing_is_lost_or_doubled_while_the_database_is_away_and_a_gateway_is_killed_meanwhile(
    postgres: PostgresServer, metered: Metered, valkey: ValkeyServer
) -> None:
    """FAULTS b2 19 and b5 52: into the journal, and from there by whichever process comes next, once."""
    options = {"limits": LEASE, **metered.options}
    with running_gateways(1, valkey.url, {}, **options) as gateways:
        [gateway] = gateways
        assert gateway.ask(1).status_code == 200
        metered.await_rows(1)
        for pid in postgres.pids():
            os.kill(pid, signal.SIGSTOP)
        try:
            for number in range(2, 6):
                assert gateway.ask(number).status_code == 200
            wait_until(lambda: gateway.metric("footplate_usage_journal_events_total") == 4, timeout_s=15)
            assert gateway.mode("usage") == "journal"
            gateway.kill()
        finally:
            for pid in postgres.pids():
                os.kill(pid, signal.SIGCONT)
        gateways[:] = launch(1, valkey.url, {}, **options)
        rows = metered.await_rows(5)
        assert sorted((row.output, row.state) for row in rows) == [(n, COMPLETED) for n in range(1, 6)]
        assert gateways[0].ask(6).status_code == 200
        metered.await_rows(6)
        wait_until(lambda: valkey.ask("ZCARD", "footplate:limits:{tenant-a}:leases") == 0)
        assert len(metered.rows()) == 6


def test_while_neither_database_nor_disk_takes_events_nothing_new_begins(
    new_books: NewBooks, tmp_path: Path, valkey: ValkeyServer
) -> None:
    """What has begun is kept and recorded once either is back."""
    valkey.ask("FLUSHALL")
    with metered_books(new_books(), tmp_path / "journal") as metered:
        options = {
            **metered.options,
            "books_url": metered.options["books_url"].replace("host=", "host=/nowhere"),
        }
        with running_gateways(1, valkey.url, {}, **options) as [gateway]:
            # A file where the journal's folder was: nothing can be written there.
            [folder] = metered.journal_dir.iterdir()
            kept = folder.rename(tmp_path / "kept")
            folder.write_text("")
            assert gateway.ask(3).status_code == 200
            wait_until(lambda: gateway.mode("usage") == "stalled", timeout_s=15)
            refused = gateway.ask(3)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "server_is_overloaded"
            assert refused.headers["retry-after"] == "1"
            folder.unlink()
            kept.rename(folder)
            wait_until(lambda: gateway.mode("usage") == "journal", timeout_s=15)
            assert gateway.ask(4).status_code == 200
        with running_gateways(1, valkey.url, {}, **metered.options):
            rows = metered.await_rows(2)
    assert sorted(row.output for row in rows) == [3, 4]


def test_a_model_without_a_price_is_quarantined_and_never_free(
    new_books: NewBooks, tmp_path: Path, valkey: ValkeyServer
) -> None:
    """FAULTS b3 27 and b6 57."""
    valkey.ask("FLUSHALL")
    with (
        metered_books(new_books(), tmp_path / "journal", prices=None) as metered,
        running_gateways(1, valkey.url, {}, **metered.options) as [gateway],
    ):
        assert gateway.ask(4).status_code == 200
        [row] = metered.await_rows(1)
        assert (row.output, row.amount) == (4, None)
        wait_until(lambda: gateway.metric("footplate_usage_quarantined_total") == 1)
        books = Books(metered.engine)
        store = PostgresPriceStore(books, PostgresEventStore(books).rate_quarantined)
        store.add(price_list(**{MODEL: USUAL}), imported_by="test")
        assert metered.rows()[0].amount == cost(NUM_PROMPT, 4)


def test_streams_that_began_while_valkey_was_away_are_billed_though_their_gateway_is_killed(
    metered: Metered, valkey: ValkeyServer
) -> None:
    """Both die: nobody but this machine's disk knows of the streams, with limits or without."""
    for number, quota in enumerate(({}, {"tokens_per_minute": 10**6}), 1):
        options = {"step_s": 0.01, "limits": LEASE, **metered.options}
        with running_gateways(1, valkey.url, quota, **options) as gateways:
            [victim] = gateways
            assert victim.ask(1).status_code == 200
            with pytest.raises(httpx.TransportError), victim.stream(5_000) as early:
                read_some(early, 5)
                valkey.pause()
                try:
                    with victim.stream(5_000) as lines:
                        read_some(lines, 150)
                        victim.kill()
                        list(lines)
                finally:
                    valkey.go_on()
            gateways[:] = launch(1, valkey.url, quota, **options)
            rows = metered.await_rows(3 * number)[3 * number - 3 :]
            found = {row.state: row for row in rows}
            assert [row.state for row in rows].count(LOST) == 2 and COMPLETED in found
            # The one that began before, too, as far as it had come when nobody heard of it any more.
            assert all(row.output >= 50 for row in rows if row.state == LOST)
            assert list((metered.journal_dir.with_name("open-requests")).iterdir()) == []
            wait_until(lambda: valkey.ask("KEYS", "*:note:*") == valkey.ask("KEYS", "*:lost") == [])
            assert len(metered.rows()) == 3 * number


def last_usage(answer: httpx.Response) -> dict[str, int]:
    *_, last, done = [event for event in answer.text.split("\n\n") if event]
    assert done == "data: [DONE]"
    usage: dict[str, int] = json.loads(last.removeprefix("data: "))["usage"]
    return usage


def test_the_bill_says_what_the_answer_said(metered: Metered, valkey: ValkeyServer) -> None:
    with running_gateways(1, valkey.url, {}, num_tokens=7, **metered.options) as [gateway]:
        asked = {"stream": True, "stream_options": {"include_usage": True}}
        with gateway.http() as http:
            usage = last_usage(http.post("/v1/completions", json=body(20, **asked)))
        [row] = metered.await_rows(1)
    assert (row.input, row.output) == (usage["prompt_tokens"], usage["completion_tokens"]) == (NUM_PROMPT, 7)
