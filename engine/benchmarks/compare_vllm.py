"""Footplate and vLLM on one GPU, in one call, in turn: dummy weights, exact public shapes, fixed loads.

    python engine/benchmarks/compare_vllm.py --peer-python PATH [--peer-env FILE] [--models DIR]
           [--names l8b,l1b] [--parts single,decode,prefill,mixed,prefix] [--out FILE] [--seconds 900]

DIR holds one folder with a config.json a model; benchmarks/models has those of Llama-3.1-8B and Llama-3.2-1B.
Both engines are resident, each with 0.45 of the memory, and answer the same prompts in the order A B A B; a
row's ratio is that of the medians. --peer-python is the Python of an environment that has vLLM, --peer-env a
shell file to source before, where it needs variables. `--peer-python none` runs Footplate alone.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent.parent))
from engine.benchmarks.record import RESULTS, environment, spread
from footplate.engine.bench.workloads import mixed_lengths

HERE = Path(__file__).parent
SHARE = "0.45"
SMALL_BATCHES, LARGE_BATCHES = (1, 32, 256), (8, 32, 128, 256)


class Engine:
    """A worker process; idle unless asked."""

    def __init__(self, name: str, command: str, log: Path) -> None:
        self.name = name
        self._process = subprocess.Popen(
            ["bash", "-c", command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=open(log, "wb"),
            text=True,
        )
        self.facts: dict[str, Any] = {}

    def wait(self) -> None:
        self.facts = self._read()

    def ask(self, load: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(load) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise RuntimeError(f"{self.name} has ended with {self._process.wait()}")

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()


@dataclass
class Row:
    """One line of the table: how to measure it, and whether a smaller value is better."""

    name: str
    unit: str
    measure: Callable[[Engine, int], float]
    rounds: int = 2
    is_time: bool = True


def _wall(engine: Engine, load: dict[str, Any], seed: int) -> float:
    answer = engine.ask(load | {"seed": seed})
    if "error" in answer:
        raise RuntimeError(f"{engine.name}: {answer['error']}")
    if "host_ms_a_step" in answer:
        engine.facts["compiled_while_serving"] = answer["compiled"]
        engine.facts.setdefault("host_ms_a_step", {})[load["kind"] + str(load.get("batch", ""))] = round(
            answer["host_ms_a_step"], 3
        )
    return float(answer["wall"])


def _step_ms(load: dict[str, Any]) -> Callable[[Engine, int], float]:
    """Milliseconds a token: the time of 256 less the time of the first, over 255."""

    def measure(engine: Engine, seed: int) -> float:
        first = _wall(engine, load | {"out": 1}, seed)
        return 1000 * (_wall(engine, load | {"out": 256}, seed + 500_000) - first) / 255

    return measure


def _rate(load: dict[str, Any], out_tokens: int) -> Callable[[Engine, int], float]:
    return lambda engine, seed: out_tokens / _wall(engine, load, seed)


def rows(parts: list[str], batches: tuple[int, ...], rounds_of_long: int) -> Iterator[Row]:
    if "single" in parts:
        yield Row("single", "ms a token", _step_ms({"kind": "single"}), 3)
    if "decode" in parts:
        for batch in batches:
            if batch > 1:
                rounds = 2 if batch < 128 else 1
                yield Row(
                    f"decode {batch}", "ms a step", _step_ms({"kind": "decode", "batch": batch}), rounds
                )
    if "prefill" in parts:
        for length in (8192, 32768):
            load = {"kind": "prefill", "length": length}
            yield Row(f"prefill {length}", "ms", lambda e, s, load=load: 1000 * _wall(e, load, s), 2)
    if "mixed" in parts:
        total = sum(o for _, o in mixed_lengths())
        yield Row("mixed", "output tokens/s", _rate({"kind": "mixed"}, total), rounds_of_long, False)
    if "prefix" in parts:
        cold = {"kind": "prefix"}
        yield Row("prefix cold", "output tokens/s", _rate(cold, 1024 * 64), rounds_of_long, False)
        warm = cold | {"shared_seed": 9_000}
        yield Row("prefix warm", "output tokens/s", _rate(warm, 1024 * 64), rounds_of_long + 1, False)


def compare(engines: list[Engine], table: Iterator[Row], deadline: float) -> Iterator[dict[str, Any]]:
    """Measure each row on each engine in turn."""
    seed = 1000
    for row in table:
        if time.monotonic() > deadline:
            print(f"{row.name}: skipped, no time left", flush=True)
            continue
        values: dict[str, list[float]] = {e.name: [] for e in engines}
        start = time.monotonic()
        for turn in range(row.rounds):
            seed += 10
            if turn and time.monotonic() + (time.monotonic() - start) / turn > deadline + 20:
                break
            for engine in engines:
                try:
                    values[engine.name].append(row.measure(engine, seed))
                except (RuntimeError, OSError) as error:
                    print(f"{row.name}: {error}", flush=True)
        kept = {name: found for name, found in values.items() if found}
        if row.name == "prefix warm":  # the first turn made it warm
            kept = {name: found[1:] or found for name, found in kept.items()}
        yield _row(row, {name: spread(found) for name, found in kept.items()})


def _row(row: Row, found: dict[str, dict[str, float]]) -> dict[str, Any]:
    out: dict[str, Any] = {"workload": row.name, "unit": row.unit, "spread": found}
    out["ours"] = found.get("footplate", {}).get("median")
    out["vllm"] = found.get("vllm", {}).get("median")
    if out["ours"] and out["vllm"]:
        ratio = out["vllm"] / out["ours"] if row.is_time else out["ours"] / out["vllm"]
        out["ratio"] = round(ratio, 3)
    print(
        f"  {row.name:14s} ours {out['ours']} vllm {out['vllm']} {row.unit}  {out.get('ratio')}x", flush=True
    )
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", type=Path, default=HERE / "models")
    parser.add_argument("--names", default="l8b,l1b")
    parser.add_argument("--parts", default="single,decode,prefill,mixed,prefix")
    parser.add_argument("--small-parts", default="single,decode")
    parser.add_argument("--peer-python", default="python3")
    parser.add_argument("--peer-env", type=Path)
    parser.add_argument("--options", default="{}")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=900)
    parser.add_argument(
        "--small-seconds", type=float, default=120, help="kept for the models after the first"
    )
    parser.add_argument("--rounds-of-long", type=int, default=2, help="of rows that take a minute")
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    out = options.out or RESULTS / f"vllm_{datetime.date.today():%Y-%m-%d}.json"
    result = environment() | {"command": "compare_vllm.py " + shlex.join(sys.argv[1:]), "models": {}}
    result |= _gpu()
    for name in options.names.split(","):
        folder = options.models / name
        print(f"== {name}", flush=True)
        commands = {"footplate": _ours(folder, options.options)}
        if options.peer_python != "none":
            commands["vllm"] = _peer(folder, options)
        engines = []
        # One after the other: both look at how much memory is free.
        for engine_name, command in commands.items():
            engine = Engine(engine_name, command, out.parent / f"{name}_{engine_name}.log")
            engine.wait()
            engines.append(engine)
            print(f"  {engine.facts}", flush=True)
        is_large = "8b" in name
        parts = (options.parts if is_large else options.small_parts).split(",")
        table = rows(parts, LARGE_BATCHES if is_large else SMALL_BATCHES, options.rounds_of_long)
        found = []
        kept = 0.0 if name == options.names.split(",")[-1] else options.small_seconds
        for row in compare(engines, table, deadline - 10 - kept):
            found.append(row)
            result["models"][name] = {"start": [e.facts for e in engines], "rows": found}
            result["models"][name]["ratios"] = {r["workload"]: r.get("ratio") for r in found}
            out.write_text(json.dumps(result, indent=1) + "\n")
        for engine in engines:
            shown = {k: engine.facts.get(k) for k in ("host_ms_a_step", "compiled_while_serving")}
            print(f"  {engine.name} {shown}", flush=True)
            engine.end()
    print(out)


def _ours(folder: Path, options: str) -> str:
    worker = HERE / "footplate_worker.py"
    return "exec " + shlex.join([sys.executable, str(worker), str(folder), SHARE, options])


def _peer(folder: Path, options: argparse.Namespace) -> str:
    source = f". {shlex.quote(str(options.peer_env))}; " if options.peer_env else ""
    worker = shlex.quote(str(HERE / "vllm_worker.py"))
    return f"{source}exec {options.peer_python} {worker} {shlex.quote(str(folder))} {SHARE}"


def _gpu() -> dict[str, Any]:
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        found = "none"
    return {"gpu": found, "host_cores": os.cpu_count()}


if __name__ == "__main__":
    main()
