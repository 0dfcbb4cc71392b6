"""What is spent and held of a month's budget: decided for all gateways at once, on a real Valkey."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from footplate.tenancy.adapters.valkey.limiter import ValkeyLimiter, ValkeyLimiterConfig, connect
from footplate.tenancy.errors import SpendUnknown
from footplate.tenancy.limiter.breaker import Breaker
from footplate.tenancy.limiter.decisions import (
    Amounts,
    Budget,
    BudgetSeed,
    Decision,
    RefusalKind,
    Spending,
    Spent,
)
from footplate.tenancy.limiter.degrading import DegradingLimiter
from footplate.tenancy.limiter.limits import Limit, LimitKind, Scope
from footplate.tenancy.limiter.local import LocalLimiter
from tests.tenancy.limiter.valkey_server import ValkeyServer, running_valkey

TENANT = Budget("tenant:2026-11", 1_000)
LEASE_S = 30.0


class World:
    def __init__(self, server: ValkeyServer) -> None:
        self.server = server
        self.offset_ms = 0
        self.client = connect(server.url, timeout_s=5)
        config = ValkeyLimiterConfig(lease_s=LEASE_S, timeout_s=5)
        self.limiter = ValkeyLimiter(self.client, config, clock_offset_ms=lambda: self.offset_ms)

    async def reserve(
        self, name: str, cost: int, *budgets: Budget, limits: tuple[Limit, ...] = ()
    ) -> Decision:
        money = Spending(cost, budgets or (TENANT,))
        return await self.limiter.reserve("acme", name, limits, Amounts(1), b"note", money)

    async def seed(self, amount: int, read_at_ms: int = 100, budget: Budget = TENANT) -> None:
        await self.limiter.seed("acme", [BudgetSeed(budget.name, amount, read_at_ms)])

    async def known(self) -> tuple[int, int]:
        """Spent and held, as a request of nothing sees them."""
        decision = await self.reserve(f"probe {self.offset_ms}", 0, Budget(TENANT.name))
        [state] = decision.budgets
        await self.limiter.release("acme", f"probe {self.offset_ms}")
        self.offset_ms += 1
        return state.spent, state.held


def play(story: Callable[[World], Awaitable[None]]) -> None:
    async def run(server: ValkeyServer) -> None:
        world = World(server)
        await story(world)
        await world.client.aclose()

    with running_valkey() as server:
        asyncio.run(run(server))


def test_nothing_is_decided_before_the_ledger_has_said_what_is_spent() -> None:
    """FAULTS b5 51: and again after a flush."""

    async def story(world: World) -> None:
        for _ in range(2):
            with pytest.raises(SpendUnknown):
                await world.reserve("a", 1)
            assert world.server.ask("KEYS", "*") == []
            await world.seed(900)
            assert (await world.reserve("a", 100)).is_admitted
            world.server.ask("FLUSHALL")

    play(story)


def test_what_runs_is_held_and_what_it_has_cost_is_spent() -> None:
    async def story(world: World) -> None:
        await world.seed(200)
        assert (await world.reserve("a", 500)).is_admitted
        refused = await world.reserve("b", 301)
        assert refused.refusal is not None and refused.refusal.kind is RefusalKind.BUDGET
        state = refused.refusal.budget
        assert state is not None and (state.spent, state.held) == (200, 801)
        assert (await world.reserve("c", 300)).is_admitted
        assert await world.known() == (200, 800)
        await world.limiter.settle("acme", "a", 1, Spent(120, 150))
        await world.limiter.settle("acme", "a", 1, Spent(120, 150))
        await world.limiter.release("acme", "c")
        assert await world.known() == (320, 0)
        assert (await world.reserve("d", 680)).is_admitted

    play(story)


def test_what_the_ledgers_sum_has_in_it_is_not_counted_again() -> None:
    async def story(world: World) -> None:
        await world.seed(0)
        await world.reserve("a", 500)
        await world.reserve("b", 100)
        world.server.ask("DEL", f"footplate:limits:{{acme}}:spent:{TENANT.name}")
        # The sum was read after the first was written down, and before the second.
        await world.seed(400, read_at_ms=200)
        await world.limiter.settle("acme", "a", 1, Spent(400, 199))
        await world.limiter.settle("acme", "b", 1, Spent(60, 201))
        assert await world.known() == (460, 0)

    play(story)


def test_a_lease_that_ends_holds_no_money() -> None:
    async def story(world: World) -> None:
        await world.seed(0)
        await world.reserve("a", 900)
        world.offset_ms += 31_000
        assert await world.known() == (0, 0)

    play(story)


def test_a_refused_budget_takes_nothing_of_other_limits_and_the_other_way_round() -> None:
    async def story(world: World) -> None:
        await world.seed(0)
        limit = Limit(Scope("acme"), LimitKind.REQUESTS_PER_MINUTE, 1)
        assert not (await world.reserve("a", 2_000, limits=(limit,))).is_admitted
        assert (await world.reserve("b", 1, limits=(limit,))).is_admitted
        assert not (await world.reserve("c", 1, limits=(limit,))).is_admitted
        assert await world.known() == (0, 1)

    play(story)


def test_500_at_once_never_pass_a_budget_by_a_part_of_it() -> None:
    """FAULTS b3 23."""

    async def story(world: World) -> None:
        await world.seed(3)
        decisions = await asyncio.gather(*(world.reserve(f"r{number}", 7) for number in range(500)))
        assert sum(decision.is_admitted for decision in decisions) == (1_000 - 3) // 7
        assert await world.known() == (3, (1_000 - 3) // 7 * 7)

    play(story)


def test_a_keys_budget_and_its_tenants_hold_at_once() -> None:
    async def story(world: World) -> None:
        key = Budget("key=k:2026-11", 50)
        await world.seed(0)
        await world.seed(10, budget=key)
        assert not (await world.reserve("a", 41, TENANT, key)).is_admitted
        assert (await world.reserve("b", 40, TENANT, key)).is_admitted
        assert await world.known() == (0, 40)

    play(story)


def test_every_key_of_money_goes_by_itself() -> None:
    async def story(world: World) -> None:
        await world.seed(0)
        await world.reserve("a", 900)
        keys = world.server.ask("KEYS", "*")
        assert isinstance(keys, list) and len(keys) == 5
        assert all(0 < int(str(world.server.ask("PTTL", key))) for key in keys)

    play(story)


def test_a_hard_budget_is_closed_while_the_store_is_away_and_a_soft_one_is_not() -> None:
    async def story(world: World) -> None:
        limiter = DegradingLimiter(
            ValkeyLimiter(world.client, ValkeyLimiterConfig(timeout_s=0.1)), LocalLimiter(), Breaker()
        )
        world.server.pause()
        hard, soft = Spending(1, (TENANT,)), Spending(1, (Budget("tenant:2026-11"),))
        closed = await limiter.reserve("acme", "a", (), Amounts(1), b"", hard)
        assert closed.refusal is not None and closed.refusal.kind is RefusalKind.UNAVAILABLE
        assert (await limiter.reserve("acme", "b", (), Amounts(1), b"", soft)).is_admitted
        world.server.go_on()

    play(story)
