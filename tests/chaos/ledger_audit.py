"""Requests whose tokens and money are known from three sides: the ledger, the engines' journals, the clients.

An engine with a script stands in for the model: `ledger_stack`.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from footplate.billing.usage import EventState, ModelName
from footplate.deployments.billing_setup import packaged_prices
from footplate.deployments.embedded import EmbeddedPostgres
from footplate.deployments.engine_journal import ProducedTokens, read_journals
from footplate.deployments.leftovers import wait_until
from footplate.deployments.ports import find_free_port
from footplate.deployments.run_paths import RunPaths
from tests.billing.builders import OpenBooks, open_books
from tests.chaos.ledger_stack import MODEL
from tests.e2e.serve_process import START_S, ServeProcess, clean_environment

NUM_CLIENTS = 8
STEP_MS = 5
LEASE_S = 2
SETTLE_S = 60.0
# Of a killed gateway's streams: a beat each half a second, and some time for it to be told.
MAX_UNSETTLED = 1000 // STEP_MS
GOOD_ENDS = {"whole", "body", "left", "stop string", "error event"}
FAILED, LOST = EventState.FAILED.value, EventState.GATEWAY_LOST.value


@dataclass
class Seen:
    """What a client saw of one request."""

    num_tokens: int
    is_whole: bool


@dataclass
class Load:
    """Clients that ask until the number is reached: streams, bodies, stop strings, and some who leave."""

    served: ServeProcess
    num_requests: int
    seed: int
    seen: dict[str, Seen] = field(default_factory=dict)
    ends: Counter[str] = field(default_factory=Counter)
    num_asked: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self, num_clients: int = NUM_CLIENTS) -> None:
        for number in range(num_clients):
            thread = threading.Thread(
                target=self._run, args=(random.Random(self.seed + number),), daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """Let all that were asked come to their end."""
        self.num_requests = 0
        for thread in self._threads:
            thread.join(timeout=60)
            assert not thread.is_alive(), "a request never ended"

    @property
    def is_over(self) -> bool:
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self, rng: random.Random) -> None:
        while True:
            with self._lock:
                if self.num_asked >= self.num_requests:
                    return
                self.num_asked += 1
            kind = rng.choice(("stream", "stream", "body", "leaves", "stop string"))
            try:
                with self.served.http(timeout_s=60) as http:
                    end = self._ask(http, kind, rng)
            except httpx.TransportError as error:
                end = type(error).__name__
            self.ends[end] += 1
            if end not in GOOD_ENDS:
                time.sleep(0.2)

    def _ask(self, http: httpx.Client, kind: str, rng: random.Random) -> str:
        num_tokens = rng.randrange(20, 200)
        body = {"model": MODEL, "prompt": [7] * rng.randrange(5, 50), "max_tokens": num_tokens}
        if kind == "stop string":
            # The script says the same words again and again; every answer meets this one early.
            body["stop"] = "the"
        if kind in ("body", "stop string"):
            answer = http.post("/v1/completions", json=body)
            if answer.status_code != 200:
                return f"refused with {answer.status_code}"
            self._note(answer, answer.json()["usage"]["completion_tokens"], is_whole=True)
            return kind
        num_wanted = rng.randrange(1, 40) if kind == "leaves" else 10**6
        asked = {**body, "stream": True, "return_token_ids": True}
        with http.stream("POST", "/v1/completions", json=asked) as answer:
            if answer.status_code != 200:
                answer.read()
                return f"refused with {answer.status_code}"
            return self._read(answer, num_wanted)

    def _read(self, answer: httpx.Response, num_wanted: int) -> str:
        num_tokens, end = 0, "cut"
        try:
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    end = "whole" if end == "cut" else end
                    break
                if not line:
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    end = "error event"
                    continue
                num_tokens += len(event["choices"][0].get("token_ids") or ())
                if num_tokens >= num_wanted:
                    end = "left"
                    break
        finally:
            self._note(answer, num_tokens, is_whole=end == "whole")
        return end

    def _note(self, answer: httpx.Response, num_tokens: int, *, is_whole: bool) -> None:
        with self._lock:
            self.seen[answer.headers["x-request-id"]] = Seen(num_tokens, is_whole)


@contextmanager
def open_folder() -> Iterator[Path]:
    """Not pytest's: each session closes that to others, and PostgreSQL runs as another user than root."""
    with tempfile.TemporaryDirectory(prefix="ledger-", ignore_cleanup_errors=True) as name:
        yield Path(name)


@contextmanager
def running_platform(
    data_dir: Path, config: str = "", stall_s: float | None = None
) -> Iterator[ServeProcess]:
    """The whole platform with a scripted engine; `config` adds to its file, which lies beside the folder."""
    port = find_free_port()
    data_dir.mkdir(exist_ok=True)
    file = data_dir.with_name("footplate.yaml")
    file.write_text(f"limits: {{lease_s: {LEASE_S}}}\n{config}")
    command = [sys.executable, "-m", "tests.chaos.ledger_stack", str(data_dir), str(port), str(file)]
    root = Path(__file__).parents[2]
    path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    with open(data_dir / "output", "wb") as log:
        child = subprocess.Popen(
            [*command, f"scripted:step_ms={STEP_MS}", *([] if stall_s is None else [str(stall_s)])],
            cwd=root,
            env=clean_environment(PYTHONPATH=path),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    process = ServeProcess(data_dir, f"http://127.0.0.1:{port}", child)
    try:
        wait_until(lambda: process.has_said("ready: ") or child.poll() is not None, START_S, every_s=0.1)
        assert process.has_said("ready: "), (data_dir / "output").read_text(errors="replace")[-3000:]
        yield process
    finally:
        process.stop()


def is_settled(served: ServeProcess) -> bool:
    """Whether nothing is held, nothing waits, and every journal is in the database."""
    return not unsettled(served)


def unsettled(served: ServeProcess) -> list[str]:
    """What is still held or waits, in words."""
    try:
        with served.http() as http:
            modes = http.get("/readyz").json()["dependencies"]
    except (httpx.TransportError, KeyError):
        return ["no answer of /readyz"]
    lines = served.metrics().splitlines()
    values = {line.split(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line[:1] != "#"}
    waiting = (
        "footplate_reservations_open",
        "footplate_reservations_unsent",
        "footplate_usage_events_waiting",
    )
    paths = RunPaths.of(served.data_dir)
    found = [name for name in waiting if values.get(name) != 0]
    if modes["usage"]["mode"] != "database":
        found.append("events go elsewhere than to the database")
    found += [str(path) for path in paths.usage_journal_dir.rglob("*.log")]
    return found or [name.decode() for name in leases(paths)]


def leases(paths: RunPaths) -> list[bytes]:
    """What Valkey still holds of requests."""
    import redis

    with redis.Redis.from_url(f"unix://{paths.valkey_socket}") as client:
        keys = [key for pattern in ("*:leases", "*:lost", "*:note:*") for key in client.keys(pattern)]
    return keys


@dataclass(frozen=True)
class Row:
    """A request in the ledger."""

    name: str
    state: str
    is_estimated: bool
    num_input: int
    num_output: int

    def fault(self, tokens: ProducedTokens, seen: Seen | None) -> str | None:
        """What contradicts the engines' journal, or what its client saw."""
        is_exact = not self.is_estimated and self.state != FAILED
        # An engine that is killed may not have heard how much of an answer counts; its client has.
        is_told_by_client = seen is not None and seen.is_whole and self.num_output == seen.num_tokens
        is_unheard = tokens.is_cut_off and is_told_by_client
        if is_exact and self.num_output != tokens.num_delivered and not is_unheard:
            return "it is not what the engine delivered"
        if self.num_output > tokens.num_produced:
            return "it is more than the engine made"
        # A gateway may be killed between an answer's last byte and its event.
        if seen is not None and seen.is_whole and self.state != LOST and self.num_output != seen.num_tokens:
            return "it is not what its client has"
        if seen is not None and self.state == LOST and self.num_output < seen.num_tokens - MAX_UNSETTLED:
            return "more than a second of its stream is missing"
        return None


def audit(served: ServeProcess, load: Load, before: Callable[[OpenBooks], None] | None = None) -> str:
    """Wait until all is settled, then hold the whole ledger against engines and clients; what it found."""
    assert wait_until(lambda: is_settled(served), SETTLE_S, every_s=0.5), unsettled(served)
    paths = RunPaths.of(served.data_dir)
    with open_books(EmbeddedPostgres(paths).url) as books:
        books.clock.now = max(at for (at,) in books.rows("select max(effective_at) from billing.events"))  # type: ignore[type-var,assignment]
        if before is not None:
            before(books)
        return compare(books, read_journals(paths.engine_journal_dir), load)


def compare(books: OpenBooks, journal: dict[str, ProducedTokens], load: Load) -> str:
    """Every row against what the engines wrote down and what the clients saw; what differs must say why."""
    rows = books.rows(
        """select e.event_id, coalesce(r.state, e.state), coalesce(r.is_estimated, e.is_estimated),
                  coalesce(r.input_uncached, e.input_uncached), coalesce(r.output, e.output),
                  (select sum(amount) from billing.entries n
                   where n.event_seq = e.seq and n.account = 'tenant')
           from billing.events e left join billing.recounts r on r.event_seq = e.seq"""
    )
    prices = packaged_prices().models[ModelName(MODEL)]
    made = {name.rpartition("-")[0]: tokens for name, tokens in journal.items()}
    states: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    faults = []
    for name, state, is_estimated, num_input, num_output, amount in rows:
        row = Row(str(name), str(state), bool(is_estimated), int(str(num_input)), int(str(num_output)))
        states[f"{state}{' (estimated)' if is_estimated else ''}"] += 1
        tokens, seen = made.pop(row.name, None), load.seen.get(row.name)
        if int(str(amount or 0)) != row.num_input * prices.input + row.num_output * prices.output:
            faults.append((row, "its amount is not its tokens' price"))
        if tokens is None:
            # Its gateway was killed before any engine had it: the reaper can't know, and nobody got a token.
            states["begun by no engine"] += 1
            tokens = ProducedTokens(row.name, [], [])
            if row.state != LOST:
                faults.append((row, "no engine has made anything of it"))
        totals["ledger"] += row.num_output
        totals["delivered"] += tokens.num_delivered
        totals["discarded"] += tokens.num_discarded
        if not is_estimated and state != FAILED:
            totals["exact"] += row.num_output
        fault = row.fault(tokens, seen)
        if fault is not None:
            faults.append((row, f"{fault}: {tokens}, {seen}"))
    assert not faults, (load.seed, len(faults), faults[:10])
    recorded = {str(row[0]) for row in rows}
    # Whoever was told that an answer begins is in the ledger; and none of the others got a token.
    assert set(load.seen) <= recorded, (load.seed, set(load.seen) - recorded)
    assert not set(made) & set(load.seen)
    assert totals["exact"] > 0
    return f"rows {dict(states)}; tokens {dict(totals)}; begun by no row: {len(made)} requests"
