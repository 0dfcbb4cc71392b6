"""Claims whose answer comes after everybody has left. Over the whole platform: tests/deployments."""

from __future__ import annotations

import asyncio
import threading

import pytest

from footplate.billing.errors import StoreUnavailable
from footplate.billing.request_keys import FirstRequest
from footplate.billing.usage import EventId, TenantId
from footplate.platform import idempotency
from footplate.platform.errors import MeteringUnavailable
from footplate.platform.idempotency import RequestClaims


class SlowKeys:
    """Keys in memory, in a store that answers when it is let and fails as often as it is told."""

    def __init__(self) -> None:
        self.taken: dict[str, EventId] = {}
        self.may_answer = threading.Event()
        self.num_failing_releases = 0

    def claim(self, tenant_id: TenantId, key: str, event_id: EventId) -> FirstRequest | None:
        assert self.may_answer.wait(10)
        return None if self.taken.setdefault(key, event_id) == event_id else FirstRequest(self.taken[key])

    def release(self, tenant_id: TenantId, key: str, event_id: EventId) -> None:
        if self.num_failing_releases:
            self.num_failing_releases -= 1
            raise StoreUnavailable("away")
        if self.taken.get(key) == event_id:
            del self.taken[key]


def test_a_claim_that_comes_true_after_its_time_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idempotency, "CLAIM_S", 0.01)
    keys = SlowKeys()

    async def run() -> None:
        claims = RequestClaims(keys)
        with pytest.raises(MeteringUnavailable):
            await claims.claim("t", "k", "req_1")
        releasing = asyncio.create_task(claims.release("t", "k", "req_1"))
        await asyncio.sleep(0)
        keys.may_answer.set()
        await releasing

    asyncio.run(run())
    assert keys.taken == {}


def test_a_release_that_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idempotency, "RELEASE_PAUSES_S", (0.0, 0.0, 0.0))
    keys = SlowKeys()
    keys.may_answer.set()
    keys.num_failing_releases = 2

    async def run() -> None:
        claims = RequestClaims(keys)
        await claims.claim("t", "k", "req_1")
        await claims.release("t", "k", "req_1")

    asyncio.run(run())
    assert keys.taken == {}
