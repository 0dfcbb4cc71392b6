"""What is held over all tenants, as somebody who compares it with the ledger reads it."""

from __future__ import annotations

import asyncio

import pytest

from footplate.tenancy.adapters.valkey.active_tenants import ValkeyActiveTenants
from footplate.tenancy.adapters.valkey.held_reservations import ValkeyHeldReservations
from footplate.tenancy.adapters.valkey.limiter import ValkeyLimiter, ValkeyLimiterConfig, connect
from footplate.tenancy.errors import LimiterUnavailable
from footplate.tenancy.limiter.decisions import Amounts
from footplate.tenancy.limiter.reservations import HeldReservations
from tests.tenancy.limiter.valkey_server import ValkeyServer

PREFIX = "footplate:held"
LEASE_S = 30.0


def test_what_runs_and_what_is_lost_is_read_over_all_tenants(valkey: ValkeyServer) -> None:
    offset_ms = 0
    assert read(valkey) == HeldReservations(frozenset(), frozenset())

    async def story() -> None:
        nonlocal offset_ms
        client = connect(valkey.url, timeout_s=5)
        config = ValkeyLimiterConfig(lease_s=LEASE_S, timeout_s=5, key_prefix=PREFIX)
        tenants = ValkeyActiveTenants(client, lease_s=LEASE_S, key_prefix=PREFIX, timeout_s=5)
        limiter = ValkeyLimiter(client, config, tenants=tenants, clock_offset_ms=lambda: offset_ms)
        for tenant_id in ("a", "b{}"):
            for name in ("dead", "unswept", "ended"):
                await limiter.reserve(tenant_id, f"{tenant_id} {name}", (), Amounts(), b"note")
            await limiter.settle(tenant_id, f"{tenant_id} ended", 1)
        offset_ms = round(LEASE_S * 1_000) + 1_000
        # A call of its tenant ends a lease that is over; the other tenant makes none.
        await limiter.reserve("a", "a runs", (), Amounts(), b"note")
        await client.aclose()

    asyncio.run(story())
    assert read(valkey, offset_ms) == HeldReservations(
        frozenset({"a runs"}), frozenset({"a dead", "a unswept", "b{} dead", "b{} unswept"})
    )


def test_a_store_that_gives_no_answer_says_so() -> None:
    with pytest.raises(LimiterUnavailable, match="can't be asked"):
        ValkeyHeldReservations("unix:///nowhere.sock").read()


def read(server: ValkeyServer, offset_ms: int = 0) -> HeldReservations:
    return ValkeyHeldReservations(
        server.url, timeout_s=5, key_prefix=PREFIX, clock_offset_ms=offset_ms
    ).read()
