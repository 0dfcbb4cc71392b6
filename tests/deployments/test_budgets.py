"""Budgets over real gateways, Valkey and PostgreSQL: never passed, right after a flush, closed in doubt."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from footplate.billing.adapters.postgres.books import Books
from footplate.billing.adapters.postgres.ledger_reader import PostgresLedgerReader
from footplate.billing.money import decimal_text
from footplate.billing.usage import TenantId
from footplate.platform.metering import utc_now
from tests.billing.conftest import NewBooks
from tests.deployments.gateways import NUM_PROMPT, GatewayProcess, body, running_gateways
from tests.deployments.test_metering import Metered, cost, metered_books
from tests.postgres_server import PostgresServer
from tests.tenancy.limiter.valkey_server import ValkeyServer, running_valkey, wait_until


@pytest.fixture(scope="module")
def valkey() -> Iterator[ValkeyServer]:
    with running_valkey() as server:
        yield server


@pytest.fixture
def metered(new_books: NewBooks, tmp_path: Path, valkey: ValkeyServer) -> Iterator[Metered]:
    valkey.ask("FLUSHALL")
    with metered_books(new_books(), tmp_path / "journal") as found:
        yield found


def budget(num_requests: int, max_tokens: int) -> str:
    """As much as so many requests of the longest answer cost."""
    return decimal_text(num_requests * cost(NUM_PROMPT, max_tokens))


def refusal(answer: httpx.Response) -> tuple[int, str, str | None]:
    return answer.status_code, answer.json()["error"]["code"], answer.headers.get("x-should-retry")


def spent(metered: Metered) -> int:
    return PostgresLedgerReader(Books(metered.engine)).month_spend(TenantId("tenant-a"), utc_now())


def settled(gateways: list[GatewayProcess]) -> None:
    wait_until(lambda: all(g.metric("footplate_reservations_open") == 0 for g in gateways))


def test_two_gateways_spend_a_budget_to_the_last_request_and_never_pass_it(
    metered: Metered, valkey: ValkeyServer
) -> None:
    """FAULTS b3 23 and b5 51: exact under load, and from the ledger alone after a flush."""
    quota = {"monthly_budget": budget(10, 8)}
    with running_gateways(2, valkey.url, quota, step_s=0.002, **metered.options) as gateways:
        answers: list[httpx.Response] = []
        threads = [
            threading.Thread(target=lambda n=n: answers.append(gateways[n % 2].ask(8))) for n in range(40)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(answer.status_code == 200 for answer in answers) == 10
        refused = [answer for answer in answers if answer.status_code != 200]
        # For good where it is spent; for a while where others hold it and may not need it all.
        assert {refusal(answer)[:2] for answer in refused} <= {
            (429, "insufficient_quota"),
            (429, "rate_limit_exceeded"),
        }
        assert "budget" in refused[0].json()["error"]["message"]
        metered.await_rows(10)
        settled(gateways)
        assert spent(metered) == 10 * cost(NUM_PROMPT, 8)
        valkey.ask("FLUSHALL")
        for gateway in gateways:
            assert refusal(gateway.ask(8)) == (429, "insufficient_quota", "false")


def test_what_was_held_and_not_used_can_be_spent(metered: Metered, valkey: ValkeyServer) -> None:
    quota = {"monthly_budget": budget(1, 1_000)}
    with running_gateways(1, valkey.url, quota, num_tokens=3, **metered.options) as gateways:
        [gateway] = gateways
        for number in range(1, 4):
            # All but a few tokens of what the longest answer may cost comes back.
            assert gateway.ask(900).status_code == 200
            metered.await_rows(number)
            settled(gateways)
        assert refusal(gateway.ask(1_000))[1] == "insufficient_quota"


def test_what_others_only_hold_is_refused_for_a_while(metered: Metered, valkey: ValkeyServer) -> None:
    quota = {"monthly_budget": budget(1, 1_000)}
    with running_gateways(1, valkey.url, quota, step_s=0.01, **metered.options) as [gateway]:
        with gateway.stream(900) as lines:
            next(lines)
            held = gateway.ask(900)
            assert refusal(held)[:2] == (429, "rate_limit_exceeded")
            assert int(held.headers["retry-after"]) > 0
            # What would not pass alone never will.
            assert refusal(gateway.ask(1_001))[:2] == (429, "insufficient_quota")
        wait_until(lambda: gateway.ask(500).status_code == 200)


def test_a_soft_budget_warns_and_refuses_nothing(metered: Metered, valkey: ValkeyServer) -> None:
    quota = {"monthly_soft_budget": budget(1, 8)}
    with running_gateways(1, valkey.url, quota, **metered.options) as gateways:
        first = gateways[0].ask(8)
        assert first.status_code == 200 and "x-footplate-budget" not in first.headers
        metered.await_rows(1)
        settled(gateways)
        with gateways[0].http() as http:
            for stream in (False, True):
                answer = http.post("/v1/completions", json=body(8, stream=stream))
                assert answer.headers["x-footplate-budget"] == "soft_exceeded"
        assert gateways[0].metric("footplate_soft_budget_exceeded_total") == 2


def test_a_budget_is_closed_while_the_ledger_can_not_be_read(
    postgres: PostgresServer, metered: Metered, valkey: ValkeyServer
) -> None:
    with running_gateways(1, valkey.url, {"monthly_budget": "1.00"}, **metered.options) as [gateway]:
        pids = postgres.pids()
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            closed = gateway.ask(2)
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        assert refusal(closed)[:2] == (503, "server_is_overloaded")
        assert closed.headers["retry-after"] == "1"
        wait_until(lambda: gateway.ask(2).status_code == 200)


def test_a_model_without_a_price_can_not_be_held_to_a_budget(
    new_books: NewBooks, tmp_path: Path, valkey: ValkeyServer
) -> None:
    """FAULTS b6 57: nothing slips past a budget for want of a price."""
    valkey.ask("FLUSHALL")
    with (
        metered_books(new_books(), tmp_path / "journal", prices=None) as metered,
        running_gateways(1, valkey.url, {"monthly_budget": "1.00"}, **metered.options) as [gateway],
    ):
        assert refusal(gateway.ask(2)) == (429, "insufficient_quota", "false")
        assert metered.rows() == []


def test_the_ledger_says_what_one_key_has_spent(metered: Metered, valkey: ValkeyServer) -> None:
    with running_gateways(1, valkey.url, {}, **metered.options) as [gateway]:
        gateway.ask(4)
        metered.await_rows(1)
    reader = PostgresLedgerReader(Books(metered.engine))
    tenant, now = TenantId("tenant-a"), utc_now()
    assert reader.month_spend_of_key(tenant, "key-a", now) == reader.month_spend(tenant, now) > 0
    assert reader.month_spend_of_key(tenant, "key-b", now) == 0
