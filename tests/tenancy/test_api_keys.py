"""Keys open what they should and nothing else, and no secret is ever stored."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from footplate.tenancy.adapters.postgres.store import PostgresKeyReader, PostgresKeyStore, connect
from footplate.tenancy.api_keys import (
    NewKey,
    Role,
    StoredKey,
    hash_secret,
    is_right_secret,
    make_key,
    parse_key,
)
from footplate.tenancy.authenticator import PEPPER_PURPOSE, CacheConfig, CachingAuthenticator
from footplate.tenancy.bootstrap import create_first_keys
from footplate.tenancy.errors import MasterKeyError, NameTaken, StoreUnavailable
from footplate.tenancy.quotas import Quota
from footplate.tenancy.secrets import MasterKey, hkdf_sha256
from footplate.tenancy.tenants import Tenant
from tests.postgres_server import PostgresServer, connected

NOW = datetime(2026, 11, 1, tzinfo=UTC)
MASTER = MasterKey(1, bytes(range(32)))
PEPPER = MASTER.derive(PEPPER_PURPOSE)


class MemoryStore:
    """A `KeyStore` in dictionaries that counts its look-ups. `gate`: they wait for it."""

    def __init__(self) -> None:
        self.keys: dict[str, StoredKey] = {}
        self.tenants: dict[str, Tenant] = {}
        self.num_look_ups = 0
        self.gate: threading.Event | None = None

    def find_key(self, public_id: str) -> StoredKey | None:
        self.num_look_ups += 1
        found = self.keys.get(public_id)
        if self.gate is not None:
            assert self.gate.wait(10)
        return found

    def note_uses(self, uses: Mapping[str, datetime]) -> None:
        raise NotImplementedError

    def find_tenant(self, name: str) -> Tenant | None:
        return self.tenants.get(name)

    def create_tenant(self, name: str) -> Tenant:
        if name in self.tenants:
            raise NameTaken(name)
        self.tenants[name] = Tenant(f"tnt_{len(self.tenants)}", name)
        return self.tenants[name]

    def add_key(
        self, key: NewKey, tenant_id: str, role: Role, *, name: str = "", expires_at: datetime | None = None
    ) -> None:
        self.keys[key.public_id] = StoredKey(
            key.public_id, key.hashed, role, tenant_id, expires_at=expires_at
        )

    def revoke_key(self, public_id: str, at: datetime) -> None:
        self.keys[public_id] = replace(self.keys[public_id], revoked_at=at)


class World:
    """An authenticator over a memory store, with clocks that move when told to."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.seconds = 0.0
        self.now = NOW
        self.tenant = self.store.create_tenant("team")
        self.keys = CachingAuthenticator(
            self.store,
            MASTER,
            clock=lambda: self.seconds,
            now=lambda: self.now,
            config=CacheConfig(max_entries=5, max_confirmed_s=30),
        )

    def new_key(self, **options: object) -> str:
        key = make_key(PEPPER)
        self.store.add_key(key, self.tenant.id, Role.MEMBER, **options)  # type: ignore[arg-type]
        return key.text


def test_a_key_has_the_stated_form_and_reads_back() -> None:
    key = make_key(PEPPER)
    prefix, public_id, secret = key.text.split("_")
    assert (prefix, len(public_id), len(secret)) == ("fp", 12, 32)
    assert parse_key(key.text) == (public_id, secret)
    assert secret.encode() not in key.hashed
    assert key.hashed == hash_secret(PEPPER, public_id, secret)


@given(st.text(max_size=60))
def test_other_text_is_no_key(text: str) -> None:
    parts = parse_key(text)
    assert parts is None or "fp_" + "_".join(parts) == text


@pytest.mark.parametrize(
    "text",
    ["", "fp__", f"fp_{'a' * 12}_{'é' * 32}", f"xx_{'a' * 12}_{'b' * 32}", f"fp_{'a' * 13}_{'b' * 31}"],
)
def test_near_misses_are_no_keys(text: str) -> None:
    assert parse_key(text) is None


def test_the_hash_depends_on_pepper_and_public_id() -> None:
    key = make_key(PEPPER)
    _, public_id, secret = key.text.split("_")
    stored = StoredKey(public_id, key.hashed, Role.MEMBER, "t")
    assert is_right_secret(PEPPER, stored, public_id, secret)
    assert not is_right_secret(b"other", stored, public_id, secret)
    assert not is_right_secret(PEPPER, stored, "x" * 12, secret)
    assert not is_right_secret(PEPPER, None, public_id, secret)


def test_hkdf_follows_the_standards_third_test_case() -> None:
    # RFC 5869, A.3: 22 bytes of 0x0b, no salt, no info, 42 bytes.
    expected = "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8"
    assert hkdf_sha256(b"\x0b" * 22, b"", 42).hex() == expected


def test_derived_secrets_differ_by_purpose_and_version() -> None:
    other = MasterKey(2, bytes(range(32)))
    secrets = {MASTER.derive("a"), MASTER.derive("b"), other.derive("a"), other.derive("b")}
    assert len(secrets) == 4
    assert "0102" not in repr(MASTER)


def test_a_master_key_file_is_made_once_and_private(tmp_path: Path) -> None:
    path = tmp_path / "keys" / "master.key"
    first = MasterKey.load_or_create(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert MasterKey.load_or_create(path) == first
    assert os.listdir(path.parent) == ["master.key"]


@pytest.mark.parametrize("text", ["", "rubbish", "fpmk:1:abcd", "fpmk:x:" + "0" * 64, "fpmk:1:" + "g" * 64])
def test_a_damaged_master_key_is_refused_and_never_replaced(tmp_path: Path, text: str) -> None:
    path = tmp_path / "master.key"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(MasterKeyError, match=str(path)):
        MasterKey.load_or_create(path)
    assert path.read_text() == text


def test_a_master_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "master.key"
    MasterKey.load_or_create(path)
    path.chmod(0o644)
    with pytest.raises(MasterKeyError, match="chmod 600"):
        MasterKey.load(path)


def test_a_live_key_opens_and_a_wrong_secret_does_not() -> None:
    world = World()
    key = world.new_key()
    holder = asyncio.run(world.keys.authenticate(key))
    assert holder is not None
    assert (holder.tenant_id, holder.role) == (world.tenant.id, Role.MEMBER)
    assert asyncio.run(world.keys.authenticate(key[:-1] + ("a" if key[-1] != "a" else "b"))) is None


def test_a_revoked_key_works_for_at_most_two_seconds() -> None:
    world = World()
    key = world.new_key()
    assert asyncio.run(world.keys.authenticate(key)) is not None
    world.store.revoke_key(key.split("_")[1], world.now)
    world.seconds = 1.99
    assert asyncio.run(world.keys.authenticate(key)) is not None
    world.seconds = 2.0
    assert asyncio.run(world.keys.authenticate(key)) is None


def test_work_accepted_under_a_key_is_its_holders_for_as_long_as_the_key_opens() -> None:
    """By the public id alone, and no longer than a request with the secret would be let in."""
    world = World()
    key = world.new_key()
    public_id = key.split("_")[1]
    holder = asyncio.run(world.keys.holder_of(public_id))
    assert holder is not None and holder == asyncio.run(world.keys.authenticate(key))
    assert asyncio.run(world.keys.holder_of("000000000000")) is None
    world.store.revoke_key(public_id, world.now)
    world.seconds = 2.0
    assert asyncio.run(world.keys.holder_of(public_id)) is None


def test_a_new_key_works_at_most_two_seconds_after_it_was_first_tried() -> None:
    world = World()
    key = make_key(PEPPER)
    assert asyncio.run(world.keys.authenticate(key.text)) is None
    world.store.add_key(key, world.tenant.id, Role.MEMBER)
    world.seconds = 2.0
    assert asyncio.run(world.keys.authenticate(key.text)) is not None


def test_a_new_key_that_nobody_tells_of_works_as_soon() -> None:
    world = World()
    key = make_key(PEPPER)
    assert asyncio.run(world.keys.authenticate(key.text)) is None
    world.store.add_key(key, world.tenant.id, Role.MEMBER)
    world.seconds = 2.0
    world.keys.confirm(2.0)
    assert asyncio.run(world.keys.authenticate(key.text)) is not None


def test_an_expired_key_stops_at_its_time_though_it_is_cached() -> None:
    world = World()
    key = world.new_key(expires_at=NOW + timedelta(seconds=1))
    assert asyncio.run(world.keys.authenticate(key)) is not None
    world.now = NOW + timedelta(seconds=1)
    assert asyncio.run(world.keys.authenticate(key)) is None


def test_a_suspended_tenants_keys_open_nothing() -> None:
    world = World()
    key = world.new_key()
    public_id = key.split("_")[1]
    world.store.keys[public_id] = replace(world.store.keys[public_id], is_tenant_suspended=True)
    assert asyncio.run(world.keys.authenticate(key)) is None


def test_requests_at_once_share_one_look_up() -> None:
    world = World()
    key = world.new_key()

    async def many() -> None:
        holders = await asyncio.gather(*(world.keys.authenticate(key) for _ in range(50)))
        assert all(holders)

    asyncio.run(many())
    assert world.store.num_look_ups == 1


def test_guessed_keys_do_not_fill_the_memory() -> None:
    world = World()
    for _ in range(20):
        asyncio.run(world.keys.authenticate(make_key(PEPPER).text))
    assert len(world.keys._answers) == 5


def test_text_that_is_no_key_never_reaches_the_store() -> None:
    world = World()
    assert asyncio.run(world.keys.authenticate("sk-" + "x" * 100_000)) is None
    assert world.store.num_look_ups == 0


def test_cache_scopes_differ_by_tenant_and_meet_in_a_share_group() -> None:
    world = World()
    scopes = []
    for tenant_id, group in (("a", None), ("b", None), ("c", "g"), ("d", "g"), ("g", None)):
        key = make_key(PEPPER)
        world.store.keys[key.public_id] = StoredKey(
            key.public_id, key.hashed, Role.MEMBER, tenant_id, share_group=group
        )
        holder = asyncio.run(world.keys.authenticate(key.text))
        assert holder is not None
        scopes.append(holder.cache_scope)
    assert scopes[2] == scopes[3]
    assert len(set(scopes)) == 4


def test_the_first_keys_are_made_once(tmp_path: Path) -> None:
    store = MemoryStore()
    files = create_first_keys(store, MASTER, tmp_path)
    texts = {name: path.read_text() for name, path in files.items()}
    assert set(texts) == {"admin.key", "tenant.key", "scrape.key"}
    assert {path.stat().st_mode & 0o777 for path in files.values()} == {0o600}
    assert len(store.keys) == 3
    create_first_keys(store, MASTER, tmp_path)
    assert {name: path.read_text() for name, path in files.items()} == texts
    assert len(store.keys) == 3


def test_a_first_key_of_another_database_is_replaced(tmp_path: Path) -> None:
    create_first_keys(MemoryStore(), MASTER, tmp_path)
    before = (tmp_path / "tenant.key").read_text()
    store = MemoryStore()
    create_first_keys(store, MASTER, tmp_path)
    after = (tmp_path / "tenant.key").read_text()
    assert after != before
    parts = parse_key(after.strip())
    assert parts is not None
    assert store.keys[parts[0]].role is Role.MEMBER


def test_a_database_that_is_away_is_told_from_a_key_that_is_unknown() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        url = f"postgresql+psycopg://nobody@127.0.0.1:{port}/none"
        for store in (PostgresKeyStore(connect(url)), PostgresKeyReader(url)):
            with pytest.raises(StoreUnavailable):
                store.find_key("a" * 8)


def test_a_holder_carries_its_quotas_and_the_default_where_its_tenant_has_none() -> None:
    world = World()
    default, own, of_key = Quota(tokens_per_day=1), Quota(tokens_per_day=2), Quota(tokens_per_day=3)
    keys = CachingAuthenticator(world.store, MASTER, default_quota=default)
    for tenant_quota, key_quota, expected in (
        (None, None, (default, None)),
        (own, of_key, (own, of_key)),
        (Quota(), None, (Quota(), None)),
    ):
        key = world.new_key()
        stored = world.store.keys[key.split("_")[1]]
        world.store.keys[stored.public_id] = replace(stored, tenant_quota=tenant_quota, key_quota=key_quota)
        holder = asyncio.run(keys.authenticate(key))
        assert holder is not None
        assert (holder.tenant_quota, holder.key_quota) == expected


def test_a_confirmed_key_is_not_asked_for_again_until_somebody_says_that_it_changed() -> None:
    world = World()
    key = world.new_key()
    public_id = key.split("_")[1]
    assert asyncio.run(world.keys.authenticate(key)) is not None
    for _ in range(9):
        world.seconds += 1.5
        world.keys.confirm(world.seconds)
        assert asyncio.run(world.keys.authenticate(key)) is not None
    assert world.store.num_look_ups == 1
    world.store.revoke_key(public_id, world.now)
    world.keys.forget(public_id)
    assert asyncio.run(world.keys.authenticate(key)) is None


def test_what_nobody_confirms_any_more_is_asked_for_after_two_seconds() -> None:
    world = World()
    key = world.new_key()
    assert asyncio.run(world.keys.authenticate(key)) is not None
    world.seconds = 5.0
    world.keys.confirm(4.0)
    assert asyncio.run(world.keys.authenticate(key)) is not None
    assert world.store.num_look_ups == 1
    world.store.revoke_key(key.split("_")[1], world.now)
    world.seconds = 6.0
    assert asyncio.run(world.keys.authenticate(key)) is None


def test_a_key_in_use_is_asked_for_again_ahead_of_its_time_and_nobody_waits() -> None:
    world = World()
    key = world.new_key()

    async def use() -> None:
        assert await world.keys.authenticate(key) is not None
        world.seconds = 16.0
        world.keys.confirm(16.0)
        gate = world.store.gate = threading.Event()
        # Answered though the store does not answer now.
        assert await world.keys.authenticate(key) is not None
        gate.set()
        await asyncio.gather(*world.keys._fetches.values())
        assert world.store.num_look_ups == 2
        # A change by hand, which nobody tells of, is found in the end.
        world.store.revoke_key(key.split("_")[1], world.now)
        world.seconds = 46.0
        world.keys.confirm(46.0)
        assert await world.keys.authenticate(key) is None

    asyncio.run(use())


@pytest.mark.parametrize("whose", ["key", "tenant", "all"])
def test_a_look_up_that_began_before_a_change_is_not_kept_and_nobody_new_shares_it(whose: str) -> None:
    world = World()
    key = world.new_key()
    public_id = key.split("_")[1]

    async def race() -> None:
        gate = world.store.gate = threading.Event()
        early = asyncio.create_task(world.keys.authenticate(key))
        while not world.store.num_look_ups:
            await asyncio.sleep(0)
        world.store.gate = None
        world.store.revoke_key(public_id, world.now)
        if whose == "key":
            world.keys.forget(public_id)
        elif whose == "tenant":
            world.keys.forget_tenant(world.tenant.id)
        else:
            world.keys.forget_all()
        late = await world.keys.authenticate(key)
        gate.set()
        assert await early is not None
        assert late is None
        assert await world.keys.authenticate(key) is None

    asyncio.run(race())


def test_a_tenant_is_forgotten_with_all_its_keys_and_no_other() -> None:
    world = World()
    keys = [world.new_key() for _ in range(2)]
    other = make_key(PEPPER)
    world.store.add_key(other, "elsewhere", Role.MEMBER)
    for key in (*keys, other.text):
        assert asyncio.run(world.keys.authenticate(key)) is not None
    for public_id, stored in world.store.keys.items():
        world.store.keys[public_id] = replace(stored, is_tenant_suspended=True)
    world.keys.forget_tenant(world.tenant.id)
    opened = [asyncio.run(world.keys.authenticate(key)) for key in (*keys, other.text)]
    assert [holder is not None for holder in opened] == [False, False, True]


def test_uses_are_noted_for_keys_that_opened_and_taken_once() -> None:
    world = World()
    key = world.new_key()
    asyncio.run(world.keys.authenticate(key))
    asyncio.run(world.keys.authenticate(key[:-1] + ("a" if key[-1] != "a" else "b")))
    assert world.keys.take_uses() == {key.split("_")[1]: NOW}
    assert world.keys.take_uses() == {}


def test_look_ups_go_on_after_the_server_has_dropped_all_connections(postgres: PostgresServer) -> None:
    url = postgres.new_database(is_migrated=True)
    with connected(url) as engine:
        store = PostgresKeyStore(engine)
        key = make_key(PEPPER)
        store.add_key(key, store.create_tenant("team").id, Role.MEMBER)
        reader = PostgresKeyReader(url, pool_size=3)
        try:
            with ThreadPoolExecutor(3) as pool:
                expected = store.find_key(key.public_id)
                assert expected is not None
                found = list(pool.map(reader.find_key, [key.public_id] * 9))
                assert found == [expected] * 9
                with engine.begin() as connection:
                    connection.exec_driver_sql(
                        "select pg_terminate_backend(pid) from pg_stat_activity "
                        "where datname = current_database() and pid <> pg_backend_pid()"
                    )
                assert [reader.find_key(key.public_id) for _ in range(4)] == [expected] * 4
            assert reader.find_key("0" * 12) is None
        finally:
            reader.close()


def test_gateways_that_note_uses_of_the_same_keys_at_once_never_deadlock(postgres: PostgresServer) -> None:
    with connected(postgres.new_database(is_migrated=True)) as engine:
        store = PostgresKeyStore(engine)
        tenant = store.create_tenant("team")
        keys = [make_key(PEPPER) for _ in range(60)]
        for key in keys:
            store.add_key(key, tenant.id, Role.MEMBER)
        ids = [key.public_id for key in keys]

        def note(number: int) -> None:
            # Each in an order of its own.
            at = NOW + timedelta(seconds=number)
            store.note_uses(dict.fromkeys(ids if number % 2 else reversed(ids), at))

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(note, range(24)))
        with engine.connect() as connection:
            last = "select distinct last_used_at from tenancy.api_keys"
            assert connection.exec_driver_sql(last).scalars().all() == [NOW + timedelta(seconds=23)]
