"""Who ends the leases of tenants that call no more: one gateway for all, over every tenant that had any."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from footplate.tenancy.adapters.valkey.active_tenants import NOTED_S, ValkeyActiveTenants
from footplate.tenancy.adapters.valkey.limiter import ValkeyLimiter, ValkeyLimiterConfig, connect
from footplate.tenancy.errors import LimiterUnavailable
from footplate.tenancy.limiter.decisions import Amounts
from footplate.tenancy.limiter.limits import Limit, LimitKind, Scope
from footplate.tenancy.limiter.reaper import Reaper
from footplate.tenancy.limiter.reservations import Beat, LostRequest, ReservationState
from tests.tenancy.limiter.valkey_server import ValkeyServer, running_valkey

LEASE_S = 30.0


class World:
    """One gateway's limiter, list of tenants and reaper, with a clock that moves when told to."""

    def __init__(self, server: ValkeyServer) -> None:
        self.server = server
        self.now_s = 1_000_000.0
        self.offset_ms = 0
        self.client = connect(server.url, timeout_s=5)

    def gateway(self) -> tuple[ValkeyLimiter, Reaper, ValkeyActiveTenants]:
        tenants = ValkeyActiveTenants(
            self.client, lease_s=LEASE_S, clock=lambda: self.now_s, now=lambda: self.now_s
        )
        config = ValkeyLimiterConfig(lease_s=LEASE_S, timeout_s=5)
        limiter = ValkeyLimiter(self.client, config, tenants=tenants, clock_offset_ms=lambda: self.offset_ms)
        return limiter, Reaper(limiter, tenants, period_s=10, lost=limiter), tenants

    def advance(self, seconds: float) -> None:
        self.now_s += seconds
        self.offset_ms += round(seconds * 1_000)


def play(story: Callable[[World], Awaitable[None]]) -> None:
    async def run(server: ValkeyServer) -> None:
        world = World(server)
        await story(world)
        await world.client.aclose()

    with running_valkey() as server:
        asyncio.run(run(server))


def limit_of(tenant_id: str) -> Limit:
    return Limit(Scope(tenant_id), LimitKind.TOKENS_PER_DAY, 10**6)


async def reserve(limiter: ValkeyLimiter, tenant_id: str, count: int) -> None:
    for number in range(count):
        await limiter.reserve(tenant_id, f"{tenant_id} {number}", [limit_of(tenant_id)], Amounts(10))


def test_one_gateway_ends_the_leases_of_all_that_died() -> None:
    async def story(world: World) -> None:
        dead, _, _ = world.gateway()
        await reserve(dead, "many", 100)
        await reserve(dead, "few", 3)
        world.advance(LEASE_S + 1)
        _, first, _ = world.gateway()
        limiter, second, _ = world.gateway()
        # The turn is the first's: the second leaves it alone.
        assert await first.sweep_round() == 103
        assert await second.sweep_round() == 0
        assert (await limiter.settle("many", "many 99", 5)).state is ReservationState.EXPIRED

    play(story)


def test_a_claim_that_a_clock_set_back_would_keep_for_hours_ends_in_time() -> None:
    async def story(world: World) -> None:
        _, reaper, tenants = world.gateway()
        assert await tenants.claim_round(10)
        # As a server sees it whose clock has stepped back by an hour.
        world.server.ask("PEXPIRE", "footplate:limits:reaper", 3_600_000)
        assert await reaper.sweep_round() == 0
        assert 0 < int(str(world.server.ask("PTTL", "footplate:limits:reaper"))) <= 9_000

    play(story)


def test_nothing_that_still_runs_is_ended() -> None:
    async def story(world: World) -> None:
        limiter, reaper, _ = world.gateway()
        await reserve(limiter, "acme", 2)
        world.advance(LEASE_S - 1)
        await limiter.heartbeat("acme", [Beat("acme 0", 4)])
        world.advance(2)
        assert await reaper.sweep_round() == 1
        assert (await limiter.settle("acme", "acme 0", 5)).is_changed

    play(story)


def test_a_tenant_leaves_the_list_once_it_has_no_lease_and_calls_no_more() -> None:
    async def story(world: World) -> None:
        limiter, reaper, tenants = world.gateway()
        await reserve(limiter, "old", 1)
        world.advance(NOTED_S)
        await reserve(limiter, "new", 1)
        assert set(await tenants.listed()) == {"old", "new"}
        world.advance(NOTED_S + 2 * LEASE_S + 1)
        await reaper.sweep_round()
        assert list(await tenants.listed()) == ["new"]

    play(story)


@dataclass
class Carers:
    """Takes care of what is lost, unless told to fail."""

    told: list[LostRequest] = field(default_factory=list)
    is_failing: bool = False

    async def take_care(self, lost: Sequence[LostRequest]) -> None:
        self.told += lost
        if self.is_failing:
            raise RuntimeError("away")


def noting(world: World, port: Carers) -> tuple[ValkeyLimiter, Reaper, ValkeyActiveTenants]:
    limiter, _, tenants = world.gateway()
    return limiter, Reaper(limiter, tenants, period_s=10, lost=limiter, port=port), tenants


def test_what_was_noted_of_a_lost_request_comes_with_its_last_progress_until_it_is_taken_care_of() -> None:
    """FAULTS b5 52: forgotten only after the port has returned."""

    async def story(world: World) -> None:
        port = Carers(is_failing=True)
        limiter, reaper, _ = noting(world, port)
        # Bytes of every kind; and a lease without any limit.
        note, progress = bytes(range(256)), b"\xff\x00far"
        await limiter.reserve("acme", "one", (), Amounts(), note)
        await limiter.reserve("acme", "two", [limit_of("acme")], Amounts(5), b"two")
        await limiter.heartbeat("acme", [Beat("one", 3, progress), Beat("two", 1), Beat("one", 4)])
        world.advance(LEASE_S + 1)
        with pytest.raises(RuntimeError):
            await reaper.sweep_round()
        wanted = {LostRequest("one", note, progress), LostRequest("two", b"two", b"")}
        assert set(port.told) == wanted
        port.is_failing = False
        port.told.clear()
        world.server.ask("DEL", "footplate:limits:reaper")
        await reaper.sweep_round()
        assert set(port.told) == wanted
        assert await limiter.lost("acme") == ([], 0)
        assert (await limiter.settle("acme", "one", 5)).state is ReservationState.EXPIRED

    play(story)


def test_an_end_that_somebody_told_leaves_no_note_behind() -> None:
    async def story(world: World) -> None:
        limiter, _, _ = world.gateway()
        for name, end in (
            ("kept", limiter.settle("acme", "kept", 1)),
            ("none", limiter.release("acme", "none")),
        ):
            await limiter.reserve("acme", name, (), Amounts(), b"note")
            assert (await end).is_changed
        world.advance(LEASE_S + 1)
        assert await limiter.lost("acme") == ([], 0)
        assert world.server.ask("KEYS", "*:note:*") == []

    play(story)


def test_what_is_lost_is_found_after_all_gateways_were_away_for_a_day() -> None:
    """The reservation itself is forgotten by then, and its tenant calls no more."""

    async def story(world: World) -> None:
        port = Carers()
        limiter, reaper, tenants = noting(world, port)
        await limiter.reserve("acme", "one", (), Amounts(), b"note")
        world.server.ask("DEL", "footplate:limits:{acme}:reservation:one")
        world.advance(86_400)
        await reaper.sweep_round()
        assert port.told == [LostRequest("one", b"note", b"")]
        assert list(await tenants.listed()) == []

    play(story)


def test_more_lost_requests_than_one_answer_holds_are_all_told() -> None:
    async def story(world: World) -> None:
        port = Carers()
        limiter, reaper, _ = noting(world, port)
        for number in range(150):
            await limiter.reserve("acme", f"r{number}", (), Amounts(), b"%d" % number)
        world.advance(LEASE_S + 1)
        assert await reaper.sweep_round() == 150
        assert sorted(port.told, key=lambda lost: int(lost.note)) == [
            LostRequest(f"r{number}", b"%d" % number, b"") for number in range(150)
        ]

    play(story)


def test_a_tenant_is_noted_once_in_a_while_and_again_after_a_flush() -> None:
    async def story(world: World) -> None:
        limiter, _, tenants = world.gateway()
        await reserve(limiter, "acme", 5)
        noted_at = world.server.ask("ZSCORE", "footplate:limits:tenants", "acme")
        world.advance(NOTED_S - 1)
        await reserve(limiter, "acme", 6)
        assert world.server.ask("ZSCORE", "footplate:limits:tenants", "acme") == noted_at
        assert await tenants.listed() == ["acme"]
        world.server.ask("FLUSHALL")
        assert (await limiter.heartbeat("acme", [Beat("acme 0")]))[0].state is ReservationState.UNKNOWN
        assert await tenants.listed() == ["acme"]
        assert 0 < int(str(world.server.ask("PTTL", "footplate:limits:tenants")))

    play(story)


def test_a_store_that_is_away_is_told_as_such() -> None:
    async def story(world: World) -> None:
        class Gone:
            def __getattr__(self, name: str) -> Any:
                raise ConnectionError(name)

        tenants = ValkeyActiveTenants(Gone())
        for ask in (tenants.claim_round(1), tenants.listed(), tenants.note("acme")):
            with pytest.raises(LimiterUnavailable):
                await ask

    play(story)


def test_a_list_that_somebody_else_wrote_over_holds_up_no_decision(valkey: ValkeyServer) -> None:
    async def run() -> None:
        client = connect(valkey.url, timeout_s=5)
        prefix = "footplate:damaged"
        valkey.ask("SET", f"{prefix}:tenants", "garbage", "PX", 60_000)
        tenants = ValkeyActiveTenants(client, key_prefix=prefix)
        await tenants.note("acme")
        assert list(await tenants.listed()) == ["acme"]
        await client.aclose()

    asyncio.run(run())
