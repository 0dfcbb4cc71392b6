"""Several gateway processes and one Valkey: exact together, and right again once one is killed or stopped."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import httpx
import pytest

from footplate.tenancy.adapters.valkey.limiter import ValkeyLimiter, connect
from footplate.tenancy.limiter.limits import Limit, LimitKind, Scope
from tests.builders import TENANT_KEY
from tests.deployments.gateways import NUM_PROMPT, GatewayProcess, body, launch, running_gateways
from tests.tenancy.limiter.valkey_server import ValkeyServer, running_valkey, wait_until

NUM_CLIENTS = 64
LEASE_S = 1.0
TPM, DAY = LimitKind.TOKENS_PER_MINUTE, LimitKind.TOKENS_PER_DAY
RUNNING = LimitKind.MAX_CONCURRENT_REQUESTS


@pytest.fixture
def valkey() -> Iterator[ValkeyServer]:
    with running_valkey() as server:
        yield server


def used(server: ValkeyServer, kind: LimitKind) -> int:
    """What a limit of the tenant counts now, of whichever gateway."""

    async def ask() -> int:
        client = connect(server.url, timeout_s=5)
        [state] = await ValkeyLimiter(client).peek("tenant-a", [Limit(Scope("tenant-a"), kind, 10**9)])
        await client.aclose()
        return state.used

    return asyncio.run(ask())


@dataclass
class Seen:
    """What 64 clients saw."""

    used: int = 0
    remaining: list[int] = field(default_factory=list)
    left_at_refusal: list[int] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


async def crowd(gateways: list[GatewayProcess], num_rounds: int, max_tokens: int) -> Seen:
    seen = Seen()
    headers = {"authorization": f"Bearer {TENANT_KEY}"}
    limits = httpx.Limits(max_connections=NUM_CLIENTS)

    async def client(number: int) -> None:
        url = gateways[number % len(gateways)].url + "/v1/completions"
        for turn in range(num_rounds):
            is_stream = (number + turn) % 2 == 0
            asked = {"stream": True, "stream_options": {"include_usage": True}} if is_stream else {}
            request = http.build_request("POST", url, json=body(max_tokens, **asked))
            answer = await http.send(request, stream=True)
            content = await answer.aread()
            left = int(answer.headers["x-ratelimit-remaining-tokens"])
            if answer.status_code == 200:
                seen.remaining.append(left)
                seen.used += usage_of(content, is_stream)
            elif answer.json()["error"]["type"] == "tokens":
                seen.left_at_refusal.append(left)
            elif answer.json()["error"]["type"] != "requests":
                seen.faults.append(answer.text)

    async with httpx.AsyncClient(
        headers=headers, timeout=60, limits=limits, trust_env=False, verify=False
    ) as http:
        await asyncio.gather(*(client(number) for number in range(NUM_CLIENTS)))
    return seen


def usage_of(content: bytes, is_stream: bool) -> int:
    if is_stream:
        *_, last, done = [event for event in content.decode().split("\n\n") if event]
        assert done == "data: [DONE]"
        content = last.removeprefix("data: ").encode()
    return int(json.loads(content)["usage"]["total_tokens"])


def test_64_clients_of_3_gateways_use_a_limit_up_and_never_a_token_more(valkey: ValkeyServer) -> None:
    """Of 20 tokens that each may answer it answers 5: refunds make room while others are refused."""
    quota = {"tokens_per_minute": 3_000}
    with running_gateways(3, valkey.url, quota, step_s=0.002, num_tokens=5) as gateways:
        seen = asyncio.run(crowd(gateways, num_rounds=6, max_tokens=20))
        assert seen.faults == []
        # The ends of the last answers may still be on their way.
        wait_until(lambda: all(gateway.metric("footplate_reservations_open") == 0 for gateway in gateways))
        wait_until(lambda: used(valkey, TPM) == seen.used)
    assert seen.used <= 3_000 and min(seen.remaining) >= 0
    # Whoever was refused would not have fitted beside what was used and reserved at that moment.
    assert seen.left_at_refusal and max(seen.left_at_refusal) < NUM_PROMPT + 20
    # With nothing reserved any more there is less left than one request needs.
    assert 3_000 - seen.used < NUM_PROMPT + 20 + NUM_CLIENTS * 15


def test_64_clients_of_3_gateways_run_no_more_at_a_time_than_they_may(valkey: ValkeyServer) -> None:
    """Watched where they are counted: a busy client learns late that an answer has ended."""
    quota = {"max_concurrent_requests": 5, "tokens_per_minute": 10**6}
    running: list[int] = []
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.is_set():
            running.append(used(valkey, RUNNING))

    with running_gateways(3, valkey.url, quota, step_s=0.01, num_tokens=5) as gateways:
        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            seen = asyncio.run(crowd(gateways, num_rounds=4, max_tokens=5))
        finally:
            is_over.set()
            watcher.join()
        assert seen.faults == []
        wait_until(lambda: used(valkey, RUNNING) == 0)
    assert 1 < max(running) <= 5


# Of a day: a minute passes within fifty kills, and what the first ones used would leave.
QUOTA = {"max_concurrent_requests": 1, "tokens_per_day": 10**6}
LEASE = {"lease_s": LEASE_S}


def read_some(lines: Iterator[str], count: int) -> None:
    for _ in range(count):
        assert next(lines).startswith("data: {")


def kill_midstream(valkey: ValkeyServer, gateways: list[GatewayProcess]) -> None:
    """Kill the first gateway while it streams; the second lets the next call in once the lease has ended."""
    victim, other = gateways
    before = used(valkey, DAY)
    with pytest.raises(httpx.TransportError), victim.stream(1_000) as lines:
        read_some(lines, 20)
        assert used(valkey, DAY) - before == NUM_PROMPT + 1_000
        victim.kill()
        killed_at = time.monotonic()
        assert other.ask().status_code == 429, "the reservation is held until the lease ends"
        list(lines)
    wait_until(lambda: other.ask().status_code == 200, timeout_s=LEASE_S + 3)
    assert time.monotonic() - killed_at > LEASE_S / 2
    wait_until(lambda: used(valkey, RUNNING) == 0)
    # What the beats told stays used, beside the next call's own 14.
    kept = used(valkey, DAY) - before - (NUM_PROMPT + 4)
    assert 0 <= kept < NUM_PROMPT + 500


def test_a_gateway_killed_midstream_holds_nothing_after_its_lease(valkey: ValkeyServer) -> None:
    """FAULTS b3 24: five times here, fifty in `make chaos`."""
    with running_gateways(2, valkey.url, QUOTA, step_s=0.01, limits=LEASE) as gateways:
        for turn in range(5):
            kill_midstream(valkey, gateways)
            if turn < 4:
                # The survivor is the next victim.
                gateways[:] = [gateways[1], *launch(1, valkey.url, QUOTA, step_s=0.01, limits=LEASE)]


def test_a_gateway_stopped_past_its_lease_neither_settles_nor_takes_again(valkey: ValkeyServer) -> None:
    with running_gateways(2, valkey.url, QUOTA, step_s=0.01, limits=LEASE) as gateways:
        sleeper, other = gateways
        with sleeper.stream(150) as lines:
            read_some(lines, 5)
            sleeper.send(signal.SIGSTOP)
            wait_until(lambda: used(valkey, RUNNING) == 0, timeout_s=LEASE_S + 3)
            kept = used(valkey, DAY)
            assert kept < NUM_PROMPT + 150
            with other.stream(400) as others:
                read_some(others, 2)
                held = used(valkey, DAY)
                assert held == kept + NUM_PROMPT + 400
                sleeper.send(signal.SIGCONT)
                # Its stream goes on to its end, and neither its beats nor that end change what is counted.
                assert list(lines)[-1] == "data: [DONE]"
                wait_until(lambda: sleeper.metric("footplate_reservations_open") == 0)
                assert (used(valkey, RUNNING), used(valkey, DAY)) == (1, held)
                assert sleeper.ask().status_code == 429, "it did not end the other's reservation"
        # A client that leaves gives back what it did not get.
        wait_until(lambda: used(valkey, RUNNING) == 0)
        assert used(valkey, DAY) < held


@pytest.mark.parametrize(
    ("mode", "statuses"), [("local", [200, 429, 429]), ("closed", [503] * 3), ("open", [200] * 3)]
)
def test_while_valkey_is_stopped_every_answer_comes_in_time_as_declared(
    valkey: ValkeyServer, mode: str, statuses: list[int]
) -> None:
    """FAULTS b5 48 and 49: each of two gateways holds half of four requests a minute, and of the one used."""
    options = {"limits": {"degraded_mode": {"rate": mode}}, "num_gateways": 2}
    with running_gateways(1, valkey.url, {"requests_per_minute": 4}, num_tokens=3, **options) as [gateway]:
        assert gateway.ask().status_code == 200
        assert (gateway.mode(), gateway.metric("footplate_limits_degraded")) == ("shared", 0)
        valkey.pause()
        try:
            for status in statuses:
                began = time.monotonic()
                answer = gateway.ask()
                assert time.monotonic() - began < 1
                assert answer.status_code == status
            assert (gateway.mode(), gateway.metric("footplate_limits_degraded")) == (mode, 1)
        finally:
            valkey.go_on()
        # Nobody asks, and it is found all the same.
        wait_until(lambda: gateway.mode() == "shared", timeout_s=5)
        assert gateway.metric("footplate_limits_mode_changes") == 2
        wait_until(lambda: gateway.metric("footplate_reservations_unsent") == 0, timeout_s=5)
        assert gateway.ask().headers["x-ratelimit-remaining-requests"] == "2"


def test_an_outage_that_nobody_meets_is_shown_all_the_same(valkey: ValkeyServer) -> None:
    with running_gateways(1, valkey.url, {"requests_per_minute": 4}) as [gateway]:
        valkey.pause()
        try:
            wait_until(lambda: gateway.mode() == "local", timeout_s=5)
        finally:
            valkey.go_on()
        wait_until(lambda: gateway.mode() == "shared", timeout_s=5)


def test_what_runs_is_counted_again_after_a_flush(valkey: ValkeyServer) -> None:
    """FAULTS b5 51, as far as rates go: open reservations come back with the next beat."""
    with running_gateways(2, valkey.url, QUOTA, step_s=0.01, limits=LEASE) as [gateway, other]:
        with gateway.stream(800) as lines:
            read_some(lines, 3)
            valkey.ask("FLUSHALL")
            assert used(valkey, RUNNING) == 0
            wait_until(lambda: used(valkey, RUNNING) == 1)
            assert used(valkey, DAY) == NUM_PROMPT + 800
            assert other.ask().status_code == 429
        wait_until(lambda: used(valkey, RUNNING) == 0)


def test_leases_of_a_tenant_that_calls_no_more_are_reaped(valkey: ValkeyServer) -> None:
    with running_gateways(2, valkey.url, QUOTA, step_s=0.01, limits=LEASE) as [victim, _]:
        with pytest.raises(httpx.TransportError), victim.stream(1_000) as lines:
            read_some(lines, 20)
            victim.kill()
            list(lines)
        leases = "footplate:limits:{tenant-a}:leases"
        assert valkey.ask("ZCARD", leases) == 1
        wait_until(lambda: valkey.ask("ZCARD", leases) == 0, timeout_s=LEASE_S + 5)


def test_nothing_is_left_held_when_a_gateway_stops_in_order(valkey: ValkeyServer) -> None:
    with running_gateways(1, valkey.url, QUOTA, num_tokens=3) as [gateway]:
        answers = [threading.Thread(target=gateway.ask) for _ in range(4)]
        for answer in answers:
            answer.start()
        for answer in answers:
            answer.join()
    assert used(valkey, RUNNING) == 0
