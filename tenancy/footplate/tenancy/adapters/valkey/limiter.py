"""The limiter on Valkey or Redis, a cluster or not: each call is one function call, by the server's clock."""

from __future__ import annotations

import hashlib
from base64 import b64decode, b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any
from urllib.parse import quote

import msgspec
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from footplate.tenancy.adapters.valkey.active_tenants import ValkeyActiveTenants
from footplate.tenancy.adapters.valkey.calls import FunctionCalls, answer_in_time
from footplate.tenancy.errors import SpendUnknown
from footplate.tenancy.limiter.decisions import (
    Amounts,
    BudgetSeed,
    Decision,
    LimitState,
    Reading,
    Refusal,
    RefusalKind,
    Spending,
    Spent,
    judge,
)
from footplate.tenancy.limiter.limits import WINDOWS, Limit, LimitKind
from footplate.tenancy.limiter.reservations import Beat, LostRequest, Outcome, ReservationState

# The unit of each kind in the function; the constants there are made from the windows here.
_UNITS = {
    LimitKind.REQUESTS_PER_MINUTE: 1,
    LimitKind.TOKENS_PER_MINUTE: 2,
    LimitKind.TOKENS_PER_DAY: 3,
    LimitKind.MAX_CONCURRENT_REQUESTS: 4,
}
_TEXTS = ("windows.lua", "limiter.lua")
_UNKNOWN_TOKENS = -1
# What a budget does: it counts, it refuses, or it says what is spent.
_COUNTS, _REFUSES, _SAYS = 0, 1, 2
# In one call: the server does nothing else meanwhile.
MAX_BEATS = 256


def _library() -> tuple[str, str]:
    """The function's name, which changes with its text so that versions can live together; its library."""
    windows = [WINDOWS[kind] for kind in _UNITS if kind in WINDOWS]
    buckets_ms = ", ".join(str(window.bucket_ms) for window in windows)
    nums_buckets = ", ".join(str(window.num_buckets) for window in windows)
    text = f"local BUCKET_MS, NUM_BUCKETS = {{{buckets_ms}}}, {{{nums_buckets}}}\n" + "".join(
        resources.files(__package__).joinpath(name).read_text() for name in _TEXTS
    )
    name = f"footplate_limits_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    return name, f"#!lua name={name}\n{text}\nredis.register_function('{name}', main)\n"


FUNCTION, LIBRARY = _library()


@dataclass(frozen=True, slots=True)
class ValkeyLimiterConfig:
    """`remembered_s`: how long the id of an ended reservation is known.

    `timeout_s`: of a whole call; twice that where our own event loop stood still meanwhile.
    """

    lease_s: float = 30.0
    remembered_s: float = 600.0
    timeout_s: float = 0.5
    key_prefix: str = "footplate:limits"


def connect(url: str, *, timeout_s: float = 0.25, max_connections: int = 64) -> Redis:
    """A client that connects within a bounded time and asks once; its callers bound what an answer takes."""
    pool = BlockingConnectionPool.from_url(
        url,
        timeout=timeout_s,
        max_connections=max_connections,
        socket_connect_timeout=timeout_s,
        retry=Retry(NoBackoff(), 0),
    )
    return Redis.from_pool(pool)


class ValkeyLimiter:
    """A `Limiter` that all gateways share. The client may be one of a cluster; its owner closes it.

    `tenants` is told whose leases there are, for the reaper. `clock_offset_ms` is for tests alone: it is
    added to the server's time, so that windows and leases pass without waiting. Production leaves it out.
    """

    def __init__(
        self,
        client: Any,
        config: ValkeyLimiterConfig | None = None,
        *,
        tenants: ValkeyActiveTenants | None = None,
        clock_offset_ms: Callable[[], int] | None = None,
    ) -> None:
        self._config = config or ValkeyLimiterConfig()
        self._calls = FunctionCalls(client, FUNCTION, LIBRARY, self._config.timeout_s)
        self._lease_ms = round(self._config.lease_s * 1000)
        self._remembered_ms = round(self._config.remembered_s * 1000)
        self._tenants = tenants
        self._clock_offset_ms = clock_offset_ms
        # The server's clock at the last answer, for tests that follow it.
        self.last_answer_ms = 0

    async def reserve(
        self,
        tenant_id: str,
        request_id: str,
        limits: Sequence[Limit],
        amounts: Amounts,
        note: bytes = b"",
        money: Spending | None = None,
    ) -> Decision:
        """As `Limiter.reserve`."""
        for limit in limits:
            amounts.of(limit)  # raises AmountUnknown before anything is asked
        tokens = _UNKNOWN_TOKENS if amounts.num_tokens is None else amounts.num_tokens
        if self._tenants is not None:
            # Before it is taken: a gateway that dies right after it must not leave what nobody looks for.
            await self._tenants.note(tenant_id)
        asked = _asked(tenant_id, limits)
        reply = await self._call("reserve", tenant_id, request_id, tokens, asked, note, _money(money))
        verdict = reply[1]
        if verdict == "unseeded":
            raise SpendUnknown("what is spent of a budget must be read from the ledger first")
        readings = _readings(reply, len(limits))
        decision = judge(request_id, limits, readings, money, reply[2 + 3 * len(limits) :])
        if verdict in ("admitted", "refused"):
            assert decision.is_admitted == (verdict == "admitted"), "function and policy disagree"
            return decision
        held = verdict == ReservationState.HELD
        refusal = None if held else Refusal(RefusalKind.REPEATED)
        return Decision(request_id, decision.states, refusal, decision.budgets, is_repeated=True)

    async def seed(self, tenant_id: str, seeds: Sequence[BudgetSeed]) -> None:
        """As `Limiter.seed`."""
        asked: list[str | int] = []
        for seed in seeds:
            asked += (seed.name, seed.amount, seed.read_at_ms)
        await self._call("seed", tenant_id, "", asked=asked)

    async def settle(
        self, tenant_id: str, request_id: str, num_tokens: int | None, spent: Spent | None = None
    ) -> Outcome:
        """As `Limiter.settle`."""
        tokens = _UNKNOWN_TOKENS if num_tokens is None else num_tokens
        money = () if spent is None else (spent.cost, spent.written_at_ms)
        return _outcome(await self._call("settle", tenant_id, request_id, tokens, money=money))

    async def release(self, tenant_id: str, request_id: str) -> Outcome:
        """As `Limiter.release`."""
        return _outcome(await self._call("release", tenant_id, request_id))

    async def heartbeat(self, tenant_id: str, beats: Sequence[Beat]) -> list[Outcome]:
        """As `Limiter.heartbeat`; one call for each `MAX_BEATS` of them."""
        outcomes: list[Outcome] = []
        for first in range(0, len(beats), MAX_BEATS):
            asked: list[str | int] = []
            for beat in beats[first : first + MAX_BEATS]:
                asked += (beat.request_id, beat.num_tokens, b64encode(beat.progress).decode())
            reply = await self._call("heartbeat", tenant_id, "", asked=asked)
            outcomes += [_outcome(reply, at) for at in range(1, len(reply), 2)]
        if self._tenants is not None:
            if any(outcome.state is ReservationState.UNKNOWN for outcome in outcomes):
                self._tenants.forget(tenant_id)
            await self._tenants.note(tenant_id)
        return outcomes

    async def peek(self, tenant_id: str, limits: Sequence[Limit]) -> tuple[LimitState, ...]:
        """As `Limiter.peek`."""
        reply = await self._call("peek", tenant_id, "", asked=_asked(tenant_id, limits))
        return judge("", limits, _readings(reply, len(limits))).states

    async def sweep(self, tenant_id: str) -> int:
        """As `Limiter.sweep`."""
        return int((await self._call("sweep", tenant_id, ""))[1])

    async def lost(self, tenant_id: str) -> tuple[Sequence[LostRequest], int]:
        """As `LostRequests.lost`."""
        _, num_left, *rest = await self._call("lost", tenant_id, "")
        found = [
            LostRequest(rest[at], b64decode(rest[at + 1]), b64decode(rest[at + 2]))
            for at in range(0, len(rest), 3)
        ]
        return found, int(num_left)

    async def forget_lost(self, tenant_id: str, request_ids: Sequence[str]) -> None:
        """As `LostRequests.forget_lost`."""
        await self._call("forget", tenant_id, "", asked=request_ids)

    async def _call(
        self,
        command: str,
        tenant_id: str,
        request_id: str,
        tokens: int = 0,
        asked: Sequence[str | int] = (),
        note: bytes = b"",
        money: Sequence[str | int] = (),
    ) -> list[Any]:
        config = self._config
        # The tag in braces puts all keys of a tenant into one slot; quoted, so that an id can't end it early.
        key = f"{config.key_prefix}:{{{quote(tenant_id, safe='')}}}:leases"
        offset_ms = 0 if self._clock_offset_ms is None else self._clock_offset_ms()
        head = (command, request_id, self._lease_ms, self._remembered_ms, tokens, offset_ms)
        # As text: the function's reader of MessagePack knows no bytes.
        argument = msgspec.msgpack.encode([*head, b64encode(note).decode(), money, *asked])
        # The same id takes nothing twice, so the question may be put again.
        answer = await answer_in_time(lambda: self._calls.call(key, argument), config.timeout_s)
        reply: list[Any] = msgspec.msgpack.decode(answer)
        self.last_answer_ms = reply[0]
        return reply


def _readings(reply: list[Any], num_limits: int) -> list[Reading]:
    return [Reading(*reply[at : at + 3]) for at in range(2, 2 + 3 * num_limits, 3)]


def _money(money: Spending | None) -> list[str | int]:
    """As the function reads it."""
    if money is None:
        return []
    asked: list[str | int] = [money.cost]
    for budget in money.budgets:
        if not money.is_asked:
            asked += (budget.name, 0, _COUNTS)
        elif budget.max_amount is None:
            asked += (budget.name, 0, _SAYS)
        else:
            asked += (budget.name, budget.max_amount, _REFUSES)
    return asked


def _asked(tenant_id: str, limits: Sequence[Limit]) -> list[str | int]:
    """Four for each limit, as the function reads them."""
    asked: list[str | int] = []
    scope, name = None, ""
    for limit in limits:
        assert limit.scope.tenant_id == tenant_id, "a limit of another tenant"
        if limit.scope is not scope:
            scope, name = limit.scope, limit.scope.name
        asked += (name, _UNITS[limit.kind], limit.max_amount, int(limit.is_enforced))
    return asked


def _outcome(reply: list[Any], at: int = 1) -> Outcome:
    return Outcome(bool(reply[at]), ReservationState(reply[at + 1]))
