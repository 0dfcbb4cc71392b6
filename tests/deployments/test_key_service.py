"""Keys in one gateway, as it is put together: what it writes when it stops, and what its probe says."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from footplate.deployments.key_service import KeyService
from footplate.tenancy.adapters.postgres.admin_store import PostgresAdminStore
from footplate.tenancy.adapters.postgres.store import PostgresKeyStore
from footplate.tenancy.bootstrap import create_first_keys
from footplate.tenancy.quotas import UNLIMITED
from footplate.tenancy.secrets import MasterKey
from tests.postgres_server import PostgresServer, connected

MASTER = MasterKey(1, bytes(range(32)))


@pytest.fixture
def url(postgres: PostgresServer) -> Iterator[str]:
    yield postgres.new_database(is_migrated=True)


def first_key(url: str, folder: Path) -> str:
    with connected(url) as engine:
        files = create_first_keys(PostgresKeyStore(engine), MASTER, folder)
    return files["tenant.key"].read_text().strip()


@pytest.mark.parametrize("redis_url", ["", "unix:///nonexistent/valkey.sock"])
def test_a_gateway_that_stops_writes_down_which_keys_were_used(
    url: str, tmp_path: Path, redis_url: str
) -> None:
    key = first_key(url, tmp_path)

    async def run() -> Any:
        service = KeyService(url, redis_url, MASTER, default_quota=UNLIMITED)
        service.start()
        principal = await service.authenticator.authenticate(key)
        assert (await service.readiness_check()()).is_ready
        await service.close()
        return principal

    principal = asyncio.run(run())
    assert principal is not None and principal.role == "member"
    with connected(url) as engine, PostgresAdminStore(engine).reading() as reader:
        found = reader.key(principal.key_id)
    assert found is not None and found.last_used_at is not None


def test_without_a_database_the_probe_says_so_and_a_gateway_stops_all_the_same() -> None:
    async def run() -> None:
        service = KeyService(
            "postgresql+psycopg://nobody@/none?host=/nonexistent", "", MASTER, default_quota=UNLIMITED
        )
        service.start()
        with pytest.raises(Exception, match="gave no answer"):
            await service.readiness_check()()
        await service.close()

    asyncio.run(run())
