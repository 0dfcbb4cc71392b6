"""Resolves API keys from memory, kept true by a follower of changes, in front of the store."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from datetime import UTC, datetime

from footplate.tenancy.api_keys import Role, StoredKey, is_right_secret, parse_key
from footplate.tenancy.errors import StoreUnavailable
from footplate.tenancy.quotas import UNLIMITED, Quota
from footplate.tenancy.secrets import MasterKey
from footplate.tenancy.store import KeyReader

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
    cost_center: str = ""
    # Of the key and its tenant, by name; where both have one, the key's.
    labels: tuple[tuple[str, str], ...] = ()
    captures_content: bool = False


@dataclass(frozen=True, slots=True)
class _Answer:
    stored: StoredKey | None
    # Made once, so that a request that finds it pays a look-up and a hash.
    holder: KeyHolder | None
    fetched_at: float


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """How long answers are held.

    `max_age_s`: since the store gave an answer, or a follower confirmed that nothing had changed. Without a
    follower every answer is asked for again after so long.
    `max_confirmed_s`: since the store gave it, whatever was confirmed: for changes made by hand in the
    database, which leave no record. Beyond half of it a key in use is asked for again while it goes on.
    `look_up_s`: how long the store may take.
    """

    max_age_s: float = 2.0
    max_confirmed_s: float = 300.0
    max_entries: int = 20_000
    # A server that hangs says nothing, and a driver waits for ever.
    look_up_s: float = 3.0


def _utc_now() -> datetime:
    return datetime.now(UTC)


class CachingAuthenticator:
    """Answers from memory where it can; misses are held too. One event loop owns it. See `CacheConfig`.

    `threads`: where look-ups wait; None is the loop's own pool, which long work of others can fill.
    Requests for the same key share one look-up, and the cache is bounded: guessing keys costs the guesser a
    look-up each, and us no memory. It is a `changes.Cache`.
    """

    def __init__(
        self,
        store: KeyReader,
        master_key: MasterKey,
        *,
        default_quota: Quota = UNLIMITED,
        config: CacheConfig | None = None,
        threads: Executor | None = None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = _utc_now,
    ) -> None:
        self._store = store
        self._master_key = master_key
        self._pepper = master_key.derive(PEPPER_PURPOSE)
        self._default_quota = default_quota
        self._config = config or CacheConfig()
        self._threads = threads
        self._clock = clock
        self._now = now
        self._answers: OrderedDict[str, _Answer] = OrderedDict()
        # Which of them belong to a tenant, to forget them together.
        self._of_tenant: dict[str, set[str]] = {}
        self._fetches: dict[str, asyncio.Task[_Answer]] = {}
        self._scopes: dict[str, bytes] = {}
        self._confirmed_at = float("-inf")
        # Grows with whatever was forgotten: a look-up during which it grew may have seen what was before.
        self._num_forgotten = 0
        self._uses: dict[str, datetime] = {}

    async def authenticate(self, key: str) -> KeyHolder | None:
        """The holder of a live key, or None. A wrong secret takes as long as a right one.

        Raises:
            StoreUnavailable: the store can't be asked; nobody is let in meanwhile.
        """
        parts = parse_key(key)
        if parts is None:
            return None
        public_id, secret = parts
        answer = await self._answer(public_id)
        stored = answer.stored
        if not is_right_secret(self._pepper, stored, public_id, secret):
            return None
        assert stored is not None
        now = self._now()
        if not stored.is_live(now):
            return None
        self._uses[public_id] = now
        return answer.holder

    async def holder_of(self, public_id: str) -> KeyHolder | None:
        """The holder of a live key, for work that was accepted under it before. Raises StoreUnavailable."""
        answer = await self._answer(public_id)
        if answer.stored is None or not answer.stored.is_live(self._now()):
            return None
        return answer.holder

    async def _answer(self, public_id: str) -> _Answer:
        answer = self._answers.get(public_id)
        if answer is None or not self._is_fresh(answer):
            # Shielded: one caller going away must not fail the others that wait for the same key.
            answer = await asyncio.shield(self._fetch_task(public_id))
        return answer

    def forget(self, public_id: str) -> None:
        """Drop what is known of a key: somebody has told us that it changed."""
        self._num_forgotten += 1
        # Who comes from now on must not share a look-up that began before the change.
        self._fetches.pop(public_id, None)
        self._drop(public_id)

    def forget_tenant(self, tenant_id: str) -> None:
        """Drop what is known of a tenant's keys."""
        self._num_forgotten += 1
        self._fetches.clear()
        for public_id in self._of_tenant.pop(tenant_id, ()):
            self._answers.pop(public_id, None)

    def forget_all(self) -> None:
        """Drop everything."""
        self._num_forgotten += 1
        self._fetches.clear()
        self._answers.clear()
        self._of_tenant.clear()

    def confirm(self, at: float) -> None:
        """All that is held was true at `at`: whatever had changed by then was forgotten."""
        self._confirmed_at = at

    def take_uses(self) -> dict[str, datetime]:
        """When keys were last used since the last call, for `KeyStore.note_uses`."""
        uses, self._uses = self._uses, {}
        return uses

    def _is_fresh(self, answer: _Answer) -> bool:
        now, config = self._clock(), self._config
        age_s = now - answer.fetched_at
        if age_s < config.max_age_s:
            return True
        if answer.stored is None:
            # Nobody tells of keys that were made elsewhere than in our administration.
            return False
        if now - self._confirmed_at >= config.max_age_s or age_s >= config.max_confirmed_s:
            return False
        if age_s >= config.max_confirmed_s / 2:
            # Asked for ahead of its end, so that no request waits for it.
            self._fetch_task(answer.stored.public_id)
        return True

    def _fetch_task(self, public_id: str) -> asyncio.Task[_Answer]:
        fetch = self._fetches.get(public_id)
        if fetch is None:
            fetch = self._fetches[public_id] = asyncio.create_task(self._fetch(public_id))
            fetch.add_done_callback(lambda done: self._end_fetch(public_id, done))
        return fetch

    def _end_fetch(self, public_id: str, done: asyncio.Task[_Answer]) -> None:
        if self._fetches.get(public_id) is done:
            del self._fetches[public_id]
        if not done.cancelled():
            # Of one that ran ahead nobody else asks whether it failed.
            done.exception()

    async def _fetch(self, public_id: str) -> _Answer:
        # The age counts from before the question: the store may have answered just before a change.
        asked_at, num_forgotten = self._clock(), self._num_forgotten
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._config.look_up_s):
                stored = await loop.run_in_executor(self._threads, self._store.find_key, public_id)
        except TimeoutError:
            raise StoreUnavailable("the store of keys gave no answer in time") from None
        answer = _Answer(stored, None if stored is None else self._holder(stored), asked_at)
        if num_forgotten == self._num_forgotten:
            self._keep(public_id, answer)
        return answer

    def _keep(self, public_id: str, answer: _Answer) -> None:
        self._answers[public_id] = answer
        self._answers.move_to_end(public_id)
        if answer.stored is not None:
            self._of_tenant.setdefault(answer.stored.tenant_id, set()).add(public_id)
        while len(self._answers) > self._config.max_entries:
            self._drop(next(iter(self._answers)))

    def _drop(self, public_id: str) -> None:
        answer = self._answers.pop(public_id, None)
        if answer is None or answer.stored is None:
            return
        keys = self._of_tenant[answer.stored.tenant_id]
        keys.discard(public_id)
        if not keys:
            del self._of_tenant[answer.stored.tenant_id]

    def _holder(self, stored: StoredKey) -> KeyHolder:
        quota = stored.tenant_quota if stored.tenant_quota is not None else self._default_quota
        return KeyHolder(
            stored.public_id,
            stored.tenant_id,
            stored.role,
            self._scope(stored),
            quota,
            stored.key_quota,
            stored.cost_center,
            tuple(sorted({**stored.tenant_labels, **stored.key_labels}.items())),
            stored.captures_content,
        )

    def _scope(self, stored: StoredKey) -> bytes:
        # Names of tenants and of groups must not meet.
        subject = f"group:{stored.share_group}" if stored.share_group else f"tenant:{stored.tenant_id}"
        scope = self._scopes.get(subject)
        if scope is None:
            if len(self._scopes) >= self._config.max_entries:
                self._scopes.clear()
            scope = self._scopes[subject] = self._master_key.cache_scope(subject)
        return scope
