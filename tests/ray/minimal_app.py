"""The smallest app over the inference client: raw ASGI, one SSE event per token, errors before headers.

It stands in for the platform's app where the subject is the road of the tokens.
"""

from __future__ import annotations

import json
import uuid
from typing import Any

from footplate.deployments.specs import GatewaySpec
from footplate.engine.errors import EngineDead, EngineOverloaded, InvalidRequest
from footplate.engine.types import EngineRequest, SamplingParams
from footplate.platform.ports import InferenceClient

STATUS_OF = {InvalidRequest: 400, EngineOverloaded: 429, EngineDead: 503}


async def build(spec: GatewaySpec, client: InferenceClient) -> Any:
    """The app for one gateway replica."""
    return MinimalApp(client)


class MinimalApp:
    """`POST /generate` with model, prompt (ids), max_tokens and n; `GET /models` and `GET /stats`."""

    def __init__(self, client: InferenceClient) -> None:
        self._client = client

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["path"] == "/models":
            await answer(send, 200, sorted(self._client.models()))
        elif scope["path"] == "/stats":
            stats = {
                f"{m}/{e}": [s.running, s.steps, dict(s.finished), s.prefix_queries, s.prefix_hits]
                for (m, e), s in self._client.stats().items()
            }
            await answer(send, 200, stats)
        else:
            body = b""
            while True:
                message = await receive()
                body += message.get("body", b"")
                if not message.get("more_body"):
                    break
            await self._generate(json.loads(body), receive, send)

    async def _live(self, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await send({"type": "lifespan.shutdown.complete"})

    async def _generate(self, body: dict[str, Any], receive: Any, send: Any) -> None:
        params = SamplingParams(max_tokens=body.get("max_tokens", 16), n=body.get("n", 1))
        request = EngineRequest(body.get("id") or uuid.uuid4().hex, tuple(body["prompt"]), params)
        try:
            generation = await self._client.submit(body["model"], request)
        except (InvalidRequest, EngineOverloaded, EngineDead) as error:
            kind = next(kind for kind in STATUS_OF if isinstance(error, kind))
            await answer(send, STATUS_OF[kind], {"error": str(error), "type": kind.__name__})
            return
        try:
            await send(
                {"type": "http.response.start", "status": 200, "headers": [(b"x-accel-buffering", b"no")]}
            )
            while batch := await generation.next():
                events = b"".join(
                    b'data: {"id": %d, "index": %d}\n\n' % (t, d.index) for d in batch for t in d.token_ids
                )
                await send({"type": "http.response.body", "body": events, "more_body": True})
            await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})
        except EngineDead as error:
            event = json.dumps({"error": str(error)}).encode()
            await send({"type": "http.response.body", "body": b"data: " + event + b"\n\ndata: [DONE]\n\n"})
        finally:
            await generation.close()


async def answer(send: Any, status: int, body: Any) -> None:
    """One whole JSON response."""
    payload = json.dumps(body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(payload)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": payload})
