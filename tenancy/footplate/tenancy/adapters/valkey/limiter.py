"""The limiter on Valkey or Redis, a cluster or not: each call is one script call, by the server's clock."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any
from urllib.parse import quote

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError

from footplate.tenancy.errors import LimiterUnavailable
from footplate.tenancy.limiter.decisions import (
    Amounts,
    Decision,
    LimitState,
    Reading,
    Refusal,
    RefusalKind,
    judge,
)
from footplate.tenancy.limiter.limits import TOKEN_KINDS, WINDOWS, Limit
from footplate.tenancy.limiter.reservations import Outcome, ReservationState

SCRIPT = resources.files(__package__).joinpath("limiter.lua").read_text()
_SHA = hashlib.sha1(SCRIPT.encode(), usedforsecurity=False).hexdigest()
_UNKNOWN_TOKENS = -1


@dataclass(frozen=True, slots=True)
class ValkeyLimiterConfig:
    """`remembered_s`: how long the id of an ended reservation is known. `timeout_s`: of a whole call."""

    lease_s: float = 30.0
    remembered_s: float = 600.0
    timeout_s: float = 0.5
    key_prefix: str = "footplate:limits"


def connect(url: str, *, timeout_s: float = 0.25, max_connections: int = 64) -> Redis:
    """A client that waits for a bounded time and asks once: to ask again is the caller's choice."""
    pool = BlockingConnectionPool.from_url(
        url,
        timeout=timeout_s,
        max_connections=max_connections,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        retry=Retry(NoBackoff(), 0),
    )
    return Redis.from_pool(pool)


class ValkeyLimiter:
    """A `Limiter` that all gateways share. The client may be one of a cluster; its owner closes it.

    `clock_offset_ms` is for tests alone: it is added to the server's time, so that windows and leases pass
    without waiting. Production leaves it out, and the script then gets no such argument.
    """

    def __init__(
        self,
        client: Any,
        config: ValkeyLimiterConfig | None = None,
        *,
        clock_offset_ms: Callable[[], int] | None = None,
    ) -> None:
        self._client = client
        self._config = config or ValkeyLimiterConfig()
        self._clock_offset_ms = clock_offset_ms
        # The server's clock at the last answer, for tests that follow it.
        self.last_answer_ms = 0

    async def reserve(
        self, tenant_id: str, request_id: str, limits: Sequence[Limit], amounts: Amounts
    ) -> Decision:
        """As `Limiter.reserve`."""
        tokens = _UNKNOWN_TOKENS if amounts.num_tokens is None else amounts.num_tokens
        asked = [amounts.of(limit) for limit in limits]
        reply = await self._call("reserve", tenant_id, request_id, tokens, limits, asked)
        verdict = reply[1].decode()
        decision = judge(request_id, limits, _readings(reply))
        if verdict in ("admitted", "refused"):
            assert decision.is_admitted == (verdict == "admitted"), "script and policy disagree"
            return decision
        held = verdict == ReservationState.HELD
        refusal = None if held else Refusal(RefusalKind.REPEATED)
        return Decision(request_id, decision.states, refusal, is_repeated=True)

    async def settle(self, tenant_id: str, request_id: str, num_tokens: int | None) -> Outcome:
        """As `Limiter.settle`."""
        tokens = _UNKNOWN_TOKENS if num_tokens is None else num_tokens
        return _outcome(await self._call("settle", tenant_id, request_id, tokens))

    async def release(self, tenant_id: str, request_id: str) -> Outcome:
        """As `Limiter.release`."""
        return _outcome(await self._call("release", tenant_id, request_id))

    async def heartbeat(self, tenant_id: str, request_id: str, num_tokens: int = 0) -> Outcome:
        """As `Limiter.heartbeat`."""
        return _outcome(await self._call("heartbeat", tenant_id, request_id, num_tokens))

    async def peek(self, tenant_id: str, limits: Sequence[Limit]) -> tuple[LimitState, ...]:
        """As `Limiter.peek`."""
        reply = await self._call("peek", tenant_id, "", 0, limits, [0] * len(limits))
        return judge("", limits, _readings(reply)).states

    async def sweep(self, tenant_id: str) -> int:
        """As `Limiter.sweep`."""
        return int((await self._call("sweep", tenant_id, ""))[1])

    async def _call(
        self,
        command: str,
        tenant_id: str,
        request_id: str,
        tokens: int = 0,
        limits: Sequence[Limit] = (),
        asked: Sequence[int] = (),
    ) -> list[Any]:
        config = self._config
        # The tag in braces puts all keys of a tenant into one slot; quoted, so that an id can't end it early.
        base = f"{config.key_prefix}:{{{quote(tenant_id, safe='')}}}:"
        quoted_id = quote(request_id, safe="")
        keys = [f"{base}leases", f"{base}reservation:{quoted_id}"]
        lease_ms, remembered_ms = round(config.lease_s * 1000), round(config.remembered_s * 1000)
        arguments: list[Any] = [command, quoted_id, lease_ms, remembered_ms, tokens, len(limits)]
        for limit, amount in zip(limits, asked, strict=True):
            assert limit.scope.tenant_id == tenant_id, "a limit of another tenant"
            keys.append(f"{base}{limit.scope.name}:{limit.kind}")
            arguments += _limit_arguments(limit, amount)
        if self._clock_offset_ms is not None:
            arguments.append(self._clock_offset_ms())
        try:
            async with asyncio.timeout(config.timeout_s):
                reply = await self._evaluate(keys, arguments)
        except (RedisError, OSError, TimeoutError) as error:
            raise LimiterUnavailable(
                f"the store of the limits can't be asked: {type(error).__name__}"
            ) from error
        self.last_answer_ms = reply[0]
        return reply

    async def _evaluate(self, keys: list[str], arguments: list[Any]) -> list[Any]:
        try:
            reply = await self._client.evalsha(_SHA, len(keys), *keys, *arguments)
        except NoScriptError:
            # A server that was restarted or just joined; it keeps the script from here on.
            reply = await self._client.eval(SCRIPT, len(keys), *keys, *arguments)
        assert isinstance(reply, list)
        return reply


def _limit_arguments(limit: Limit, amount: int) -> tuple[Any, ...]:
    enforced = int(limit.is_enforced)
    window = WINDOWS.get(limit.kind)
    if window is None:
        return ("c", amount, limit.max_amount, enforced, 0, 0)
    unit = "t" if limit.kind in TOKEN_KINDS else "r"
    return (unit, amount, limit.max_amount, enforced, window.bucket_ms, window.num_buckets)


def _readings(reply: list[Any]) -> list[Reading]:
    return [Reading(*reply[at : at + 3]) for at in range(2, len(reply), 3)]


def _outcome(reply: list[Any]) -> Outcome:
    return Outcome(bool(reply[1]), ReservationState(reply[2].decode()))
