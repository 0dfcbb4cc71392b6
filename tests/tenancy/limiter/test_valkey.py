"""What holds of the Valkey adapter alone: many clients at once, clusters, lost answers, flushed data."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from redis.asyncio.cluster import RedisCluster
from redis.exceptions import ConnectionError as LostConnection

from footplate.tenancy.adapters.valkey.limiter import ValkeyLimiter, ValkeyLimiterConfig, connect
from footplate.tenancy.errors import LimiterUnavailable
from footplate.tenancy.limiter.decisions import Amounts
from footplate.tenancy.limiter.limits import Limit, LimitKind, Scope, limits_for
from footplate.tenancy.limiter.reservations import Beat, ReservationState
from footplate.tenancy.quotas import Quota
from tests.tenancy.limiter.pairs import Pair, valkey_pair
from tests.tenancy.limiter.valkey_server import ValkeyServer, running_cluster, running_valkey

NUM_CLIENTS = 64


def tokens_per_minute(tenant_id: str, max_amount: int) -> Limit:
    return Limit(Scope(tenant_id), LimitKind.TOKENS_PER_MINUTE, max_amount)


def test_parallel_calls_never_take_more_than_the_limit(valkey: ValkeyServer) -> None:
    """FAULTS b3 21: a limit of 100, 20 calls of 40 at once."""
    limit = tokens_per_minute("twenty", 100)

    async def run() -> int:
        client = connect(valkey.url, timeout_s=5)
        limiter = ValkeyLimiter(client)
        decisions = await asyncio.gather(
            *(limiter.reserve("twenty", f"call {n}", [limit], Amounts(40)) for n in range(20))
        )
        await client.aclose()
        return sum(decision.is_admitted for decision in decisions)

    assert asyncio.run(run()) == 2


class Gateway(threading.Thread):
    """One of many clients of one limit: it reserves 10 and settles 4, until it is refused or done."""

    def __init__(self, url: str, number: int, limit: Limit, barrier: threading.Barrier) -> None:
        super().__init__()
        self._url, self._number, self._limit, self._barrier = url, number, limit, barrier
        self.num_settled = self.num_held = 0
        self.is_over = False
        self.num_refused_while_room = 0

    def run(self) -> None:
        asyncio.run(self._run())

    async def _run(self) -> None:
        client = connect(self._url, timeout_s=20)
        limiter = ValkeyLimiter(client, ValkeyLimiterConfig(timeout_s=30))
        tenant_id = self._limit.scope.tenant_id
        self._barrier.wait()
        for turn in range(8):
            name = f"{self._number}/{turn}"
            decision = await limiter.reserve(tenant_id, name, [self._limit], Amounts(10))
            [state] = decision.states
            self.is_over |= state.used > self._limit.max_amount
            if not decision.is_admitted:
                # Others' unsettled reservations may fill it, but then it is full.
                self.num_refused_while_room += state.remaining >= 10
            elif turn % 4:
                await limiter.settle(tenant_id, name, 4)
                self.num_settled += 1
            else:
                self.num_held += 1
        await client.aclose()


def test_64_clients_never_go_over_and_are_refused_only_when_it_is_full(valkey: ValkeyServer) -> None:
    limit = tokens_per_minute("many", 2_000)
    barrier = threading.Barrier(NUM_CLIENTS)
    gateways = [Gateway(valkey.url, number, limit, barrier) for number in range(NUM_CLIENTS)]
    for gateway in gateways:
        gateway.start()
    for gateway in gateways:
        gateway.join(60)
        assert not gateway.is_alive()
    assert not any(gateway.is_over for gateway in gateways)
    assert sum(gateway.num_refused_while_room for gateway in gateways) == 0

    async def used() -> int:
        client = connect(valkey.url)
        [state] = await ValkeyLimiter(client).peek("many", [limit])
        await client.aclose()
        return state.used

    settled, held = (sum(getattr(g, name) for g in gateways) for name in ("num_settled", "num_held"))
    # Within one minute nothing leaves the window; exact to the token.
    assert asyncio.run(used()) == 4 * settled + 10 * held
    assert held > 0 and settled > 0


def test_all_scopes_of_a_decision_work_on_a_cluster() -> None:
    """FAULTS b4 43: every key that a script touches is in one slot."""
    quota = Quota(10, 100, 1_000, 1, per_model={"m}{:x": Quota(10, 100, 1_000, 5)})

    async def run(url: str) -> None:
        client = RedisCluster.from_url(url)
        limiter = ValkeyLimiter(client, ValkeyLimiterConfig(timeout_s=5))
        for tenant_id in ("one", "t}wo", "{three", "fo:ur"):
            limits = limits_for(tenant_id, "k{}", "m}{:x", tenant_quota=quota, key_quota=quota)
            assert len(limits) == 16
            assert (await limiter.reserve(tenant_id, "a}", limits, Amounts(50))).is_admitted
            assert not (await limiter.reserve(tenant_id, "b", limits, Amounts(50))).is_admitted
            assert (await limiter.heartbeat(tenant_id, [Beat("a}", 5)]))[0].is_changed
            assert (await limiter.settle(tenant_id, "a}", 20)).is_changed
            states = await limiter.peek(tenant_id, limits)
            assert [state.used for state in states] == [1, 20, 20, 0] * 4
        await client.aclose()

    with running_cluster() as server:
        asyncio.run(run(server.url))


class LosesAnswers:
    """Calls whose next answer is lost after the server has done the work."""

    def __init__(self, calls: Any) -> None:
        self._calls = calls
        self.is_losing = False

    async def call(self, *arguments: Any) -> Any:
        reply = await self._calls.call(*arguments)
        if self.is_losing:
            self.is_losing = False
            raise LostConnection("lost")
        return reply


def test_a_lost_answer_counts_neither_the_reservation_nor_the_usage_twice(valkey: ValkeyServer) -> None:
    """FAULTS b3 25: used is the actual usage only."""
    limit = tokens_per_minute("lossy", 100)

    async def run() -> None:
        client = connect(valkey.url)
        limiter = ValkeyLimiter(client)
        lossy = limiter._calls = LosesAnswers(limiter._calls)  # type: ignore[assignment]
        await limiter.peek("lossy", [limit])
        lossy.is_losing = True
        with pytest.raises(LimiterUnavailable):
            await limiter.reserve("lossy", "a", [limit], Amounts(60))
        assert (await limiter.reserve("lossy", "a", [limit], Amounts(60))).is_admitted
        lossy.is_losing = True
        with pytest.raises(LimiterUnavailable):
            await limiter.settle("lossy", "a", 25)
        again = await limiter.settle("lossy", "a", 25)
        assert (again.is_changed, again.state) == (False, ReservationState.SETTLED)
        [state] = await limiter.peek("lossy", [limit])
        assert state.used == 25
        await client.aclose()

    asyncio.run(run())


class NeverAnswers:
    """A pool that waits for good: for a connection, say, or for a name to be resolved."""

    def __init__(self) -> None:
        self.connection_pool = self

    async def get_connection(self) -> Any:
        await asyncio.Event().wait()


def test_a_call_ends_in_time_whatever_it_waits_for() -> None:
    async def run() -> None:
        limiter = ValkeyLimiter(NeverAnswers(), ValkeyLimiterConfig(timeout_s=0.01))
        for _ in range(2):
            calls = [asyncio.wait_for(limiter.sweep("slow"), 5) for _ in range(10)]
            answers = await asyncio.gather(*calls, return_exceptions=True)
            assert {type(answer) for answer in answers} == {LimiterUnavailable}

    asyncio.run(run())


def test_a_server_that_was_started_anew_is_asked_again_at_once(valkey: ValkeyServer) -> None:
    """Its clients' lines were cut; nobody should take that for an outage."""
    with valkey_pair(valkey.url) as pair:
        limit = tokens_per_minute(pair.tenant_id, 100)
        pair.reserve("a", [limit], 10)
        valkey.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        pair.settle("a", 5)


def test_a_stopped_server_answers_those_who_wait_together_in_time_too() -> None:
    limit = tokens_per_minute("stopped", 10**6)

    async def run(server: ValkeyServer) -> None:
        client = connect(server.url)
        limiter = ValkeyLimiter(client, ValkeyLimiterConfig(timeout_s=0.2))
        await limiter.peek("stopped", [limit])
        server.pause()
        calls = [limiter.reserve("stopped", f"call {n}", [limit], Amounts(1)) for n in range(20)]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(answer) for answer in answers} == {LimiterUnavailable}
        server.go_on()
        await limiter.release("stopped", "call 0")
        await limiter.peek("stopped", [limit])
        await client.aclose()

    with running_valkey() as server:
        asyncio.run(run(server))


def test_one_unit_left_goes_to_one_of_many(valkey: ValkeyServer) -> None:
    """FAULTS b3 23: and what is left is never negative, whatever is given back afterwards."""
    limit = tokens_per_minute("unit", 1)

    async def run() -> None:
        client = connect(valkey.url, timeout_s=5)
        limiter = ValkeyLimiter(client)
        names = [f"call {n}" for n in range(32)]
        decisions = await asyncio.gather(*(limiter.reserve("unit", n, [limit], Amounts(1)) for n in names))
        assert sum(decision.is_admitted for decision in decisions) == 1
        assert {state.remaining for decision in decisions for state in decision.states} == {0}
        outcomes = await asyncio.gather(*(limiter.release("unit", n) for n in names * 3))
        assert sum(outcome.is_changed for outcome in outcomes) == 1
        [state] = await limiter.peek("unit", [limit])
        assert state.used == 0
        await client.aclose()

    asyncio.run(run())


def _keys(valkey: ValkeyServer, pair: Pair) -> list[str]:
    found = valkey.ask("KEYS", f"footplate:limits:{{{pair.tenant_id}}}:*")
    assert isinstance(found, list)
    return found


def test_every_key_ends_by_itself(valkey: ValkeyServer) -> None:
    """FAULTS b4 38, in each state that a reservation can be in."""
    quota = Quota(10, 100, 1_000, 5)
    with valkey_pair(valkey.url) as pair:
        limits = limits_for(pair.tenant_id, "k", "m", tenant_quota=quota, key_quota=quota)
        for name in ("held", "kept", "settled", "released"):
            pair.reserve(name, limits, 10)
        pair.heartbeat("kept", 5)
        pair.advance(300)
        pair.settle("settled", 7)
        pair.reserve("later", limits, 10)
        pair.settle("later", 25)
        pair.release("released")
        pair.reserve("last", limits, 1)
        keys = _keys(valkey, pair)
        # Of two scopes the windows, who runs, and the history of a day; six reservations and the leases.
        assert len(keys) == 2 * 3 + 6 + 1
        # Most for what a reservation needs that could give back to a day's window: that window and its lease.
        needed_ms = (86_400 + 600 + 30) * 1_000
        assert all(0 < int(str(valkey.ask("PTTL", key))) <= needed_ms * 1.25 for key in keys)


def test_a_flush_leaves_no_counter_negative(valkey: ValkeyServer) -> None:
    with valkey_pair(valkey.url) as pair:
        limit = tokens_per_minute(pair.tenant_id, 100)
        pair.reserve("a", [limit], 80)
        [windows] = [key for key in _keys(valkey, pair) if ":windows:" in key]
        valkey.ask("DEL", windows)
        limiter, run = pair.limiter, pair.runner.run
        run(limiter.reserve(pair.tenant_id, "b", [limit], Amounts(20)))
        assert run(limiter.release(pair.tenant_id, "a")).is_changed
        [state] = run(limiter.peek(pair.tenant_id, [limit]))
        # Within one second they shared a bucket, and who gives back can't tell whose tokens are left.
        assert state.used in (0, 20)
        run(limiter.release(pair.tenant_id, "b"))
        [state] = run(limiter.peek(pair.tenant_id, [limit]))
        assert state.used == 0


def test_what_a_lost_history_held_counts_no_more(valkey: ValkeyServer) -> None:
    with valkey_pair(valkey.url) as pair:
        limit = tokens_per_minute(pair.tenant_id, 100)
        limiter, run = pair.limiter, pair.runner.run
        for name in ("a", "b", "c"):
            run(limiter.reserve(pair.tenant_id, name, [limit], Amounts(20)))
            pair.advance(1)
        [history] = [key for key in _keys(valkey, pair) if key.endswith("windows:tenant:2")]
        valkey.ask("DEL", history)
        assert not run(limiter.reserve(pair.tenant_id, "d", [limit], Amounts(90))).is_admitted
        run(limiter.reserve(pair.tenant_id, "d", [limit], Amounts(20)))
        assert run(limiter.release(pair.tenant_id, "a")).is_changed
        [state] = run(limiter.peek(pair.tenant_id, [limit]))
        assert state.used == 40


def test_a_clock_that_steps_back_forgets_nothing(valkey: ValkeyServer) -> None:
    """After a fail-over another server's clock goes on."""
    with valkey_pair(valkey.url) as pair:
        limit = tokens_per_minute(pair.tenant_id, 100)
        limiter, run = pair.limiter, pair.runner.run
        pair.reserve("a", [limit], 80)
        run(limiter.settle(pair.tenant_id, "a", 80))
        pair.advance(-20)
        assert not run(limiter.reserve(pair.tenant_id, "b", [limit], Amounts(21))).is_admitted
        assert run(limiter.reserve(pair.tenant_id, "c", [limit], Amounts(20))).is_admitted
        run(limiter.settle(pair.tenant_id, "c", 20))
        pair.advance(20 + 55)
        [state] = run(limiter.peek(pair.tenant_id, [limit]))
        assert state.used == 100


@pytest.mark.parametrize("loss", [("FUNCTION", "FLUSH"), ("SCRIPT", "FLUSH")], ids=" ".join)
def test_a_server_that_lost_the_function_gets_it(valkey: ValkeyServer, loss: tuple[str, ...]) -> None:
    with valkey_pair(valkey.url) as pair:
        limit = tokens_per_minute(pair.tenant_id, 100)
        pair.reserve("a", [limit], 10)
        valkey.ask(*loss)
        pair.settle("a", 5)
        assert pair.used(limit) == [5]


def test_many_find_the_function_missing_at_once(valkey: ValkeyServer) -> None:
    limit = tokens_per_minute("at once", 1_000)

    async def run() -> None:
        client = connect(valkey.url, timeout_s=5)
        limiter = ValkeyLimiter(client, ValkeyLimiterConfig(timeout_s=5))
        calls = (limiter.reserve("at once", f"call {n}", [limit], Amounts(10)) for n in range(50))
        assert all(decision.is_admitted for decision in await asyncio.gather(*calls))
        [state] = await limiter.peek("at once", [limit])
        assert state.used == 500
        await client.aclose()

    valkey.ask("FUNCTION", "FLUSH")
    asyncio.run(run())


@pytest.mark.parametrize("is_cluster", [False, True], ids=["one server", "cluster"])
def test_one_decision_is_one_round_trip(is_cluster: bool) -> None:
    quota = Quota(1_000, 100_000, 1_000_000, 50)
    limits = limits_for("one trip", "k", "m", tenant_quota=quota, key_quota=quota)

    async def run(server: ValkeyServer) -> None:
        client: Any = RedisCluster.from_url(server.url) if is_cluster else connect(server.url, timeout_s=5)
        limiter = ValkeyLimiter(client, ValkeyLimiterConfig(timeout_s=5))
        await limiter.reserve("one trip", "first", limits, Amounts(10))
        before = _num_commands(server)
        for number in range(20):
            await limiter.reserve("one trip", f"call {number}", limits, Amounts(10))
            await limiter.heartbeat("one trip", [Beat(f"call {number}", 3)])
            await limiter.settle("one trip", f"call {number}", 7)
        assert _num_commands(server) - before == 60
        await client.aclose()

    with running_cluster() if is_cluster else running_valkey() as server:
        asyncio.run(run(server))


def _num_commands(server: ValkeyServer) -> int:
    """Commands that came over connections of the limiter; those inside a function are left out."""
    stats = server.ask("INFO", "commandstats")
    assert isinstance(stats, dict)
    own = ("cmdstat_fcall", "cmdstat_eval", "cmdstat_command", "cmdstat_function")
    return sum(found["calls"] for name, found in stats.items() if name.startswith(own))
