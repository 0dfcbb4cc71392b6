"""Events are durable when the writer says so, in the database or on the disk; each counts once in the end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from footplate.billing.adapters.postgres.books import connect
from footplate.billing.adapters.postgres.event_store import PostgresEventStore
from footplate.billing.errors import JournalFailed, StoreUnavailable
from footplate.billing.event_writer import Durability, EventWriter, SilentObserver, WriterConfig
from footplate.billing.journal import Journal, read_segment
from footplate.billing.store import CommitOutcome, StoredEvent
from footplate.billing.usage import EventId, TenantId, UsageEvent
from tests.billing.builders import NOON, OpenBooks, event
from tests.postgres_server import running_postgres

ROOT = Path(__file__).parents[2]
QUICK = WriterConfig(group_s=0.001, store_wait_s=20, retry_s=0.01, upkeep_s=0.02)


@dataclass
class SwitchedStore:
    """A real store that can be away, hang, or lose its answers."""

    inner: PostgresEventStore
    is_away: bool = False
    loses_answers: bool = False
    fault: Exception | None = None
    gate: threading.Event = field(default_factory=threading.Event)
    num_commits: int = 0
    sizes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gate.set()

    def _ask(self) -> None:
        self.gate.wait()
        if self.fault is not None:
            raise self.fault
        if self.is_away:
            raise StoreUnavailable("away")

    def commit(self, events: Sequence[UsageEvent]) -> list[CommitOutcome]:
        self._ask()
        self.num_commits += 1
        self.sizes.append(len(events))
        outcomes = self.inner.commit(events)
        if self.loses_answers:
            raise StoreUnavailable("the answer was lost")
        return outcomes

    def rate_quarantined(self) -> int:
        self._ask()
        return self.inner.rate_quarantined()

    def find(self, event_id: EventId) -> StoredEvent | None:
        return self.inner.find(event_id)

    def report_journal(self, name: str, *, holds_events: bool) -> None:
        self._ask()
        self.inner.report_journal(name, holds_events=holds_events)


@dataclass
class Heard(SilentObserver):
    """What the writer told."""

    num_replayed: int = 0
    num_journalled: int = 0
    num_refused: int = 0
    failures: list[JournalFailed] = field(default_factory=list)

    def committed(self, outcomes: Sequence[CommitOutcome], took_s: float, *, is_replay: bool) -> None:
        self.num_replayed += len(outcomes) if is_replay else 0

    def journalled(self, num_events: int) -> None:
        self.num_journalled += num_events

    def journal_failed(self, error: JournalFailed) -> None:
        self.failures.append(error)

    def refused(self, num_events: int) -> None:
        self.num_refused += num_events


@dataclass
class Rig:
    """A writer that runs on switched books."""

    books: OpenBooks
    store: SwitchedStore
    writer: EventWriter
    heard: Heard
    root: Path

    def num_recorded(self) -> int:
        return len(self.books.rows("select 1 from billing.events"))

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not holds():
                await asyncio.sleep(0.002)


@asynccontextmanager
async def rig(
    books: OpenBooks, root: Path, config: WriterConfig = QUICK, *, name: str = "gw"
) -> AsyncIterator[Rig]:
    store, heard = SwitchedStore(books.events), Heard()
    writer = EventWriter(store, root, name, config, heard)
    writer.start()
    try:
        yield Rig(books, store, writer, heard, root)
    finally:
        store.gate.set()
        store.is_away, store.fault = False, None
        await writer.close()


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await test()

    asyncio.run(main())


def some(count: int) -> list[UsageEvent]:
    return [event(tokens=(1, 0, 0)) for _ in range(count)]


def test_events_of_many_requests_go_in_few_groups(books: OpenBooks, tmp_path: Path) -> None:
    async def test() -> None:
        async with rig(books, tmp_path) as rigged:
            done = await asyncio.gather(*map(rigged.writer.submit, some(200)))
            assert set(done) == {Durability.STORE}
            assert rigged.store.num_commits < 20
            assert rigged.num_recorded() == 200
            assert rigged.writer.num_waiting == 0

    run(test)
    assert list(tmp_path.iterdir()) == []


def test_what_is_taken_is_durable_when_the_writer_is_closed(books: OpenBooks, tmp_path: Path) -> None:
    async def test() -> None:
        async with rig(books, tmp_path) as rigged:
            futures = [rigged.writer.take(each) for each in some(1200)]
        assert {future.result() for future in futures} == {Durability.STORE}
        assert rigged.num_recorded() == 1200

    run(test)


def test_a_caller_that_is_cancelled_takes_nothing_back(books: OpenBooks, tmp_path: Path) -> None:
    async def test() -> None:
        async with rig(books, tmp_path) as rigged:
            submitting = asyncio.ensure_future(rigged.writer.submit(some(1)[0]))
            await asyncio.sleep(0)
            submitting.cancel()
        assert rigged.num_recorded() == 1

    run(test)


def test_while_the_database_is_away_events_are_safe_on_disk_and_counted_once_afterwards(
    books: OpenBooks, tmp_path: Path
) -> None:
    async def test() -> None:
        async with rig(books, tmp_path) as rigged:
            await rigged.writer.submit(some(1)[0])
            rigged.store.is_away = True
            done = await asyncio.gather(*map(rigged.writer.submit, some(30)))
            assert set(done) == {Durability.JOURNAL}
            assert rigged.writer.is_store_away
            assert rigged.num_recorded() == 1
            rigged.store.is_away = False
            await rigged.until(lambda: rigged.num_recorded() == 31)
            assert await rigged.writer.submit(some(1)[0]) is Durability.STORE
            await rigged.until(lambda: not list(tmp_path.rglob("*.log")))
            assert rigged.heard.num_replayed == 30
            assert books.ledger.month_spend(TenantId("tnt_a"), NOON) == 32_000_000
            await rigged.until(lambda: not books.rows("select 1 from billing.journals"))

    run(test)


def test_an_answer_that_was_lost_makes_no_second_event(books: OpenBooks, tmp_path: Path) -> None:
    """Committed, and nobody was told: journalled and replayed, and still there once."""

    async def test() -> None:
        async with rig(books, tmp_path) as rigged:
            rigged.store.loses_answers = True
            done = await asyncio.gather(*map(rigged.writer.submit, some(7)))
            assert set(done) == {Durability.JOURNAL}
            assert rigged.num_recorded() == 7
            rigged.store.loses_answers = False
            await rigged.until(lambda: rigged.heard.num_replayed == 7)
            assert rigged.num_recorded() == 7

    run(test)
    assert books.ledger.month_spend(TenantId("tnt_a"), NOON) == 7_000_000


def test_a_database_that_hangs_holds_nobody_up(books: OpenBooks, tmp_path: Path) -> None:
    async def test() -> None:
        async with rig(books, tmp_path, replace(QUICK, store_wait_s=0.2)) as rigged:
            rigged.store.gate.clear()
            async with asyncio.timeout(5):
                done = await asyncio.gather(*map(rigged.writer.submit, some(5)))
                more = await rigged.writer.submit(some(1)[0])
            assert {*done, more} == {Durability.JOURNAL}
            rigged.store.gate.set()
            await rigged.until(lambda: rigged.num_recorded() == 6)
            await rigged.until(lambda: not list(tmp_path.rglob("*.log")))

    run(test)


def test_events_wait_in_memory_while_neither_store_nor_disk_takes_them(
    books: OpenBooks, tmp_path: Path
) -> None:
    async def test() -> None:
        root = tmp_path / "journals"
        async with rig(books, root, WriterConfig(0.001, 10, 4, 20, 0.01, 60)) as rigged:
            rigged.store.is_away = True
            folder = root / "gw"
            moved = folder.rename(tmp_path / "elsewhere")
            waiting = [asyncio.ensure_future(rigged.writer.submit(each)) for each in some(4)]
            await rigged.until(lambda: len(rigged.heard.failures) > 2)
            assert rigged.writer.is_journal_failing and not rigged.writer.has_room
            # No room: the fifth waits at the door.
            fifth = asyncio.ensure_future(rigged.writer.submit(some(1)[0]))
            await asyncio.sleep(0)
            assert rigged.writer.num_waiting == 4
            assert not any(each.done() for each in [*waiting, fifth])
            moved.rename(folder)
            assert set(await asyncio.gather(*waiting, fifth)) == {Durability.JOURNAL}
            assert not rigged.writer.is_journal_failing
            rigged.store.is_away = False
            await rigged.until(lambda: rigged.num_recorded() == 5)

    run(test)


def test_an_event_that_the_database_refuses_stands_in_nobodys_way(books: OpenBooks, tmp_path: Path) -> None:
    async def test() -> None:
        async with rig(books, tmp_path) as rigged:
            bad = event()
            object.__setattr__(bad.skeleton, "endpoint", "a\x00b")
            futures = [rigged.writer.take(each) for each in (*some(3), bad, *some(3))]
            await asyncio.gather(*futures)
            assert rigged.num_recorded() == 6
            assert rigged.heard.num_refused == 1
            kept = read_segment(tmp_path / "gw" / "refused.events")
            # It can't be made again either: what was written is what is kept.
            assert (len(kept.events), kept.num_torn_bytes > 0) == (0, True)

    run(test)


def test_a_database_that_can_not_be_used_as_it_is_counts_as_away(books: OpenBooks, tmp_path: Path) -> None:
    """Such as one whose schema is of another version: nothing is put aside, all is replayed."""

    async def test() -> None:
        async with rig(books, tmp_path) as rigged:
            rigged.store.fault = RuntimeError("no such column")
            assert await rigged.writer.submit(some(1)[0]) is Durability.JOURNAL
            rigged.store.fault = None
            await rigged.until(lambda: rigged.num_recorded() == 1)
            assert rigged.heard.num_refused == 0

    run(test)


def test_new_events_do_not_wait_for_a_long_replay(books: OpenBooks, tmp_path: Path) -> None:
    left = Journal(tmp_path, "dead", segment_bytes=2_000)
    for each in some(40):
        left.append([each])
    left.close()

    async def test() -> None:
        async with rig(books, tmp_path, WriterConfig(0.001, 1, 100, 20, 0.01, 60)) as rigged:
            await rigged.writer.submit(some(1)[0])
            assert rigged.num_recorded() < 20
            await rigged.until(lambda: rigged.num_recorded() == 41)

    run(test)


def test_what_a_process_left_is_replayed_by_the_next_of_another_name(
    books: OpenBooks, tmp_path: Path
) -> None:
    left = Journal(tmp_path, "dead")
    left.append(some(3))
    left.close()

    async def test() -> None:
        async with rig(books, tmp_path, name="alive") as rigged:
            await rigged.until(lambda: rigged.num_recorded() == 3)
            await rigged.until(lambda: not (tmp_path / "dead").exists())
            await rigged.until(lambda: not books.rows("select 1 from billing.journals"))

    run(test)


def test_events_wait_for_a_price_and_are_rated_without_anybody_asking(
    books: OpenBooks, tmp_path: Path
) -> None:
    async def test() -> None:
        async with rig(books, tmp_path) as rigged:
            await rigged.writer.submit(event(served="new"))
            insert = "insert into billing.price_versions (effective_from, currency, multiplier_numerator, "
            with books.engine.begin() as connection:
                # Another process has imported a version, and died before it rated anything.
                connection.exec_driver_sql(
                    insert + "multiplier_denominator, imported_at, imported_by) "
                    "values ('2026-11-01T00:00:00Z', 'USD', 1, 2, now(), 'x')"
                )
                connection.exec_driver_sql("insert into billing.model_prices values (2, 'new', 2, 2, 2)")
            await rigged.until(lambda: not books.rows("select 1 from billing.quarantine"))

    run(test)


KILLED = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from footplate.billing.adapters.postgres.books import Books, connect
from footplate.billing.adapters.postgres.event_store import PostgresEventStore
from footplate.billing.event_writer import EventWriter, WriterConfig
from tests.billing.builders import event

async def main():
    store = PostgresEventStore(Books(connect(sys.argv[3])))
    writer = EventWriter(store, Path(sys.argv[1]), "victim", WriterConfig(retry_s=0.05))
    writer.start()
    number = 0
    while True:
        group = [event(f"req_{number + each:06d}", tokens=(1, 0, 0)) for each in range(7)]
        done = await asyncio.gather(*map(writer.submit, group))
        number += len(group)
        print(number, done[0].value, flush=True)

asyncio.run(main())
"""


def test_no_event_is_lost_or_doubled_when_database_and_gateway_are_killed(tmp_path: Path) -> None:
    """kill -9 of PostgreSQL under load, then of the gateway: all that was promised is there once."""
    from footplate.billing.adapters.postgres import schema
    from footplate.deployments import migrations
    from tests.billing.builders import open_books, price_list

    script = tmp_path / "script.py"
    script.write_text(KILLED)
    root = tmp_path / "journals"
    with running_postgres() as server:
        admin = connect(server.url)
        migrations.upgrade(admin, schema)
        admin.dispose()
        with open_books(server.url) as books:
            books.prices.add(price_list(), imported_by="test")
            arguments = [sys.executable, str(script), str(root), str(ROOT), server.url]
            with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
                assert process.stdout is not None
                lines = iter(process.stdout.readline, "")
                for line in lines:
                    if int(line.split()[0]) >= 70:
                        break
                for pid in server.pids():
                    os.kill(pid, signal.SIGKILL)
                promised = 0
                for line in lines:
                    promised, where = int(line.split()[0]), line.split()[1]
                    if where == "journal" and promised >= 210:
                        break
                process.kill()
                for line in lines:
                    promised = int(line.split()[0])
            server.server.stop()  # collects what was killed
            server.server.start()

            async def test() -> None:
                async with rig(books, root, name="next") as rigged:
                    await rigged.until(lambda: not (root / "victim").exists())

            run(test)
            names = [name for (name,) in books.rows("select event_id from billing.events order by 1")]
            assert len(names) >= promised
            assert names == [f"req_{number:06d}" for number in range(len(names))]
            assert books.ledger.month_spend(TenantId("tnt_a"), NOON) == len(names) * 1_000_000
