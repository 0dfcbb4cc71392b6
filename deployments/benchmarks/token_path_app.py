"""The benchmark's app and its naive rival: tokens through a plain streaming handle, one item per token."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from ray import serve

from footplate.deployments import platform_app
from footplate.deployments.engine_port import ReplicaEngine
from footplate.deployments.scripted_engine import ScriptedEngine
from footplate.deployments.specs import GatewaySpec
from footplate.engine.config import EngineConfig
from footplate.engine.types import EngineRequest, SamplingParams
from footplate.platform.ports import InferenceClient

NAIVE_APPLICATION = "naive"


class NaiveEngine:
    """What one writes first with Ray Serve: an async generator of tokens behind a handle."""

    async def stream(self, num_tokens: int, step_ms: float) -> AsyncIterator[dict[str, int]]:
        """Yield `num_tokens` items, one every `step_ms`; all streams of the replica share the loop."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        for number in range(num_tokens):
            due += step_ms / 1000
            await asyncio.sleep(max(0.0, due - loop.time()))
            yield {"id": 300 + number % 512, "index": 0}


def naive_application() -> serve.Application:
    """The naive engine as a Serve application without a route."""
    deployment = serve.deployment(name="Naive", max_ongoing_requests=1000, ray_actor_options={"num_cpus": 0})
    return deployment(NaiveEngine).bind()


def load_paced(source: str, config: EngineConfig, **options: Any) -> ReplicaEngine:
    """A scripted engine under a real model's source, so that the gateway detokenises with its tokenizer."""
    return ScriptedEngine.load("scripted:step_ms=2,max_model_len=100000", config, **options)


def load_quick(source: str, config: EngineConfig, **options: Any) -> ReplicaEngine:
    """As `load_paced`, a step each millisecond."""
    return ScriptedEngine.load("scripted:step_ms=1,max_model_len=100000", config, **options)


def load_unpaced(source: str, config: EngineConfig, **options: Any) -> ReplicaEngine:
    """As `load_paced`, as fast as the thread can step."""
    return ScriptedEngine.load("scripted:step_ms=0,max_model_len=100000", config, **options)


async def build(spec: GatewaySpec, client: InferenceClient) -> Any:
    """The app for one gateway replica; `/v1` is the platform's own."""
    return TokenPathApp(client, await platform_app.build(spec, client))


class TokenPathApp:
    """`POST /channel` and `POST /naive` with model, num_tokens and step_ms; one SSE event per token."""

    def __init__(self, client: InferenceClient, platform: Any) -> None:
        self._client = client
        self._platform = platform
        self._num_requests = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
            return
        if scope["path"].startswith("/v1"):
            await self._platform(scope, receive, send)
            return
        if scope["path"] == "/models":
            await self._answer(send, json.dumps(sorted(self._client.models())).encode())
            return
        body = json.loads((await receive())["body"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await (self._naive if scope["path"] == "/naive" else self._channel)(body, send)
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def _channel(self, body: dict[str, Any], send: Any) -> None:
        self._num_requests += 1
        params = SamplingParams(max_tokens=body["num_tokens"])
        request = EngineRequest(f"bench-{self._num_requests}", (1, 2, 3), params)
        generation = await self._client.submit(body["model"], request)
        try:
            while batch := await generation.next():
                events = b"".join(
                    b'data: {"id": %d, "index": %d}\n\n' % (t, d.index) for d in batch for t in d.token_ids
                )
                await send({"type": "http.response.body", "body": events, "more_body": True})
        finally:
            await generation.close()

    async def _naive(self, body: dict[str, Any], send: Any) -> None:
        handle = serve.get_deployment_handle("Naive", app_name=NAIVE_APPLICATION)
        response = handle.options(method_name="stream", stream=True).remote(
            body["num_tokens"], body["step_ms"]
        )
        async for token in response:
            event = b'data: {"id": %d, "index": %d}\n\n' % (token["id"], token["index"])
            await send({"type": "http.response.body", "body": event, "more_body": True})

    async def _answer(self, send: Any, payload: bytes) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"content-type", b"application/json")],
            }
        )
        await send({"type": "http.response.body", "body": payload})
