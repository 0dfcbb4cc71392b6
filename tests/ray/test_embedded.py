"""Embedded PostgreSQL and Valkey: started, adopted, found again after a kill, and the key store on top.

No Ray here, but real servers; they share the tier of tests that start processes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from footplate.deployments import migrations
from footplate.deployments.embedded import EmbeddedPostgres, EmbeddedValkey
from footplate.deployments.keeper import Keeper
from footplate.deployments.leftovers import find_processes, is_alive, postmaster_pid, wait_until
from footplate.deployments.platform_run import PlatformRun, RunPlan
from footplate.deployments.run_paths import RunPaths
from footplate.deployments.storage import prepare_storage
from footplate.tenancy.adapters.postgres import schema
from footplate.tenancy.adapters.postgres.admin_store import PostgresAdminStore
from footplate.tenancy.adapters.postgres.store import PostgresKeyStore, connect
from footplate.tenancy.api_keys import Role, make_key
from footplate.tenancy.errors import NameTaken, NotFound
from footplate.tenancy.secrets import MasterKey

pytestmark = pytest.mark.ray


@pytest.fixture
def paths(tmp_path: Path) -> Iterator[RunPaths]:
    paths = RunPaths.of(tmp_path / "data")
    paths.make()
    yield paths
    assert postmaster_pid(paths.postgres_dir) is None
    for left in sorted(paths.run_dir.rglob("*"), reverse=True):
        left.rmdir() if left.is_dir() else left.unlink()
    paths.run_dir.rmdir()


@pytest.fixture
def postgres(paths: RunPaths) -> Iterator[Callable[[], EmbeddedPostgres]]:
    """Makes handles of the database; whatever they have started is stopped and collected."""
    with contextlib.ExitStack() as stack:

        def make() -> EmbeddedPostgres:
            server = EmbeddedPostgres(paths)
            stack.callback(server.stop)
            return server

        yield make


@pytest.fixture
def valkey(paths: RunPaths) -> Iterator[Callable[[], EmbeddedValkey]]:
    """Makes handles of Valkey, as above."""
    with contextlib.ExitStack() as stack:

        def make() -> EmbeddedValkey:
            server = EmbeddedValkey(paths)
            stack.callback(server.stop)
            return server

        yield make


def read(path: Path) -> bytes:
    """A file that may go away meanwhile."""
    with contextlib.suppress(FileNotFoundError):
        return path.read_bytes()
    return b""


def valkey_says(paths: RunPaths, command: bytes) -> bytes:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(str(paths.valkey_socket))
        connection.sendall(command + b"\r\n")
        return connection.recv(1024)


def test_a_running_database_is_adopted_and_a_killed_one_started_again(
    paths: RunPaths, postgres: Callable[[], EmbeddedPostgres]
) -> None:
    first = postgres()
    assert not first.start()
    pid = postmaster_pid(paths.postgres_dir)
    assert pid is not None
    assert postgres().start()
    assert postmaster_pid(paths.postgres_dir) == pid
    os.kill(pid, signal.SIGKILL)
    assert first._server is not None
    first._server.wait()
    # The server's own lock file still stands; only whether such a process runs may count.
    assert not postgres().start()
    assert postmaster_pid(paths.postgres_dir) not in (None, pid)


def test_a_server_that_is_stopping_is_waited_for_and_not_adopted(
    paths: RunPaths, postgres: Callable[[], EmbeddedPostgres]
) -> None:
    first = postgres()
    first.start()
    pid = postmaster_pid(paths.postgres_dir)
    assert pid is not None
    os.kill(pid, signal.SIGINT)
    state = paths.postgres_dir / "postmaster.pid"
    assert wait_until(lambda: postmaster_pid(paths.postgres_dir) is None or b"stopping" in read(state), 5)
    assert not postgres().start()
    assert postmaster_pid(paths.postgres_dir) not in (None, pid)
    assert first._server is not None
    first._server.wait()


def test_locks_of_a_dead_server_are_stale_though_another_process_has_its_number(
    paths: RunPaths, postgres: Callable[[], EmbeddedPostgres]
) -> None:
    server = postgres()
    server.start()
    server.stop()
    text = f"{os.getpid()}\n{paths.postgres_dir}\n1\n5432\n{paths.postgres_socket_dir}\n\n"
    for lock in (paths.postgres_dir / "postmaster.pid", paths.postgres_socket_dir / ".s.PGSQL.5432.lock"):
        lock.write_text(text)
    assert not server.start()


def test_the_database_is_no_leftover_to_be_killed(
    paths: RunPaths, postgres: Callable[[], EmbeddedPostgres], valkey: Callable[[], EmbeddedValkey]
) -> None:
    postgres().start()
    store = valkey()
    store.start()
    assert set(find_processes(paths.mark, str(paths.run_dir))) == store.pids()


def test_valkey_keeps_its_data_over_a_kill_and_is_adopted_when_it_runs(
    paths: RunPaths, valkey: Callable[[], EmbeddedValkey]
) -> None:
    first = valkey()
    assert not first.start()
    assert valkey_says(paths, b"SET colour green") == b"+OK\r\n"
    assert valkey().start()
    (pid,) = first.pids()
    os.kill(pid, signal.SIGKILL)
    assert first._server is not None
    first._server.wait()
    assert not valkey().start()
    assert valkey_says(paths, b"GET colour") == b"$5\r\ngreen\r\n"


def servers_of(paths: RunPaths) -> list[int]:
    """Every Valkey of this installation that lives, found apart from what a handle knows."""
    binary = b"valkey-server"
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdecimal() and binary in read(process / "cmdline"):
            with contextlib.suppress(OSError):
                if os.readlink(process / "cwd") == str(paths.valkey_dir) and is_alive(int(process.name)):
                    found.append(int(process.name))
    return found


def test_a_server_that_can_not_be_started_again_is_tried_until_it_can(
    paths: RunPaths, valkey: Callable[[], EmbeddedValkey], caplog: pytest.LogCaptureFixture
) -> None:
    """As on a full disk: the platform goes on without it, and says so once."""
    run = PlatformRun(RunPlan(paths.data_dir, models=()))
    server = run._valkey = valkey()
    server.start()
    server.stop()
    kept = paths.valkey_dir.rename(paths.data_dir / "kept")
    paths.valkey_dir.write_text("")
    logger = logging.getLogger("footplate.deployments.platform_run")
    # Its lines go nowhere else where another test has set up our logs.
    logger.addHandler(caplog.handler)
    for _ in range(3):
        run.revive()
    logger.removeHandler(caplog.handler)
    # Its handler may stand at the root too.
    assert len({id(record) for record in caplog.records if record.levelname == "ERROR"}) == 1
    paths.valkey_dir.unlink()
    kept.rename(paths.valkey_dir)
    run.revive()
    assert server.pids()


@pytest.mark.parametrize("is_own", [True, False], ids=["own child", "another's"])
def test_a_stopped_valkey_is_ended_before_another_one_starts(
    paths: RunPaths, valkey: Callable[[], EmbeddedValkey], is_own: bool
) -> None:
    first = valkey()
    first.start()
    assert valkey_says(paths, b"SET colour green") == b"+OK\r\n"
    (pid,) = first.pids()
    os.kill(pid, signal.SIGSTOP)
    try:
        assert not (first if is_own else valkey()).start()
    finally:
        # The one that nobody asked: had it lived on, it would go on writing to the same file.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    assert not is_alive(pid)
    assert len(servers_of(paths)) == 1
    assert valkey_says(paths, b"GET colour") == b"$5\r\ngreen\r\n"


def test_a_valkey_that_is_held_up_for_a_moment_stays(
    paths: RunPaths, valkey: Callable[[], EmbeddedValkey]
) -> None:
    first = valkey()
    first.start()
    (pid,) = first.pids()
    os.kill(pid, signal.SIGSTOP)
    waker = threading.Timer(1.5, os.kill, (pid, signal.SIGCONT))
    waker.start()
    try:
        assert first.start()
    finally:
        waker.join()
    assert servers_of(paths) == [pid]


def test_a_valkey_that_still_reads_its_file_is_alive(
    paths: RunPaths, valkey: Callable[[], EmbeddedValkey]
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(paths.valkey_socket))
        listener.listen()

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(64)
                connection.sendall(b"-LOADING Valkey is loading the dataset in memory\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        assert valkey().start()
        thread.join()
    assert servers_of(paths) == []


def test_a_stopped_valkey_does_not_hold_up_the_end(
    paths: RunPaths, valkey: Callable[[], EmbeddedValkey]
) -> None:
    first = valkey()
    first.start()
    (pid,) = first.pids()
    os.kill(pid, signal.SIGSTOP)
    first.stop()
    assert servers_of(paths) == []


def test_the_keeper_ends_the_servers_when_its_owner_is_killed(
    paths: RunPaths, postgres: Callable[[], EmbeddedPostgres], valkey: Callable[[], EmbeddedValkey]
) -> None:
    keeper = Keeper(paths)
    postgres().start()
    store = valkey()
    store.start()
    pids = [postmaster_pid(paths.postgres_dir), *store.pids()]
    assert keeper._process.stdin is not None
    # What the kernel does to the pipe when the owner dies.
    keeper._process.stdin.close()
    assert wait_until(lambda: not any(is_alive(pid) for pid in pids if pid), 15)
    keeper._process.wait(timeout=15)


def test_the_key_store_on_postgres(paths: RunPaths, postgres: Callable[[], EmbeddedPostgres]) -> None:
    server = postgres()
    server.start()
    master_key_file = paths.keys_dir / "master.key"
    MasterKey.load_or_create(master_key_file)
    prepare_storage(server.url, master_key_file, paths.keys_dir)
    texts = {path.name: path.read_text() for path in paths.keys_dir.glob("*.key")}
    prepare_storage(server.url, master_key_file, paths.keys_dir)
    assert {path.name: path.read_text() for path in paths.keys_dir.glob("*.key")} == texts

    engine = connect(server.url)
    try:
        store = PostgresKeyStore(engine)
        with engine.connect() as connection:
            assert migrations.version(connection, schema) == "0004"
        tenant = store.create_tenant("team")
        with pytest.raises(NameTaken):
            store.create_tenant("team")
        assert store.find_tenant("team") == tenant
        key = make_key(b"pepper")
        store.add_key(key, tenant.id, Role.FINANCE, name="reports")
        stored = store.find_key(key.public_id)
        assert stored is not None
        assert (stored.hashed, stored.role, stored.tenant_quota) == (key.hashed, Role.FINANCE, None)
        used = datetime(2026, 1, 1, tzinfo=UTC)
        store.note_uses({key.public_id: used, "nobody": used})
        store.note_uses({key.public_id: used - timedelta(days=1)})
        with PostgresAdminStore(engine).reading() as reader:
            found = reader.key(key.public_id)
        assert found is not None
        assert (found.name, found.last_used_at) == ("reports", used)
        with pytest.raises(NotFound):
            store.add_key(make_key(b"pepper"), "tnt_none", Role.MEMBER)
        assert store.find_key("nobody") is None
    finally:
        engine.dispose()
