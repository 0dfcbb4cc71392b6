"""While the shared store is away: answers in time, as declared, and the old state once it is back."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from footplate.tenancy.adapters.valkey.limiter import ValkeyLimiter, ValkeyLimiterConfig, connect
from footplate.tenancy.errors import LimiterCallFailed
from footplate.tenancy.limiter.breaker import Breaker
from footplate.tenancy.limiter.decisions import Amounts, RefusalKind, Spent
from footplate.tenancy.limiter.degrading import DegradedConfig, DegradedMode, DegradingLimiter
from footplate.tenancy.limiter.limits import Limit, LimitKind, Scope
from footplate.tenancy.limiter.local import LocalLimiter
from footplate.tenancy.limiter.reservations import Beat, Outcome, ReservationState
from tests.tenancy.limiter.valkey_server import ValkeyServer, running_valkey

TENANT = "acme"
TOKENS = Limit(Scope(TENANT), LimitKind.TOKENS_PER_MINUTE, 100)
REQUESTS = Limit(Scope(TENANT), LimitKind.REQUESTS_PER_MINUTE, 3)


class World:
    """A limiter over a server that can be paused, with a breaker whose clock moves only when told to."""

    def __init__(self, server: ValkeyServer, config: DegradedConfig | None) -> None:
        self.server = server
        self.now_s = 0.0
        self.offset_ms = 0
        self.client = connect(server.url)
        config_of_store = ValkeyLimiterConfig(timeout_s=0.3)
        self.shared = ValkeyLimiter(self.client, config_of_store, clock_offset_ms=lambda: self.offset_ms)
        self.breaker = Breaker(max_failures=2, retry_s=1.0, clock=lambda: self.now_s)
        self.limiter = DegradingLimiter(self.shared, LocalLimiter(), self.breaker, config)

    async def reserve(self, name: str, num_tokens: int, *limits: Limit) -> RefusalKind | None:
        """The refusal, or None when admitted; always within a second."""
        started = time.monotonic()
        decision = await self.limiter.reserve(TENANT, name, limits, Amounts(num_tokens))
        assert time.monotonic() - started < 1
        return decision.refusal and decision.refusal.kind

    async def used(self, limit: Limit) -> int:
        [state] = await self.limiter.peek(TENANT, [limit])
        return state.used


def play(story: Callable[[World], Awaitable[None]], config: DegradedConfig | None = None) -> None:
    async def run(server: ValkeyServer) -> None:
        world = World(server, config)
        try:
            await story(world)
        finally:
            server.go_on()
            await world.client.aclose()

    with running_valkey() as server:
        asyncio.run(run(server))


def modes(**by_kind: DegradedMode) -> DegradedConfig:
    return DegradedConfig({LimitKind[kind]: mode for kind, mode in by_kind.items()}, local_share=0.5)


def test_each_kind_of_limit_degrades_as_declared() -> None:
    async def story(world: World) -> None:
        world.server.pause()
        # Tokens are open; of three requests a minute, this process's half lets one through.
        assert await world.reserve("a", 10_000, TOKENS, REQUESTS) is None
        assert await world.reserve("b", 10, TOKENS, REQUESTS) is RefusalKind.OVER_WINDOW

    play(story, modes(TOKENS_PER_MINUTE=DegradedMode.OPEN))


def test_a_closed_limit_refuses_those_who_meet_it_and_nobody_else() -> None:
    async def story(world: World) -> None:
        world.server.pause()
        assert await world.reserve("a", 1, TOKENS, REQUESTS) is RefusalKind.UNAVAILABLE
        assert await world.reserve("b", 1, REQUESTS) is None

    play(story, modes(TOKENS_PER_MINUTE=DegradedMode.CLOSED))


def test_too_large_for_the_local_share_alone_is_not_refused_for_good() -> None:
    async def story(world: World) -> None:
        world.server.pause()
        assert await world.reserve("a", 51, TOKENS) is RefusalKind.UNAVAILABLE
        assert await world.reserve("b", 101, TOKENS) is RefusalKind.TOO_LARGE
        assert await world.reserve("c", 50, TOKENS) is None
        # A share of half a request still lets one through.
        assert await world.reserve("one", 0, Limit(Scope(TENANT), LimitKind.REQUESTS_PER_MINUTE, 1)) is None
        assert await world.reserve("d", 0, Limit(Scope(TENANT), LimitKind.TOKENS_PER_DAY, 0)) is (
            RefusalKind.TOO_LARGE
        )

    play(story, modes())


def test_nobody_waits_while_the_breaker_is_open_and_one_trial_finds_the_store_back() -> None:
    async def story(world: World) -> None:
        world.server.pause()
        await world.reserve("a", 1, TOKENS)
        await world.reserve("b", 1, TOKENS)
        assert world.breaker.is_open
        started = time.monotonic()
        for number in range(50):
            assert await world.reserve(f"c{number}", 1, TOKENS) in (None, RefusalKind.OVER_WINDOW)
        # Fifty waits of 0.25 s would be 12 s.
        assert time.monotonic() - started < 1
        world.server.go_on()
        assert await world.reserve("d", 1, TOKENS) is RefusalKind.OVER_WINDOW
        assert world.limiter.is_degraded
        world.now_s += 1.0
        assert await world.reserve("e", 1, TOKENS) is None
        assert not world.limiter.is_degraded and not world.breaker.is_open

    play(story, modes())


def test_a_change_to_the_local_share_forgets_nothing_that_was_used() -> None:
    requests = Limit(Scope(TENANT), LimitKind.REQUESTS_PER_MINUTE, 10)

    async def count(world: World, name: str) -> int:
        answers = [await world.reserve(f"{name} {number}", 1, requests) for number in range(12)]
        assert set(answers) <= {None, RefusalKind.OVER_WINDOW}
        return answers.count(None)

    async def story(world: World) -> None:
        for number in range(6):
            assert await world.reserve(f"shared {number}", 1, requests) is None
        world.server.pause()
        # Of the four that are left, half are this process's.
        assert await count(world, "away") == 2
        world.server.go_on()
        world.now_s += 1.0
        # What was asked in vain is released; of the local two the store never heard.
        await world.limiter.look_after_store()
        assert await world.used(requests) == 6
        assert await count(world, "back") == 4
        world.server.pause()
        assert await count(world, "away again") == 0

    play(story, modes())


def test_what_was_learned_leaves_with_its_window() -> None:
    now_ms = 0
    limiter = LocalLimiter(clock_ms=lambda: now_ms)

    async def run() -> None:
        nonlocal now_ms
        limiter.learn(REQUESTS, 2, until_ms=40_000)
        assert (await limiter.reserve(TENANT, "a", [REQUESTS], Amounts())).is_admitted
        decision = await limiter.reserve(TENANT, "b", [REQUESTS], Amounts())
        assert decision.refusal is not None and decision.refusal.retry_after_s == 40
        assert decision.states[0].used == 3
        now_ms = 40_000
        assert (await limiter.peek(TENANT, [REQUESTS]))[0].used == 1

    asyncio.run(run())


def test_an_event_loop_that_stood_still_is_no_outage() -> None:
    async def story(world: World) -> None:
        requests = Limit(Scope(TENANT), LimitKind.REQUESTS_PER_MINUTE, 10)
        assert await world.reserve("first", 1, requests) is None
        calls = [
            asyncio.create_task(world.limiter.reserve(TENANT, f"{n}", [requests], Amounts()))
            for n in range(12)
        ]
        for _ in range(2):
            # Until the questions are on their way.
            await asyncio.sleep(0)
        time.sleep(0.8)  # not a wait for anything: it is what holds up the loop
        decisions = await asyncio.gather(*calls)
        assert sum(decision.is_admitted for decision in decisions) == 9
        assert not world.limiter.is_degraded and world.limiter.num_changes == 0

    play(story)


DAMAGES = {
    "windows, no msgpack": ("SET", "windows:tenant", "\xc1garbage"),
    "windows, a number": ("SET", "windows:tenant", "garbage"),
    "windows, a list": ("LPUSH", "windows:tenant", "garbage"),
    "running": ("SET", "running:tenant", "garbage"),
    "leases": ("SET", "leases", "garbage"),
    "history": ("SET", "windows:tenant:2", "garbage"),
    "reservation": ("SET", "reservation:b", "garbage"),
    "reservation, a list": ("LPUSH", "reservation:b", "garbage"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_one_tenants_damaged_value_is_no_outage_and_mends_itself(damage: tuple[str, str, str]) -> None:
    limits = [
        TOKENS,
        REQUESTS,
        Limit(Scope(TENANT), LimitKind.MAX_CONCURRENT_REQUESTS, 3),
        Limit(Scope(TENANT), LimitKind.TOKENS_PER_DAY, 1_000),
    ]

    async def story(world: World) -> None:
        assert await world.reserve("a", 10, *limits) is None
        command, key, value = damage
        key = f"footplate:limits:{{{TENANT}}}:{key}"
        world.server.ask("DEL", key)
        world.server.ask(command, key, value)
        # By now the bucket has closed, so that the history is met too.
        world.offset_ms = 2_000
        for name in "bcde":
            await world.limiter.reserve(TENANT, name, limits, Amounts(10))
            other = Limit(Scope("other"), LimitKind.REQUESTS_PER_MINUTE, 100)
            assert (await world.shared.reserve("other", name, [other], Amounts())).is_admitted
        await world.limiter.settle(TENANT, "a", 10)
        await world.limiter.look_after_store()
        assert world.limiter.num_unsent == 0
        assert world.limiter.num_changes == 0 and not world.breaker.is_open
        # Nothing of the damage is left in the store's way.
        await world.shared.release(TENANT, "b")
        assert (await world.shared.reserve(TENANT, "last", limits[:1], Amounts(10))).is_admitted
        await world.shared.peek(TENANT, limits)

    play(story)


def test_an_end_that_fails_by_itself_leaves_the_others_their_turn() -> None:
    class OneIsDamaged:
        """A shared limiter; one reservation's end fails whenever it is asked for."""

        def __init__(self, limiter: ValkeyLimiter) -> None:
            self.limiter = limiter

        def __getattr__(self, name: str) -> Any:
            return getattr(self.limiter, name)

        async def settle(
            self, tenant_id: str, request_id: str, num_tokens: int | None, spent: Spent | None = None
        ) -> Outcome:
            if request_id == "a":
                raise LimiterCallFailed("damaged")
            return await self.limiter.settle(tenant_id, request_id, num_tokens, spent)

    async def story(world: World) -> None:
        world.limiter._shared = OneIsDamaged(world.shared)
        for name in ("a", "b"):
            assert await world.reserve(name, 20, TOKENS) is None
        world.server.pause()
        for name in ("c", "d"):
            await world.reserve(name, 1, REQUESTS)
        for name in ("a", "b"):
            await world.limiter.settle(TENANT, name, 5)
        world.server.go_on()
        world.now_s += 1.0
        await world.limiter.look_after_store()
        assert world.limiter.num_unsent == 0
        assert await world.used(TOKENS) == 20 + 5

    play(story)


def test_one_log_line_tells_of_each_change(caplog: pytest.LogCaptureFixture) -> None:
    async def story(world: World) -> None:
        world.server.pause()
        for number in range(5):
            await world.reserve(f"secret-{number}", 1, TOKENS)
        world.server.go_on()
        world.now_s += 1.0
        for number in range(5, 10):
            await world.reserve(f"secret-{number}", 1, TOKENS)

    with caplog.at_level(logging.INFO, "footplate.tenancy"):
        play(story)
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split(" ")[:3] for line in lines] == [
        ["limits", "are", "degraded:"],
        ["limits", "are", "shared"],
    ]
    assert not any("secret" in line or TENANT in line for line in lines)


def test_a_usage_that_could_not_be_told_is_told_once_the_store_is_back() -> None:
    """FAULTS b3 25: used is the actual usage only, whatever was sent twice."""

    async def story(world: World) -> None:
        await world.reserve("a", 60, TOKENS)
        world.server.pause()
        # With the breaker open the settling is not even sent.
        for name in ("b", "c"):
            await world.reserve(name, 1, REQUESTS)
        outcome = await world.limiter.settle(TENANT, "a", 25)
        assert (outcome.is_changed, outcome.state) == (False, ReservationState.UNHEARD)
        world.server.go_on()
        world.now_s += 1.0
        # The first end stays, though the store would take this one.
        await world.limiter.release(TENANT, "a")
        # That end, and of the two that were asked in vain what the store may have taken or takes now.
        assert world.limiter.num_unsent == 3
        assert await world.limiter.send_unsent() == 0
        assert await world.used(REQUESTS) == 0
        assert await world.used(TOKENS) == 25
        assert not (await world.limiter.settle(TENANT, "a", 25)).is_changed
        assert await world.used(TOKENS) == 25

    play(story)


def test_a_local_reservation_ends_where_it_was_made() -> None:
    async def story(world: World) -> None:
        world.server.pause()
        assert await world.reserve("a", 40, TOKENS) is None
        world.server.go_on()
        world.now_s += 1.0
        assert (await world.limiter.heartbeat(TENANT, [Beat("a", 5)]))[0].state is ReservationState.HELD
        assert (await world.limiter.settle(TENANT, "a", 30)).is_changed
        assert (await world.limiter.settle(TENANT, "a", 30)).state is ReservationState.SETTLED
        assert await world.used(TOKENS) == 0  # the shared one never heard of it

    play(story)


def test_the_note_of_a_local_reservation_comes_to_the_store_after_its_return_and_again_after_a_flush() -> (
    None
):
    """Else a gateway that is killed later would take what its streams used with it."""

    async def story(world: World) -> None:
        world.server.pause()
        decision = await world.limiter.reserve(TENANT, "a", [TOKENS], Amounts(40), b"note")
        assert decision.is_admitted
        world.server.go_on()
        world.now_s += 1.0
        await world.limiter.send_unsent()
        for _ in range(2):
            await world.limiter.heartbeat(TENANT, [Beat("a", 5, b"far")])
            world.server.ask("FLUSHALL")
            # One beat finds the loss, the next one mends it.
            await world.limiter.heartbeat(TENANT, [Beat("a", 5, b"far")])
        await world.limiter.heartbeat(TENANT, [Beat("a", 5, b"farther")])
        world.offset_ms += 31_000
        [lost], _ = await world.shared.lost(TENANT)
        assert (lost.note, lost.progress) == (b"note", b"farther")
        assert await world.used(TOKENS) == 0

    play(story)


def test_a_local_reservation_that_ends_in_time_leaves_no_note_in_the_store() -> None:
    async def story(world: World) -> None:
        world.server.pause()
        await world.limiter.reserve(TENANT, "a", (), Amounts(), b"note")
        await world.limiter.reserve(TENANT, "b", (), Amounts(), b"note")
        world.server.go_on()
        world.now_s += 1.0
        await world.limiter.heartbeat(TENANT, [Beat("a"), Beat("b")])
        assert (await world.shared.lost(TENANT))[1] == 2
        await world.limiter.settle(TENANT, "a", 3)
        await world.limiter.release(TENANT, "b")
        assert await world.shared.lost(TENANT) == ([], 0)

    play(story)


def test_breaker_opens_after_failures_in_a_row_only_and_lets_one_trial_through_at_a_time() -> None:
    now_s = 0.0
    breaker = Breaker(max_failures=2, retry_s=1.0, clock=lambda: now_s)
    breaker.fail()
    breaker.succeed()
    breaker.fail()
    assert not breaker.is_open
    breaker.fail()
    assert breaker.is_open and not breaker.lets_through()
    now_s = 1.0
    assert breaker.lets_through() and not breaker.lets_through()
    breaker.fail()
    now_s = 1.9
    assert not breaker.lets_through()
    now_s = 2.0
    assert breaker.lets_through()
    breaker.succeed()
    assert breaker.lets_through() and breaker.lets_through()
