"""`Idempotency-Key` over real gateways and a real database: one request runs, all others hear of it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from sqlalchemy import text

from tests.billing.conftest import NewBooks
from tests.builders import TENANT_KEY
from tests.deployments.gateways import MODEL, NUM_PROMPT, GatewayProcess, body, running_gateways
from tests.deployments.test_metering import Metered, metered_books
from tests.postgres_server import PostgresServer
from tests.tenancy.limiter.valkey_server import ValkeyServer, running_valkey, wait_until

SECRET = "what-people-write-into-keys"


@pytest.fixture(scope="module")
def valkey() -> Iterator[ValkeyServer]:
    with running_valkey() as server:
        yield server


@pytest.fixture
def metered(new_books: NewBooks, tmp_path: Path, valkey: ValkeyServer) -> Iterator[Metered]:
    valkey.ask("FLUSHALL")
    with metered_books(new_books(), tmp_path / "journal") as found:
        yield found


def ask(gateway: GatewayProcess, key: str, max_tokens: int = 3, **fields: object) -> httpx.Response:
    with gateway.http() as http:
        headers = {"idempotency-key": key}
        return http.post("/v1/completions", json=body(max_tokens, **fields), headers=headers)


def test_a_repeat_is_refused_and_told_what_came_of_the_first(metered: Metered, valkey: ValkeyServer) -> None:
    """By whichever gateway, also after Valkey has lost all it knew; nothing runs or is billed twice."""
    with running_gateways(2, valkey.url, {}, **metered.options) as [one, other]:
        first = ask(one, SECRET)
        assert first.status_code == 200
        name = first.headers["x-request-id"]
        metered.await_rows(1)
        valkey.ask("FLUSHALL")
        for gateway in (one, other):
            for stream in (False, True):
                repeat = ask(gateway, SECRET, stream=stream)
                error = repeat.json()["error"]
                assert (repeat.status_code, error["code"]) == (409, "idempotency_key_reused")
                assert repeat.headers["x-should-retry"] == "false"
                told = f"{name}: completed, {NUM_PROMPT} input tokens (0 cached), 3 output"
                assert told in error["message"] and SECRET not in error["message"]
        assert ask(other, "another").status_code == 200
        assert len(metered.await_rows(2)) == 2
    with metered.engine.connect() as connection:
        rows = connection.execute(text("select * from billing.request_keys")).all()
        assert len(rows) == 2 and SECRET.encode() not in b"".join(bytes(row.key_digest) for row in rows)


def test_of_many_at_once_one_runs(metered: Metered, valkey: ValkeyServer) -> None:
    with running_gateways(2, valkey.url, {}, step_s=0.01, **metered.options) as gateways:
        answers: list[httpx.Response] = []
        threads = [
            threading.Thread(target=lambda n=n: answers.append(ask(gateways[n % 2], "k", 30)))
            for n in range(16)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(answer.status_code for answer in answers) == [200] + [409] * 15
        refused = [answer.json()["error"]["message"] for answer in answers if answer.status_code == 409]
        [first] = [answer.headers["x-request-id"] for answer in answers if answer.status_code == 200]
        assert all(first in message for message in refused)
        assert any("in_progress" in message for message in refused)
        metered.await_rows(1)


def test_a_request_that_did_not_begin_leaves_its_key_free(metered: Metered, valkey: ValkeyServer) -> None:
    quota = {"max_concurrent_requests": 1}
    with running_gateways(1, valkey.url, quota, step_s=0.01, **metered.options) as [gateway]:
        with gateway.stream(500) as lines:
            next(lines)
            assert ask(gateway, "k").status_code == 429
        wait_until(lambda: ask(gateway, "k").status_code == 200)
        assert ask(gateway, "k").status_code == 409


def test_a_key_is_free_again_after_a_day(metered: Metered, valkey: ValkeyServer) -> None:
    with running_gateways(1, valkey.url, {}, **metered.options) as [gateway]:
        for key in ("a", "b"):
            assert ask(gateway, key).status_code == 200
        with metered.engine.begin() as connection:
            connection.execute(
                text("update billing.request_keys set claimed_at = claimed_at - interval '25 h'")
            )
        assert ask(gateway, "a").status_code == 200
        assert ask(gateway, "a").status_code == 409
        with metered.engine.connect() as connection:
            assert connection.execute(text("select count(*) from billing.request_keys")).scalar() == 1


def test_without_the_database_nothing_runs_under_a_key(
    postgres: PostgresServer, metered: Metered, valkey: ValkeyServer
) -> None:
    with running_gateways(1, valkey.url, {}, **metered.options) as [gateway]:
        assert ask(gateway, "a").status_code == 200
        metered.await_rows(1)
        pids = postgres.pids()
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            refused = ask(gateway, "b")
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        wait_until(lambda: ask(gateway, "b").status_code == 200)


@pytest.mark.parametrize("key", ["", "a" * 256, "a\tb"])
def test_what_can_be_no_key_is_refused(metered: Metered, valkey: ValkeyServer, key: str) -> None:
    with running_gateways(1, valkey.url, {}, **metered.options) as [gateway]:
        refused = ask(gateway, key)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "Idempotency-Key")


def test_the_sdk_does_not_try_a_repeat_again(metered: Metered, valkey: ValkeyServer) -> None:
    with (
        running_gateways(1, valkey.url, {}, **metered.options) as [gateway],
        openai.OpenAI(api_key=TENANT_KEY, base_url=f"{gateway.url}/v1", max_retries=3) as sdk,
    ):
        asked = {"model": MODEL, "prompt": [5] * 3, "extra_headers": {"Idempotency-Key": "k"}}
        assert sdk.completions.create(**asked).usage
        with pytest.raises(openai.ConflictError) as refused:
            sdk.completions.create(**asked)
        assert refused.value.response.headers["x-should-retry"] == "false"
