"""What a batch does to those who wait for answers: their first tokens with one running and without, in turn.

    python deployments/benchmarks/bench_batch_interference.py [--rounds 5] [--requests 20] [--output FILE]

Starts `footplate serve` with the packaged model in a folder of its own. Each round measures streams of one
client without a batch, then beside one of 200 lines that began before, and ends that one; prompts are of new
tokens each, so that nothing comes from a cache. Rounds alternate, so that other work on the machine meets
both alike. At the end a whole batch of 200 lines runs beside the same traffic, to its end.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from footplate.deployments.ports import find_free_port

RESULTS = Path(__file__).parent / "results"
MODEL = "smollm2-135m"
NUM_LINES = 200
TO_REACH = 1.2
LINE_PROMPT, LINE_OUTPUT = 64, 48
PROMPT, OUTPUT = 128, 16
PAUSE_S = 0.1
START_S, BATCH_S = 180.0, 900.0


@dataclass(frozen=True, slots=True)
class Platform:
    """A running platform."""

    url: str
    key: str

    def http(self) -> httpx.Client:
        """A client with the tenant's key."""
        return httpx.Client(
            base_url=f"{self.url}/v1",
            headers={"authorization": f"Bearer {self.key}"},
            timeout=120,
            trust_env=False,
        )


def first_token_s(http: httpx.Client, rng: random.Random) -> float:
    """How long a stream's first token takes."""
    body = {
        "model": MODEL,
        "prompt": [rng.randrange(1_000, 40_000) for _ in range(PROMPT)],
        "max_tokens": OUTPUT,
        "ignore_eos": True,
        "stream": True,
    }
    sent = time.perf_counter()
    first = 0.0
    with http.stream("POST", "/completions", json=body) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if not first and line.startswith("data: {"):
                first = time.perf_counter() - sent
    return first


def traffic(http: httpx.Client, rng: random.Random, is_on: Callable[[int], bool]) -> list[float]:
    """One request after the other, as long as it is wanted."""
    found: list[float] = []
    while is_on(len(found)):
        found.append(first_token_s(http, rng))
        time.sleep(PAUSE_S)
    return found


def begin_batch(http: httpx.Client, rng: random.Random) -> str:
    """Start a batch, and wait until it runs."""
    lines = []
    for number in range(NUM_LINES):
        prompt = [rng.randrange(1_000, 40_000) for _ in range(LINE_PROMPT)]
        body = {"model": MODEL, "prompt": prompt, "max_tokens": LINE_OUTPUT, "ignore_eos": True}
        fields = {"custom_id": f"{number}", "method": "POST", "url": "/v1/completions", "body": body}
        lines.append(json.dumps(fields))
    file = http.post(
        "/files", files={"file": ("lines.jsonl", "\n".join(lines))}, data={"purpose": "batch"}
    ).raise_for_status()
    body = {
        "input_file_id": file.json()["id"],
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    }
    batch: str = http.post("/batches", json=body).raise_for_status().json()["id"]
    await_batch(http, batch, lambda found: found["request_counts"]["completed"] >= 1)
    return batch


def await_batch(http: httpx.Client, batch: str, is_right: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Poll until a batch is as it should be."""
    deadline = time.monotonic() + BATCH_S
    while time.monotonic() < deadline:
        found: dict[str, Any] = http.get(f"/batches/{batch}").raise_for_status().json()
        if is_right(found):
            return found
        time.sleep(0.1)
    raise SystemExit(f"the batch stands at {found['status']} after {BATCH_S:.0f} s")


def measure_round(http: httpx.Client, rng: random.Random, num_requests: int) -> dict[str, Any]:
    """Both, one after the other."""
    without = traffic(http, rng, lambda count: count < num_requests)
    batch = begin_batch(http, rng)
    beside = traffic(http, rng, lambda count: count < num_requests)
    done = http.get(f"/batches/{batch}").json()["request_counts"]["completed"]
    http.post(f"/batches/{batch}/cancel").raise_for_status()
    await_batch(http, batch, lambda found: found["status"] in ("cancelled", "completed"))
    medians = statistics.median(without), statistics.median(beside)
    return {
        "without_ms": _spread(without),
        "beside_ms": _spread(beside),
        "ratio_of_medians": round(medians[1] / medians[0], 3),
        "lines_done_meanwhile": done,
        "first_tokens": {"without": without, "beside": beside},
    }


def run_whole(http: httpx.Client, rng: random.Random) -> dict[str, Any]:
    """All 200 lines beside the traffic, to the end."""
    began = time.monotonic()
    batch = begin_batch(http, rng)
    ended: list[dict[str, Any]] = []

    def is_on(_: int) -> bool:
        found = http.get(f"/batches/{batch}").json()
        if found["status"] == "completed":
            ended.append(found)
        return not ended

    beside = traffic(http, rng, is_on)
    return {
        "lines": ended[0]["request_counts"],
        "took_s": round(time.monotonic() - began, 1),
        "usage": ended[0]["usage"],
        "requests_beside": len(beside),
        "beside_ms": _spread(beside),
    }


def _spread(found: list[float]) -> dict[str, float]:
    ordered = sorted(each * 1000 for each in found)
    return {
        "median": round(statistics.median(ordered), 2),
        "least": round(ordered[0], 2),
        "p90": round(ordered[int(0.9 * (len(ordered) - 1))], 2),
        "most": round(ordered[-1], 2),
    }


def measure(served: Platform, rounds: int, num_requests: int) -> dict[str, Any]:
    """All rounds, and what they come to."""
    rng = random.Random(7)
    with served.http() as http:
        traffic(http, rng, lambda count: count < 10)  # to be warm
        found = []
        for number in range(rounds):
            one = measure_round(http, rng, num_requests)
            found.append(one)
            print(
                f"round {number + 1}: {one['without_ms']['median']} ms without, "
                f"{one['beside_ms']['median']} ms "
                f"beside, {one['ratio_of_medians']} x, {one['lines_done_meanwhile']} lines done",
                flush=True,
            )
        whole = run_whole(http, rng)
    firsts = [one.pop("first_tokens") for one in found]
    without, beside = ([each for one in firsts for each in one[kind]] for kind in ("without", "beside"))
    ratio = statistics.median(beside) / statistics.median(without)
    return {
        "rounds": found,
        "without_ms": _spread(without),
        "beside_ms": _spread(beside),
        "ratio_of_medians": round(ratio, 3),
        "ratios_of_rounds": sorted(one["ratio_of_medians"] for one in found),
        "to_reach": TO_REACH,
        "is_reached": ratio <= TO_REACH,
        "whole_batch": whole,
    }


def serve(data_dir: Path) -> tuple[subprocess.Popen[bytes], Platform]:
    """A platform of its own, once it answers."""
    port = find_free_port()
    command = Path(sys.executable).with_name("footplate")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FOOTPLATE_")}
    output = data_dir / "output"
    with open(output, "wb") as log:
        child = subprocess.Popen(
            [str(command), "serve", "--port", str(port), "--data-dir", str(data_dir)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    deadline = time.monotonic() + START_S
    while f"ready: http://127.0.0.1:{port}" not in output.read_text(errors="replace"):
        if child.poll() is not None or time.monotonic() > deadline:
            stop(child)
            raise SystemExit(f"footplate serve did not start: {output.read_text(errors='replace')[-2000:]}")
        time.sleep(0.1)
    key = (data_dir / "keys" / "tenant.key").read_text().strip()
    return child, Platform(f"http://127.0.0.1:{port}", key)


def stop(child: subprocess.Popen[bytes]) -> None:
    """End it in order, or at all."""
    if child.poll() is None:
        child.send_signal(signal.SIGTERM)
    try:
        child.wait(30)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=20, help="of each kind in each round")
    parser.add_argument("--output", type=Path, default=RESULTS / "batch_interference.json")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="footplate-batch-"))
    load = os.getloadavg()[0]
    try:
        child, served = serve(folder)
        try:
            found = measure(served, arguments.rounds, arguments.requests)
        finally:
            stop(child)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    result = {
        "commit": _commit(),
        "hardware": f"{_processor()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "load_1min_before": round(load, 2),
        "lines": {"number": NUM_LINES, "prompt_tokens": LINE_PROMPT, "output_tokens": LINE_OUTPUT},
        "interactive": {"prompt_tokens": PROMPT, "output_tokens": OUTPUT, "pause_s": PAUSE_S},
        **found,
    }
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    spread = f"{result['ratios_of_rounds'][0]} to {result['ratios_of_rounds'][-1]}"
    print(
        f"median first token: {result['without_ms']['median']} ms without a batch, "
        f"{result['beside_ms']['median']} ms beside one: {result['ratio_of_medians']} x ({spread} by round)"
    )


def _commit() -> str:
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return found.stdout.strip()


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown"
    )


if __name__ == "__main__":
    main()
