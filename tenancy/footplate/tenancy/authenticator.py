"""Resolves API keys from a short-lived cache in front of the store."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from footplate.tenancy.api_keys import Role, StoredKey, is_right_secret, parse_key
from footplate.tenancy.quotas import UNLIMITED, Quota
from footplate.tenancy.secrets import MasterKey
from footplate.tenancy.store import KeyStore

PEPPER_PURPOSE = "api-key-pepper"


@dataclass(frozen=True, slots=True)
class KeyHolder:
    """Who a key stands for, and all that deciding on its requests needs.

    `cache_scope` is equal for tenants of one share group. `key_quota` None: the key has no limits of its own.
    """

    key_id: str
    tenant_id: str
    role: Role
    cache_scope: bytes
    tenant_quota: Quota = UNLIMITED
    key_quota: Quota | None = None


@dataclass(frozen=True, slots=True)
class _Answer:
    stored: StoredKey | None
    # Made once, so that a request that finds it pays a look-up and a hash.
    holder: KeyHolder | None
    fetched_at: float


def _utc_now() -> datetime:
    return datetime.now(UTC)


class CachingAuthenticator:
    """Keeps what the store said for at most `max_age_s`, misses too; one event loop owns it.

    So a revoked key works for at most that long. Requests for the same key share one look-up, and the cache
    is bounded: guessing keys costs the guesser a look-up each, and us no memory.
    """

    def __init__(
        self,
        store: KeyStore,
        master_key: MasterKey,
        *,
        default_quota: Quota = UNLIMITED,
        max_age_s: float = 2.0,
        max_entries: int = 10_000,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = _utc_now,
    ) -> None:
        self._store = store
        self._master_key = master_key
        self._pepper = master_key.derive(PEPPER_PURPOSE)
        self._default_quota = default_quota
        self._max_age_s = max_age_s
        self._max_entries = max_entries
        self._clock = clock
        self._now = now
        self._answers: OrderedDict[str, _Answer] = OrderedDict()
        self._fetches: dict[str, asyncio.Task[_Answer]] = {}
        self._scopes: dict[str, bytes] = {}

    async def authenticate(self, key: str) -> KeyHolder | None:
        """The holder of a live key, or None. A wrong secret takes as long as a right one.

        Raises:
            StoreUnavailable: the store can't be asked; nobody is let in meanwhile.
        """
        parts = parse_key(key)
        if parts is None:
            return None
        public_id, secret = parts
        answer = self._answers.get(public_id)
        if answer is None or self._clock() - answer.fetched_at >= self._max_age_s:
            answer = await self._look_up(public_id)
        stored = answer.stored
        if not is_right_secret(self._pepper, stored, public_id, secret):
            return None
        assert stored is not None
        return answer.holder if stored.is_live(self._now()) else None

    def forget(self, public_id: str) -> None:
        """Drop what is known of a key: somebody has told us that it changed."""
        self._answers.pop(public_id, None)

    async def _look_up(self, public_id: str) -> _Answer:
        fetch = self._fetches.get(public_id)
        if fetch is None:
            fetch = asyncio.create_task(self._fetch(public_id))
            self._fetches[public_id] = fetch
            fetch.add_done_callback(lambda _: self._fetches.pop(public_id, None))
        # Shielded: one caller going away must not fail the others that wait for the same key.
        return await asyncio.shield(fetch)

    async def _fetch(self, public_id: str) -> _Answer:
        # The age counts from before the question: the store may have answered just before a change.
        asked_at = self._clock()
        stored = await asyncio.to_thread(self._store.find_key, public_id)
        answer = _Answer(stored, None if stored is None else self._holder(stored), asked_at)
        self._answers[public_id] = answer
        self._answers.move_to_end(public_id)
        while len(self._answers) > self._max_entries:
            self._answers.popitem(last=False)
        return answer

    def _holder(self, stored: StoredKey) -> KeyHolder:
        quota = stored.tenant_quota if stored.tenant_quota is not None else self._default_quota
        return KeyHolder(
            stored.public_id, stored.tenant_id, stored.role, self._scope(stored), quota, stored.key_quota
        )

    def _scope(self, stored: StoredKey) -> bytes:
        # Names of tenants and of groups must not meet.
        subject = f"group:{stored.share_group}" if stored.share_group else f"tenant:{stored.tenant_id}"
        scope = self._scopes.get(subject)
        if scope is None:
            if len(self._scopes) >= self._max_entries:
                self._scopes.clear()
            scope = self._scopes[subject] = self._master_key.cache_scope(subject)
        return scope
