"""Keys, tenants and their administration in one gateway, with what keeps them true in the background."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from footplate.platform.administration import AdminDesk
from footplate.platform.billing_desk import BillingDesk
from footplate.platform.capture.store import CaptureShelf
from footplate.platform.http.health import Readiness, ReadinessCheck
from footplate.platform.model_desk import ModelDesk
from footplate.platform.ports import Principal, UseReader
from footplate.tenancy.adapters.postgres.admin_store import PostgresAdminStore
from footplate.tenancy.adapters.postgres.store import PostgresKeyReader, PostgresKeyStore, connect
from footplate.tenancy.adapters.valkey.changes import ValkeyChangeBus
from footplate.tenancy.admin.administration import Administration
from footplate.tenancy.authenticator import PEPPER_PURPOSE, CachingAuthenticator, KeyHolder
from footplate.tenancy.changes import ChangeFollower
from footplate.tenancy.errors import StoreUnavailable
from footplate.tenancy.quotas import Quota
from footplate.tenancy.secrets import MasterKey

NOTE_USES_S = 30.0
# How long the database may take: a server that hangs says nothing.
NOTE_S = 10.0
CHECK_S = 2.0
MAX_THREADS = 7  # as many as the pool has connections, and one to poll
_LOGGER = logging.getLogger(__name__)


class TenancyAuthenticator:
    """Tenancy's key holders as the platform's principals; see `ports.Authenticator`."""

    def __init__(self, keys: CachingAuthenticator) -> None:
        self._keys = keys

    async def authenticate(self, key: str) -> Principal | None:
        """The principal of a live key, or None."""
        return _principal(await self._keys.authenticate(key))

    async def find(self, key_id: str) -> Principal | None:
        """The principal of a live key by its public id; see `ports.KeyFinder`."""
        return _principal(await self._keys.holder_of(key_id))


def _principal(holder: KeyHolder | None) -> Principal | None:
    if holder is None:
        return None
    return Principal(
        holder.key_id,
        holder.tenant_id,
        holder.role.value,
        holder.cache_scope,
        holder.tenant_quota,
        holder.key_quota,
        holder.cost_center,
        holder.labels,
        holder.captures_content,
    )


class KeyService:
    """Owns the pools, the bus and the background work; belongs to one event loop."""

    def __init__(  # noqa: PLR0913 - the parts of a gateway, which callers name
        self,
        database_url: str,
        redis_url: str,
        master_key: MasterKey,
        *,
        default_quota: Quota,
        use: UseReader | None = None,
        source_header: str | None = None,
        billing: BillingDesk | None = None,
        models: ModelDesk | None = None,
        models_changed: Callable[[], None] = lambda: None,
        captures: CaptureShelf | None = None,
    ) -> None:
        # Pools apart: administration that waits must hold up neither the keys of requests nor the polls.
        self._reader = PostgresKeyReader(database_url)
        self._background = connect(database_url, pool_size=1)
        self._admin = connect(database_url)
        # Of their own: a long prompt that is tokenised must not hold up everybody's keys.
        self._threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="keys")
        self.keys = CachingAuthenticator(
            self._reader, master_key, default_quota=default_quota, threads=self._threads
        )
        self._bus = ValkeyChangeBus(redis_url) if redis_url else None
        self._follower = ChangeFollower(
            self.keys,
            PostgresAdminStore(self._background),
            self._bus,
            threads=self._threads,
            models_changed=models_changed,
        )
        self.desk = AdminDesk(
            Administration(PostgresAdminStore(self._admin)),
            master_key.derive(PEPPER_PURPOSE),
            self._follower,
            use=use,
            default_quota=default_quota,
            source_header=source_header,
            billing=billing,
            models=models,
            captures=captures,
        )
        self.authenticator = TenancyAuthenticator(self.keys)
        self._noting: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to follow changes and to note which keys are used."""
        self._follower.start()
        self._noting = asyncio.create_task(self._keep_noting_uses())

    async def close(self) -> None:
        """End all of it; the last uses are noted if the database answers."""
        if self._noting is not None:
            self._noting.cancel()
            await asyncio.gather(self._noting, return_exceptions=True)
        await self._follower.close()
        if self._bus is not None:
            await self._bus.close()
        await self._note_uses()
        self.desk.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._reader.close()
        self._background.dispose()
        self._admin.dispose()

    def readiness_check(self) -> ReadinessCheck:
        """For `/readyz`: whether the database answers."""

        async def check() -> Readiness:
            # `readyz` takes an exception for not ready.
            async with asyncio.timeout(CHECK_S):
                await self._in_thread(lambda: self._reader.find_key(""))
            return Readiness(True, "serving")

        return check

    async def _in_thread(self, work: Callable[[], object]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def _keep_noting_uses(self) -> None:
        while True:
            await asyncio.sleep(NOTE_USES_S)
            await self._note_uses()

    async def _note_uses(self) -> None:
        try:
            async with asyncio.timeout(NOTE_S):
                uses = self.keys.take_uses()
                await self._in_thread(lambda: PostgresKeyStore(self._background).note_uses(uses))
        except (StoreUnavailable, TimeoutError):
            # A key in use is noted again with its next request.
            _LOGGER.warning("the last uses of keys were not noted: the database gives no answer")
