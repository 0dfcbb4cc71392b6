"""Processes of a running platform are killed at random under load; all of it must come back.

CHAOS_ROUNDS sets the number of kills, CHAOS_SEED repeats a run.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from footplate.deployments.leftovers import is_alive, postmaster_pid, send_signal, wait_until
from footplate.deployments.run_paths import RunPaths
from tests.e2e.serve_process import SMALL, ServeProcess

ROUNDS = int(os.environ.get("CHAOS_ROUNDS", "20"))
SEED = int(os.environ.get("CHAOS_SEED", "0")) or secrets.randbelow(2**31)
NUM_CLIENTS = 3
# A request waits up to 30 s for a replica, and then for its turn on a busy machine.
HANG_S = 60.0
RECOVER_S = 60.0
IDLE_S = 20.0
TOKENS = 48


def postgres(served: ServeProcess) -> list[int]:
    pid = postmaster_pid(RunPaths.of(served.data_dir).postgres_dir)
    return [pid] if pid else []


VICTIMS: dict[str, Callable[[ServeProcess], list[int]]] = {
    "engine": ServeProcess.engine_pids,
    "gateway": ServeProcess.gateway_pids,
    "haproxy": lambda served: served.pids("bin/haproxy "),
    "valkey": lambda served: served.pids("valkey-server "),
    "postgres": postgres,
}


@dataclass
class Load:
    """Clients that ask for one stream after another, and how each of their streams ended."""

    served: ServeProcess
    ends: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self) -> None:
        for number in range(NUM_CLIENTS):
            thread = threading.Thread(target=self._run, args=(number,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """Let the open streams end; every client must come home."""
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=2 * HANG_S)
            assert not thread.is_alive(), "a stream never ended"

    def _run(self, number: int) -> None:
        body = {"model": SMALL, "prompt": f"Client {number}:", "max_tokens": TOKENS, "ignore_eos": True}
        while not self._stop.is_set():
            began = time.monotonic()
            try:
                with self.served.http(timeout_s=HANG_S) as http:
                    self.ends[self._ask(http, {**body, "stream": True})] += 1
            except httpx.TimeoutException:
                self.faults.append(
                    f"a stream was silent for {HANG_S} s, {time.monotonic() - began:.0f} s in all"
                )
            except httpx.TransportError:
                # Refused or cut connections: the client knows that its answer is not complete.
                self.ends["connection lost"] += 1
                self._stop.wait(0.05)

    def _ask(self, http: httpx.Client, body: dict[str, object]) -> str:
        with http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                text = answer.read()
                # Where no gateway is left to answer, the proxy's own 500 and 503 have another shape.
                if answer.status_code not in (500, 503):
                    self.faults.append(f"status {answer.status_code}: {text[:200]!r}")
                self._stop.wait(0.05)
                return f"refused with {answer.status_code}"
            events = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
        if events[-1:] != ["[DONE]"]:
            self.faults.append(f"a stream ended without [DONE] after {len(events)} events")
            return "cut"
        last = json.loads(events[-2])
        if "error" in last:
            return "error event"
        if last["choices"][0]["finish_reason"] != "length":
            self.faults.append(f"a stream ended with {last['choices'][0]['finish_reason']}")
        return "complete"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ServeProcess]:
    process = ServeProcess.launch(tmp_path / "data")
    try:
        yield process
    finally:
        # No orphan may be left: this looks for every process that carries the run's mark.
        process.stop()


def test_everything_recovers_from_random_kills(
    served: ServeProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    load = Load(served)
    load.start()
    served.await_running()
    try:
        for number, (name, victim) in enumerate(kills()):
            took_s = kill_and_recover(served, name, victim)
            with capsys.disabled():
                print(
                    f"round {number + 1}/{ROUNDS} (CHAOS_SEED={SEED}): {name}, back after {took_s:.1f} s",
                    flush=True,
                )
            assert not load.faults, (SEED, load.faults)
    finally:
        load.stop()
    with capsys.disabled():
        print(f"streams: {dict(load.ends)}")
    assert not load.faults, (SEED, load.faults)
    assert load.ends["complete"] > 0
    served.await_idle(IDLE_S)
    for name, find in VICTIMS.items():
        assert wait_until(lambda find=find: len(find(served)) == 1, 10), (SEED, name, find(served))


def kills() -> Iterator[tuple[str, random.Random]]:
    """Kinds of process to kill; each comes once before any comes again."""
    rng = random.Random(SEED)
    left: list[str] = []
    for _ in range(ROUNDS):
        left = left or rng.sample(sorted(VICTIMS), len(VICTIMS))
        yield left.pop(), rng


def kill_and_recover(served: ServeProcess, name: str, rng: random.Random) -> float:
    """Kill one process of a kind and wait until another stands in its place and a request is answered."""
    pid = rng.choice(VICTIMS[name](served))
    assert send_signal(pid, signal.SIGKILL)
    killed_at = time.monotonic()

    def has_recovered() -> bool:
        found = VICTIMS[name](served)
        return bool(found) and pid not in found and not is_alive(pid) and answers(served)

    assert wait_until(has_recovered, RECOVER_S, every_s=0.1), (SEED, name, served.processes())
    return time.monotonic() - killed_at


def answers(served: ServeProcess) -> bool:
    """Whether all dependencies are ready and a completion comes back whole."""
    body = {"model": SMALL, "prompt": "Hello", "max_tokens": 2, "ignore_eos": True}
    try:
        with served.http(timeout_s=RECOVER_S) as http:
            return (
                http.get("/readyz").status_code == 200
                and http.post("/v1/completions", json=body).status_code == 200
            )
    except httpx.TransportError:
        return False
