"""Revocation, suspension and quotas reach every gateway: over Valkey, and over the database without it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from typing import Any

import pytest
from sqlalchemy import Engine

from footplate.tenancy.adapters.postgres.admin_store import MAX_CHANGES, PostgresAdminStore
from footplate.tenancy.adapters.postgres.store import PostgresKeyStore
from footplate.tenancy.adapters.valkey.changes import CHANNEL, ValkeyChangeBus
from footplate.tenancy.admin.administration import Administration, Changed
from footplate.tenancy.admin.audit import Caller, TargetKind
from footplate.tenancy.admin.keys import revoke_key
from footplate.tenancy.admin.quotas import set_tenant_quota
from footplate.tenancy.admin.tenants import create_tenant, suspend_tenant, update_tenant
from footplate.tenancy.api_keys import Role, make_key
from footplate.tenancy.authenticator import PEPPER_PURPOSE, CachingAuthenticator
from footplate.tenancy.changes import BUS_ALONE_S, Change, ChangeFollower, Pulse
from footplate.tenancy.errors import StoreUnavailable
from footplate.tenancy.secrets import MasterKey
from tests.postgres_server import PostgresServer, connected
from tests.tenancy.limiter.valkey_server import ValkeyServer, running_valkey
from tests.tenancy.test_api_keys import NOW

MASTER = MasterKey(1, bytes(range(32)))
ADMIN = Caller("a" * 12, "tnt_admin", Role.PLATFORM_ADMIN)
BOUND_S = 2.0
# Only ends a test that hangs: caches have clocks of their own, which stand still unless they are moved.
PATIENCE_S = 20.0


@pytest.fixture(scope="module")
def valkey() -> Iterator[ValkeyServer]:
    with running_valkey() as server:
        yield server


@pytest.fixture
def engine(postgres: PostgresServer) -> Iterator[Engine]:
    with connected(postgres.new_database(is_migrated=True)) as made:
        yield made


class Gateway:
    """What one gateway knows of keys. `heard` is set whenever it forgets something."""

    def __init__(self, engine: Engine, bus: ValkeyChangeBus | None, *, poll_s: float = 0.5) -> None:
        self.seconds = 0.0
        self.store = PostgresKeyStore(engine)
        self.keys = CachingAuthenticator(self.store, MASTER, clock=lambda: self.seconds, now=lambda: NOW)
        self.log = PostgresAdminStore(engine)
        self.bus = bus
        self.follower = ChangeFollower(self, self.log, bus, poll_s=poll_s, clock=lambda: self.seconds)
        self.heard = asyncio.Event()
        self.confirmed = asyncio.Event()

    async def opens(self, key: str) -> bool:
        return await self.keys.authenticate(key) is not None

    def forget(self, public_id: str) -> None:
        self.keys.forget(public_id)
        self.heard.set()

    def forget_tenant(self, tenant_id: str) -> None:
        self.keys.forget_tenant(tenant_id)
        self.heard.set()

    def forget_all(self) -> None:
        self.keys.forget_all()
        self.heard.set()

    def confirm(self, at: float) -> None:
        self.keys.confirm(at)
        self.confirmed.set()


@contextlib.asynccontextmanager
async def gateways(
    engine: Engine, url: str | None, *, number: int = 3, poll_s: float = 0.5
) -> AsyncIterator[list[Gateway]]:
    """Gateways that follow changes, once all of them listen."""
    made = []
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(number):
            bus = None if url is None else ValkeyChangeBus(url)
            gateway = Gateway(engine, bus, poll_s=poll_s)
            if bus is not None:
                stack.push_async_callback(bus.close)
            stack.push_async_callback(gateway.follower.close)
            gateway.follower.start()
            made.append(gateway)
        for gateway in made:
            await gateway.confirmed.wait()
        yield made


def new_key(engine: Engine) -> tuple[str, str]:
    """A key's text and its tenant's id."""
    store = PostgresKeyStore(engine)
    tenant = store.find_tenant("team") or store.create_tenant("team")
    key = make_key(MASTER.derive(PEPPER_PURPOSE))
    store.add_key(key, tenant.id, Role.MEMBER)
    return key.text, tenant.id


CHANGES: dict[str, Callable[[Any, str, str], Any]] = {
    "revoke": lambda writer, key_id, tenant_id: revoke_key(writer, ADMIN, key_id, now=NOW),
    "suspend": lambda writer, key_id, tenant_id: suspend_tenant(writer, ADMIN, tenant_id),
    "quota": lambda writer, key_id, tenant_id: set_tenant_quota(
        writer, ADMIN, tenant_id, {"tokens_per_day": 1}
    ),
    "group": lambda writer, key_id, tenant_id: update_tenant(writer, ADMIN, tenant_id, {"share_group": "g"}),
}


def change(engine: Engine, name: str, key: str, tenant_id: str) -> Changed:
    administration = Administration(PostgresAdminStore(engine))
    return administration.change(ADMIN, lambda writer: CHANGES[name](writer, key.split("_")[1], tenant_id))


def run(work: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await work

    asyncio.run(bounded())


async def wait_for_listeners(valkey: ValkeyServer, number: int) -> None:
    while valkey.ask("PUBSUB", "NUMSUB", CHANNEL) != [CHANNEL, number]:
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_pushed_to_every_gateway(engine: Engine, valkey: ValkeyServer, name: str) -> None:
    """Their clocks stand still and none asks the database: what they learn, they were told."""

    async def work() -> None:
        key, tenant_id = new_key(engine)
        async with gateways(engine, valkey.url, poll_s=3600) as made:
            await wait_for_listeners(valkey, 3)
            for gateway in made:
                assert await gateway.opens(key)
                # A subscription that has just begun asks once; that is no news.
                gateway.heard.clear()
            before = [await gateway.keys.authenticate(key) for gateway in made]
            await made[0].follower.tell(change(engine, name, key, tenant_id).notices)
            for gateway in made:
                await gateway.heard.wait()
            after = [await gateway.keys.authenticate(key) for gateway in made]
            assert all(new != old for new, old in zip(after, before, strict=True))
            if name in ("revoke", "suspend"):
                assert after == [None] * 3

    run(work())


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("is_valkey", ["none", "stopped", "dead"])
def test_a_change_is_found_by_every_gateway_while_valkey_is_down(
    engine: Engine, is_valkey: str, name: str
) -> None:
    async def work() -> None:
        key, tenant_id = new_key(engine)
        with contextlib.ExitStack() as stack:
            url: str | None = "unix:///nonexistent/valkey.sock"
            if is_valkey == "none":
                url = None
            elif is_valkey == "stopped":
                server = stack.enter_context(running_valkey())
                stack.callback(server.go_on)
                url = server.url
            async with gateways(engine, url) as made:
                if is_valkey == "stopped":
                    await wait_for_listeners(server, 3)
                    server.pause()
                before = [await gateway.keys.authenticate(key) for gateway in made]
                assert all(before)
                for gateway in made:
                    gateway.heard.clear()
                # Another process makes the change and can tell nobody.
                await asyncio.to_thread(change, engine, name, key, tenant_id)
                for gateway in made:
                    await gateway.heard.wait()
                after = [await gateway.keys.authenticate(key) for gateway in made]
                assert all(new != old for new, old in zip(after, before, strict=True))

    run(work())


def test_publishing_to_a_valkey_that_hangs_holds_a_change_up_for_less_than_the_bound(engine: Engine) -> None:
    async def work() -> None:
        with running_valkey() as server:
            bus = ValkeyChangeBus(server.url)
            server.pause()
            try:
                async with asyncio.timeout(BOUND_S):
                    await bus.publish([Change(TargetKind.KEY, "k" * 12)])
            finally:
                server.go_on()
                await bus.close()

    run(work())


def test_a_listener_that_lost_its_server_listens_again_and_asks_what_it_missed(engine: Engine) -> None:
    async def work() -> None:
        key, tenant_id = new_key(engine)
        with running_valkey() as server:
            async with gateways(engine, server.url, number=1, poll_s=3600) as [gateway]:
                await wait_for_listeners(server, 1)
                assert await gateway.opens(key)
                gateway.heard.clear()
                server.ask("CLIENT", "KILL", "TYPE", "pubsub")
                # Missed: nobody listens now, and the one who changes it tells nobody.
                change(engine, "revoke", key, tenant_id)
                await gateway.heard.wait()
                assert not await gateway.opens(key)
                await wait_for_listeners(server, 1)

    run(work())


@pytest.mark.parametrize("message", [b"", b"\xff", b"{}", b"[1]", b'[["key"]]', b'[["house","x"]]', b"null"])
def test_what_nobody_of_ours_says_on_the_channel_changes_nothing(
    engine: Engine, valkey: ValkeyServer, message: bytes
) -> None:
    async def work() -> None:
        key, _ = new_key(engine)
        async with gateways(engine, valkey.url, number=1, poll_s=3600) as [gateway]:
            await wait_for_listeners(valkey, 1)
            gateway.heard.clear()
            valkey.ask("PUBLISH", CHANNEL, message)  # type: ignore[arg-type]
            await gateway.follower.tell([Change(TargetKind.KEY, "k" * 12)])
            await gateway.heard.wait()
            assert await gateway.opens(key)

    run(work())


class PulsingBus:
    """A bus that says what it is given; `told` is set when all of it was heard."""

    def __init__(self) -> None:
        self.given: asyncio.Queue[Change | Pulse | None] = asyncio.Queue()

    async def publish(self, changes: Sequence[Change]) -> None:
        raise AssertionError("nobody publishes here")

    async def listen(self) -> AsyncIterator[Change | Pulse | None]:
        while True:
            yield await self.given.get()
            self.given.task_done()

    async def say(self, *what: Change | Pulse | None) -> None:
        for each in what:
            self.given.put_nowait(each)
        await self.given.join()


@pytest.mark.parametrize("is_gap", [False, True])
def test_a_bus_that_is_heard_holds_what_is_known_while_the_database_is_away_for_a_while(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, is_gap: bool
) -> None:
    """But not for ever, and not at all where it may have missed something."""

    async def work() -> None:
        key, _ = new_key(engine)
        bus = PulsingBus()
        gateway = Gateway(engine, None)
        follower = ChangeFollower(gateway, gateway.log, bus, poll_s=0.01, clock=lambda: gateway.seconds)
        follower.start()
        try:
            await bus.say(None)
            gateway.seconds = 0.1
            await until(lambda: follower._read_at == 0.1)
            assert await gateway.opens(key)

            def gone(*_: object) -> Any:
                raise StoreUnavailable("gone")

            monkeypatch.setattr(gateway.log, "changes_after", gone)
            monkeypatch.setattr(gateway.store, "find_key", gone)
            await until(lambda: follower._is_lost)
            if is_gap:
                gateway.seconds += 0.5
                await bus.say(None)
            while not is_gap and gateway.seconds < BUS_ALONE_S:
                gateway.seconds += 1.5
                await bus.say(Pulse.SENT, Pulse.HEARD)
                assert await gateway.opens(key)
            for _ in range(2):
                gateway.seconds += 1.5
                await bus.say(Pulse.SENT, Pulse.HEARD)
            with pytest.raises(StoreUnavailable):
                await gateway.opens(key)
            # What it tells holds at once, whoever else is away.
            gateway.heard.clear()
            await bus.say(Change(TargetKind.KEY, key.split("_")[1]))
            assert gateway.heard.is_set()
        finally:
            await follower.close()

    run(work())


def test_valkey_gives_a_pulse_while_nothing_changes(valkey: ValkeyServer) -> None:
    async def work() -> None:
        bus = ValkeyChangeBus(valkey.url)
        try:
            heard = [told async for told, _ in _counted(bus.listen(), 5)]
        finally:
            await bus.close()
        assert heard == [None, Pulse.SENT, Pulse.HEARD, Pulse.SENT, Pulse.HEARD]

    run(work())


async def _counted(told: AsyncIterator[Any], count: int) -> AsyncIterator[tuple[Any, int]]:
    number = 0
    async for each in told:
        number += 1
        yield each, number
        if number == count:
            return


async def until(is_true: Callable[[], bool]) -> None:
    while not is_true():
        await asyncio.sleep(0.005)


def test_while_the_database_is_away_what_is_known_runs_out_within_the_bound(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        key, _ = new_key(engine)
        gateway = Gateway(engine, None)
        await gateway.follower.poll()
        assert await gateway.opens(key)

        def gone(*_: object) -> Any:
            raise StoreUnavailable("gone")

        monkeypatch.setattr(gateway.log, "changes_after", gone)
        monkeypatch.setattr(gateway.store, "find_key", gone)
        gateway.seconds = BOUND_S - 0.01
        with pytest.raises(StoreUnavailable):
            await gateway.follower.poll()
        assert await gateway.opens(key)
        gateway.seconds = BOUND_S
        with pytest.raises(StoreUnavailable):
            await gateway.opens(key)

    run(work())


def test_a_log_with_more_changes_than_can_be_told_makes_a_gateway_forget_all(engine: Engine) -> None:
    async def work() -> None:
        gateway = Gateway(engine, None)
        await gateway.follower.poll()
        with PostgresAdminStore(engine).writing() as writer:
            for number in range(MAX_CHANGES + 1):
                create_tenant(writer, ADMIN, {"name": f"t{number}"})
        await gateway.follower.poll()
        assert gateway.heard.is_set()
        gateway.heard.clear()
        await gateway.follower.poll()
        assert not gateway.heard.is_set()
        # The database was put back to an earlier day.
        with engine.begin() as connection:
            connection.exec_driver_sql("delete from tenancy.audit_records where seq > 10")
        await gateway.follower.poll()
        assert gateway.heard.is_set()

    run(work())


def test_a_log_that_fails_in_an_unknown_way_is_asked_again(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        gateway = Gateway(engine, None, poll_s=0.01)
        whole = gateway.log.changes_after
        failures = iter([ValueError("no such thing")])

        def sometimes(last: int | None) -> Any:
            for failure in failures:
                raise failure
            return whole(last)

        monkeypatch.setattr(gateway.log, "changes_after", sometimes)
        gateway.follower.start()
        await gateway.confirmed.wait()
        await gateway.follower.close()

    run(work())
    assert "asking for changes failed" in caplog.text


def test_changes_of_a_newer_version_are_passed_over(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "insert into tenancy.audit_records (action, outcome, actor_key_id, actor_tenant_id, actor_role, "
            "source, request_id, target_kind, target_id) "
            "values ('x', 'done', 'k', 't', 'x', '', '', 'house', 'h')"
        )
    found = PostgresAdminStore(engine).changes_after(0)
    assert (found.last, list(found.changes or ())) == (1, [])
