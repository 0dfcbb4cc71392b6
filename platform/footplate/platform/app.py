"""The HTTP application: every route, wrapped by the edge."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

import footplate.platform.http.health as health
from footplate.platform.http import chat, completions, metrics, models, tokens
from footplate.platform.http.edge import MAX_BODY_BYTES, MAX_BODY_SECONDS, MAX_STALL_SECONDS, Edge
from footplate.platform.http.errors import api_error
from footplate.platform.http.gateway import Gateway
from footplate.platform.http.health import Readiness, ReadinessCheck
from footplate.platform.http.schemas import (
    ChatCompletionBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from footplate.platform.metrics import GatewayMetrics
from footplate.platform.models import PipelineProvider
from footplate.platform.ports import Authenticator, InferenceClient
from footplate.platform.settings import Settings

_Endpoint = Callable[[Gateway, Request], Awaitable[Response]]


def create_app(
    settings: Settings,
    client: InferenceClient,
    authenticator: Authenticator,
    pipelines: PipelineProvider,
    readiness: Mapping[str, ReadinessCheck] | None = None,
    max_body_bytes: int = MAX_BODY_BYTES,
    max_body_s: float = MAX_BODY_SECONDS,
    max_stall_s: float = MAX_STALL_SECONDS,
) -> FastAPI:
    """The gateway's ASGI application. Starts nothing and owns nothing: its parts are the caller's to close.

    `readiness` adds dependencies to `/readyz`, by name; the engines are there anyway.
    """
    gateway = Gateway(client, authenticator, pipelines, GatewayMetrics(client.stats))
    app = FastAPI(
        title="Footplate",
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        middleware=[
            Middleware(Edge, max_body_bytes=max_body_bytes, max_body_s=max_body_s, max_stall_s=max_stall_s)
        ],
        exception_handlers={HTTPException: _framework_error},
        redirect_slashes=False,
    )
    _add_posts(app, gateway)
    _add_reads(app, gateway, {"engines": _engines_check(client), **(readiness or {})})
    if settings.telemetry.prometheus:
        _add_get(app, "/metrics", _bound(gateway, metrics.show_metrics), "show_metrics")
    return app


def _add_posts(app: FastAPI, gateway: Gateway) -> None:
    routes: tuple[tuple[str, _Endpoint, type[BaseModel]], ...] = (
        ("/v1/chat/completions", chat.create_chat_completion, ChatCompletionBody),
        ("/v1/completions", completions.create_completion, CompletionBody),
        ("/v1/tokenize", tokens.tokenize, TokenizeBody),
        ("/v1/detokenize", tokens.detokenize, DetokenizeBody),
    )
    for path, endpoint, body in routes:
        # The endpoints read the body themselves, in one pass and after the key; the schema is for readers.
        extra = {
            "requestBody": {"required": True, "content": {"application/json": {"schema": _schema(body)}}}
        }
        app.add_api_route(
            path, _bound(gateway, endpoint), methods=["POST"], openapi_extra=extra, name=endpoint.__name__
        )


def _add_reads(app: FastAPI, gateway: Gateway, checks: Mapping[str, ReadinessCheck]) -> None:
    async def show_model(request: Request, model_id: str) -> Response:
        return await models.show_model(gateway, request, model_id)

    async def readyz() -> Response:
        return await health.readyz(checks)

    app.add_api_route("/v1/models", _bound(gateway, models.list_models), methods=["GET"], name="list_models")
    app.add_api_route("/v1/models/{model_id:path}", show_model, methods=["GET"])

    async def show_schema(request: Request) -> Response:
        await gateway.authenticate(request, roles=None)
        return JSONResponse(app.openapi())

    app.add_api_route("/openapi.json", show_schema, methods=["GET"], include_in_schema=False)
    _add_get(app, "/healthz", health.healthz, "healthz")
    _add_get(app, "/readyz", readyz, "readyz")


def _add_get(app: FastAPI, path: str, endpoint: Callable[..., Any], name: str) -> None:
    """A GET that probes may also ask for with HEAD."""
    app.add_api_route(path, endpoint, methods=["GET"], name=name)
    app.add_api_route(path, endpoint, methods=["HEAD"], name=f"{name}_head", include_in_schema=False)


def _bound(gateway: Gateway, endpoint: _Endpoint) -> Callable[[Request], Awaitable[Response]]:
    async def bound(request: Request) -> Response:
        try:
            return await endpoint(gateway, request)
        except ClientDisconnect:
            return Response(status_code=400)  # nobody is there to read it

    return bound


def _schema(body: type[BaseModel]) -> dict[str, Any]:
    """A body's schema with its definitions in place: OpenAPI looks for references elsewhere."""
    schema = body.model_json_schema()
    definitions = schema.pop("$defs", {})

    def inlined(value: Any) -> Any:
        if isinstance(value, dict):
            reference = value.get("$ref")
            if reference is not None:
                return inlined(definitions[reference.rsplit("/", 1)[1]])
            return {key: inlined(inner) for key, inner in value.items()}
        return [inlined(inner) for inner in value] if isinstance(value, list) else value

    result: dict[str, Any] = inlined(schema)
    return result


async def _framework_error(_: Request, error: Exception) -> Response:
    return api_error(error).response()


def _engines_check(client: InferenceClient) -> ReadinessCheck:
    async def check() -> Readiness:
        has_models = bool(client.models())
        return Readiness(has_models, "serving" if has_models else "starting")

    return check
