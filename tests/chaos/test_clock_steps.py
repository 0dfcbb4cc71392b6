"""The wall clock of Valkey, of PostgreSQL or of a gateway steps by an hour, ahead and back, under load.

Outcome: every request is answered, whole and in time; the ledger has each once, with exact counts. When
Valkey's clock steps ahead, leases of what runs end at once: the reaper writes estimates, which the gateways
mend at the end, and until then these requests hold no place in limits. When it steps back, windows of use
begin at the new time with what they held, and claims and leases are cut to their usual length. A gateway with
a wrong clock dates its requests wrongly, so that they count in that hour's (and month's) use, and judges by
it whether a key has expired; gateways with a right clock let keys in exactly as long as they are to be,
whatever the others' clocks say.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import text

from footplate.deployments import embedded
from footplate.deployments.leftovers import wait_until
from footplate.tenancy.adapters.postgres.store import PostgresKeyStore
from footplate.tenancy.bootstrap import create_first_keys
from footplate.tenancy.secrets import MasterKey
from tests.chaos.faked_clock import FakedClock
from tests.chaos.fault_results import keep_result
from tests.chaos.ledger_audit import open_folder
from tests.chaos.test_random_kills import SEED
from tests.deployments.gateway_process import run
from tests.deployments.gateways import NUM_PROMPT, GatewayProcess, body, launch
from tests.deployments.test_metering import COMPLETED, Metered, cost, metered_books
from tests.postgres_server import connected, running_postgres
from tests.tenancy.limiter.valkey_server import ValkeyServer, running_valkey

VICTIMS = ("valkey", "postgres", "gateway")
# Hours ahead of the machine's clock, one after another.
STEPS = (1, 0, -1, 0)
NUM_CLIENTS = 6
REQUESTS_A_STEP = 24
STEP_S = 0.01
MAX_TOKENS = 60
LONGEST_S = 15.0  # of a request: its own 0.6 s, and what a busy machine and a store asked anew may add
QUOTA = {"tokens_per_minute": 10**7, "requests_per_minute": 10**6, "max_concurrent_requests": 1_000}
SPAWN = multiprocessing.get_context("spawn")


@dataclass
class Load:
    """Clients of both gateways, in turn."""

    gateways: list[GatewayProcess]
    key: str
    seen: dict[str, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    longest_s: float = 0.0
    _stop: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> Load:
        for number in range(NUM_CLIENTS):
            self._threads.append(threading.Thread(target=self._run, args=(number,), daemon=True))
            self._threads[-1].start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=30)
            assert not thread.is_alive(), "a request never ended"

    def _run(self, number: int) -> None:
        rng = random.Random(SEED + number)
        gateway = self.gateways[number % len(self.gateways)]
        while not self._stop.is_set():
            began = time.monotonic()
            try:
                self._ask(gateway, rng.randrange(1, MAX_TOKENS))
            except httpx.TransportError as error:
                self.faults.append(type(error).__name__)
            self.longest_s = max(self.longest_s, time.monotonic() - began)

    def _ask(self, gateway: GatewayProcess, num_tokens: int) -> None:
        asked = body(num_tokens, stream=True, stream_options={"include_usage": True})
        with gateway.http(self.key) as http, http.stream("POST", "/v1/completions", json=asked) as answer:
            if answer.status_code != 200:
                self.faults.append(f"{answer.status_code} {answer.read().decode()}")
                return
            events = [line for line in answer.iter_lines() if line]
        usage = json.loads(events[-2].removeprefix("data: "))["usage"]
        if events[-1] != "data: [DONE]" or usage["completion_tokens"] != num_tokens:
            self.faults.append(f"{events[-2:]} of {num_tokens} tokens")
        self.seen[answer.headers["x-request-id"]] = num_tokens


@dataclass
class Rig:
    """Two gateways, the first one's clock right, over servers with clocks of their own."""

    clocks: dict[str, FakedClock]
    valkey: ValkeyServer
    metered: Metered
    gateways: list[GatewayProcess]
    keys: dict[str, str]

    def new_key(self, lasts_s: float) -> str:
        """Of a tenant of its own."""
        with self.gateways[0].http(self.keys["admin"]) as http:
            made = http.post("/admin/v1/tenants", json={"name": f"keys of {time.monotonic_ns()}"})
            ends = (datetime.now(UTC) + timedelta(seconds=lasts_s)).isoformat()
            path = f"/admin/v1/tenants/{made.json()['id']}/keys"
            answer = http.post(path, json={"expires_at": ends})
        assert answer.status_code == 200, answer.text
        return str(answer.json()["key"])

    def hours_ahead(self) -> dict[str, int]:
        """What the servers themselves say."""
        told = self.valkey.ask("TIME")
        assert isinstance(told, tuple)
        with self.metered.engine.connect() as connection:
            at = connection.execute(text("select extract(epoch from clock_timestamp())")).scalar_one()
        seconds = {"valkey": int(told[0]), "postgres": float(at)}
        return {name: round((value - time.time()) / 3600) for name, value in seconds.items()}

    def status(self, gateway: int, key: str) -> int:
        with self.gateways[gateway].http(key) as http:
            return http.get("/v1/models").status_code


@dataclass(frozen=True)
class Step:
    """One clock, to so many hours ahead of the machine's, and what was seen until 24 requests had ended."""

    victim: str
    ahead_h: int
    longest_s: float
    key_statuses: list[int]  # of a key for half an hour: at the gateway with the right clock, at the other


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    with ExitStack() as stack:
        folder = stack.enter_context(open_folder())
        # PostgreSQL runs as another user, which reads its clock there.
        folder.chmod(0o711)
        clocks = {name: FakedClock(folder / name) for name in VICTIMS}
        valkey = stack.enter_context(running_valkey(environment=clocks["valkey"].environment))
        usual = embedded._environment
        monkeypatch.setattr(
            embedded, "_environment", lambda paths: {**usual(paths), **clocks["postgres"].environment}
        )
        postgres = stack.enter_context(running_postgres())
        url = postgres.new_database(is_migrated=True)
        metered = stack.enter_context(metered_books(url, folder / "journal"))
        keys, file = first_keys(url, folder)
        options = {
            **metered.options,
            "database_url": url,
            "master_key_file": str(file),
            "step_s": STEP_S,
            "limits": {"lease_s": 1.0},
            "num_gateways": 2,
        }
        gateways = launch(1, valkey.url, QUOTA, **options)
        stack.callback(lambda: [gateway.end() for gateway in gateways])
        gateways.append(launch_faked(clocks["gateway"], {"redis_url": valkey.url, "quota": QUOTA, **options}))
        assert all(gateway.url for gateway in gateways), "a gateway did not start"
        yield Rig(clocks, valkey, metered, gateways, keys)


def first_keys(url: str, folder: Path) -> tuple[dict[str, str], Path]:
    """Keys of the first start by name, and the master key's file."""
    file = folder / "keys" / "master.key"
    master = MasterKey.load_or_create(file)
    with connected(url) as engine:
        files = create_first_keys(PostgresKeyStore(engine), master, folder / "keys")
    return {path.stem: path.read_text().strip() for path in files.values()}, file


def launch_faked(clock: FakedClock, options: dict[str, Any]) -> GatewayProcess:
    """A gateway that goes by a clock of its own; no fork: only a new program takes a library up."""
    owner, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=run, args=(options, theirs), daemon=True)
    with clock.inherited():
        process.start()
    theirs.close()
    return GatewayProcess(process, owner, url=owner.recv())


def test_steps_of_any_clock_lose_no_request_and_bill_each_once(
    rig: Rig, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(SEED)
    key = rig.new_key(lasts_s=1_800)
    steps: list[Step] = []
    with Load(rig.gateways, rig.keys["tenant"]) as load:
        for victim in rng.sample(VICTIMS, len(VICTIMS)):
            for hours in STEPS:
                steps.append(take_step(rig, load, key, victim, hours))
                with capsys.disabled():
                    print(steps[-1], flush=True)
    assert not load.faults, (SEED, len(load.faults), load.faults[:5])
    rows = await_exact(rig, load)
    assert {row.event_id: row.output for row in rows} == load.seen
    assert all((row.state, row.input) == (COMPLETED, NUM_PROMPT) for row in rows)
    assert all(row.amount == cost(NUM_PROMPT, row.output) for row in rows)
    assert rig.valkey.ask("KEYS", "*:lost") == rig.valkey.ask("KEYS", "*:note:*") == []
    for step in steps:
        # By the gateway with the right clock the key is live throughout; by the other one's it has expired.
        has_expired = (step.victim, step.ahead_h) == ("gateway", 1)
        assert step.key_statuses == [200, 401 if has_expired else 200], step
        assert step.longest_s < LONGEST_S, step
    keep_result(
        "clock_steps",
        clients=NUM_CLIENTS,
        requests=len(load.seen),
        failed=0,
        steps=[vars(step) for step in steps],
    )


def take_step(rig: Rig, load: Load, key: str, victim: str, hours: int) -> Step:
    """Step one clock, and wait until requests that began afterwards have ended."""
    load.longest_s = 0.0
    rig.clocks[victim].step(hours)
    wanted = {name: hours if name == victim else 0 for name in VICTIMS if name != "gateway"}
    assert wait_until(lambda: rig.hours_ahead() == wanted, 10, every_s=0.1), (rig.hours_ahead(), wanted)
    num_wanted = len(load.seen) + len(load.faults) + REQUESTS_A_STEP
    is_through = wait_until(lambda: len(load.seen) + len(load.faults) >= num_wanted, 30, every_s=0.05)
    assert is_through, (victim, hours, load.faults)
    statuses = [rig.status(number, key) for number in range(2)]
    return Step(victim, hours, round(load.longest_s, 2), statuses)


def await_exact(rig: Rig, load: Load) -> list[Any]:
    """Every request is in the ledger, and what the reaper had to estimate is mended."""

    def is_exact() -> bool:
        rows = rig.metered.rows()
        is_held = rig.valkey.ask("KEYS", "*:leases") != []
        return len(rows) >= len(load.seen) and not any(row.is_estimated for row in rows) and not is_held

    assert wait_until(is_exact, 30, every_s=0.2), [row for row in rig.metered.rows() if row.is_estimated]
    return rig.metered.rows()
