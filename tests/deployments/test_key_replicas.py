"""What an administrator changes at one of three gateway processes holds at all of them within two seconds."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from footplate.deployments.leftovers import wait_until
from footplate.tenancy.adapters.postgres.store import PostgresKeyStore
from footplate.tenancy.bootstrap import create_first_keys
from footplate.tenancy.secrets import MasterKey
from tests.deployments.gateways import GatewayProcess, body, running_gateways
from tests.postgres_server import PostgresServer, connected, running_postgres
from tests.tenancy.limiter.valkey_server import running_valkey

BOUND_S = 2.0


class Platform:
    """Three gateways on one database and one Valkey, with the keys of a first start."""

    def __init__(self, gateways: list[GatewayProcess], files: dict[str, Path]) -> None:
        self.gateways = gateways
        self.admin = files["admin.key"].read_text().strip()

    def ask(self, gateway: int, method: str, path: str, fields: Any = None, key: str | None = None) -> Any:
        with self.gateways[gateway].http(key or self.admin) as http:
            answer = http.request(method, f"/admin/v1{path}", json=fields)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def status(self, gateway: int, key: str) -> int:
        with self.gateways[gateway].http(key) as http:
            return http.post("/v1/completions", json=body(1)).status_code

    def await_everywhere(self, key: str, status: int) -> float:
        """How long until every gateway answers with a status."""
        begin = time.monotonic()
        for gateway in range(len(self.gateways)):
            assert wait_until(lambda gateway=gateway: self.status(gateway, key) == status, 10, every_s=0.02)
        return time.monotonic() - begin


@contextlib.contextmanager
def running_platform(postgres: PostgresServer, redis_url: str, folder: Path) -> Iterator[Platform]:
    url = postgres.new_database(is_migrated=True)
    master_key_file = folder / "keys" / "master.key"
    master_key = MasterKey.load_or_create(master_key_file)
    with connected(url) as engine:
        files = create_first_keys(PostgresKeyStore(engine), master_key, folder / "keys")
    options = {"database_url": url, "master_key_file": str(master_key_file)}
    with running_gateways(3, redis_url, {}, **options) as gateways:
        yield Platform(gateways, files)


@pytest.mark.parametrize("valkey_is", ["up", "stopped", "killed"])
def test_what_is_changed_at_one_gateway_holds_at_all_within_two_seconds(
    postgres: PostgresServer, tmp_path: Path, valkey_is: str
) -> None:
    with running_valkey() as valkey, running_platform(postgres, valkey.url, tmp_path) as platform:
        tenant = platform.ask(0, "POST", "/tenants", {"name": "red"})["id"]
        made = platform.ask(1, "POST", f"/tenants/{tenant}/keys", {})
        assert platform.await_everywhere(made["key"], 200) < BOUND_S
        if valkey_is == "stopped":
            valkey.pause()
        elif valkey_is == "killed":
            valkey.process.kill()
        changes: list[tuple[Callable[[], Any], int]] = [
            (lambda: platform.ask(0, "PUT", f"/tenants/{tenant}/quota", {"allowed_models": []}), 404),
            (lambda: platform.ask(1, "PUT", f"/tenants/{tenant}/quota", {}), 200),
            (lambda: platform.ask(2, "POST", f"/tenants/{tenant}/suspend"), 401),
            (lambda: platform.ask(0, "POST", f"/tenants/{tenant}/resume"), 200),
            (lambda: platform.ask(1, "POST", f"/keys/{made['id']}/revoke"), 401),
        ]
        for change, status in changes:
            change()
            assert platform.await_everywhere(made["key"], status) < BOUND_S, status
        if valkey_is == "stopped":
            valkey.go_on()


def test_a_database_that_hangs_is_told_in_time_and_lets_nobody_new_in(tmp_path: Path) -> None:
    with running_postgres() as postgres, running_valkey() as valkey:
        with running_platform(postgres, valkey.url, tmp_path) as platform:
            tenant = platform.ask(0, "POST", "/tenants", {"name": "red"})["id"]
            made = platform.ask(0, "POST", f"/tenants/{tenant}/keys", {})
            assert platform.await_everywhere(made["key"], 200) < BOUND_S
            new = platform.ask(0, "POST", f"/tenants/{tenant}/keys", {})
            with frozen(postgres):
                assert wait_until(lambda: platform.status(1, new["key"]) == 503, 15, every_s=0.05)
                # What was known before holds on while changes are heard over Valkey.
                assert platform.status(1, made["key"]) == 200
                with platform.gateways[0].http(platform.admin) as http:
                    begin = time.monotonic()
                    answer = http.post("/admin/v1/tenants", json={"name": "blue"})
                    assert answer.status_code == 503
                    assert time.monotonic() - begin < 15
            assert platform.await_everywhere(made["key"], 200) < 10


@contextlib.contextmanager
def frozen(postgres: PostgresServer) -> Iterator[None]:
    """Every process of a server stops in its tracks, with all connections open."""
    pids = postgres.pids()
    assert len(pids) > 3
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
