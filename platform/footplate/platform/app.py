"""The HTTP application: every route, wrapped by the edge."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

import footplate.platform.http.health as health
from footplate.platform.administration import AdminDesk
from footplate.platform.admission import Admission, local_admission
from footplate.platform.batches.desk import BatchDesk
from footplate.platform.batches.metrics import BatchMetrics
from footplate.platform.capture.recorder import CaptureRecorder
from footplate.platform.http import chat, completions, metrics, models, tokens
from footplate.platform.http.admin.endpoints import admin_routes
from footplate.platform.http.admin.exchange import answer as answer_admin
from footplate.platform.http.admin.openapi import describe, described_errors
from footplate.platform.http.batches import LINE_ENDPOINTS, add_batches
from footplate.platform.http.edge import Edge, EdgeLimits
from footplate.platform.http.errors import api_error
from footplate.platform.http.files import UPLOAD_LIMITS, add_files
from footplate.platform.http.gateway import Gateway
from footplate.platform.http.health import Readiness, ReadinessCheck
from footplate.platform.http.me import show_me
from footplate.platform.http.openapi import inlined_schema
from footplate.platform.http.schemas import (
    ChatCompletionBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from footplate.platform.http.straight_path import StraightEndpoint, StraightPath
from footplate.platform.metrics import GatewayMetrics
from footplate.platform.models import PipelineProvider
from footplate.platform.ports import Authenticator, InferenceClient
from footplate.platform.routes import cascades_of
from footplate.platform.settings import Settings
from footplate.platform.telemetry.served_names import ServedNames
from footplate.platform.telemetry.setup import Telemetry

_Endpoint = Callable[[Gateway, Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class BatchParts:
    """What the endpoints of files and batches need."""

    desk: BatchDesk
    metrics: BatchMetrics


def create_app(  # noqa: PLR0913 - the parts of a gateway, which callers name
    settings: Settings,
    client: InferenceClient,
    authenticator: Authenticator,
    pipelines: PipelineProvider,
    readiness: Mapping[str, ReadinessCheck] | None = None,
    edge: EdgeLimits | None = None,
    desk: AdminDesk | None = None,
    admission: Admission | None = None,
    telemetry: Telemetry | None = None,
    captures: CaptureRecorder | None = None,
) -> FastAPI:
    """The gateway's ASGI application. Starts nothing and owns nothing: its parts are the caller's to close.

    `readiness` adds dependencies to `/readyz`, by name; the engines are there anyway. Without a `desk` there
    are no `/admin/v1` and no `/v1/me`; without an `admission` limits are held by this process alone; without
    `telemetry` nothing is exported, without `captures` no content is kept. See `serve_batches` for
    `/v1/files` and `/v1/batches`.
    """
    admission = admission or local_admission()
    metering = admission.metering
    of_usage = () if metering is None else (metering.metrics,)
    gateway_metrics = GatewayMetrics(client.stats, admission.metrics, admission.cascades, *of_usage)
    gateway = Gateway(
        client,
        authenticator,
        pipelines,
        gateway_metrics,
        admission,
        cascades_of(settings),
        captures=captures,
    )
    telemetry = telemetry or Telemetry()
    telemetry.allowed.known_models = ServedNames(settings, client)
    gateway_metrics.allowed = telemetry.allowed
    gateway_metrics.add(gateway.genai)
    if captures is not None:
        gateway_metrics.add(captures)
    if telemetry.exporter is not None:
        gateway_metrics.add(telemetry.exporter)
    posts: dict[str, StraightEndpoint] = {}
    app = FastAPI(
        title="Footplate",
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        middleware=[
            Middleware(Edge, limits=edge, own_limits=UPLOAD_LIMITS, tracer=telemetry.tracer),
            Middleware(StraightPath, endpoints=posts),
        ],
        exception_handlers={HTTPException: _framework_error},
        redirect_slashes=False,
    )
    posts |= _add_posts(app, gateway)
    app.state.gateway, app.state.posts, app.state.telemetry = gateway, posts, telemetry
    checks = {"engines": _engines_check(client), **(readiness or {})}
    _add_reads(app, gateway, checks)
    if desk is not None:
        _add_admin(app, gateway, desk, checks)
    telemetry.allowed.known_routes = Routes(app)
    if settings.telemetry.prometheus:
        _add_get(app, "/metrics", _bound(gateway, metrics.show_metrics), "show_metrics")
    return app


def serve_batches(app: FastAPI, parts: BatchParts) -> Mapping[str, StraightEndpoint]:
    """Add `/v1/files` and `/v1/batches` to an app; the endpoints that a batch's lines are run by."""
    gateway: Gateway = app.state.gateway
    gateway.metrics.add(parts.metrics)
    add_files(app, gateway, parts.desk)
    add_batches(app, gateway, parts.desk)
    posts: dict[str, StraightEndpoint] = app.state.posts
    return {path: posts[path] for path in LINE_ENDPOINTS}


def _add_posts(app: FastAPI, gateway: Gateway) -> dict[str, StraightEndpoint]:
    """Routes for readers of the schema and for other methods; what answers is given back, by path."""
    posts: dict[str, StraightEndpoint] = {}
    routes: tuple[tuple[str, _Endpoint, type[BaseModel]], ...] = (
        ("/v1/chat/completions", chat.create_chat_completion, ChatCompletionBody),
        ("/v1/completions", completions.create_completion, CompletionBody),
        ("/v1/tokenize", tokens.tokenize, TokenizeBody),
        ("/v1/detokenize", tokens.detokenize, DetokenizeBody),
    )
    for path, endpoint, body in routes:
        # The endpoints read the body themselves, in one pass and after the key; the schema is for readers.
        extra = {
            "requestBody": {
                "required": True,
                "content": {"application/json": {"schema": inlined_schema(body)}},
            }
        }
        posts[path] = _bound(gateway, endpoint)
        app.add_api_route(path, posts[path], methods=["POST"], openapi_extra=extra, name=endpoint.__name__)
    return posts


def _add_reads(app: FastAPI, gateway: Gateway, checks: Mapping[str, ReadinessCheck]) -> None:
    async def show_model(request: Request, model_id: str) -> Response:
        return await models.show_model(gateway, request, model_id)

    async def readyz() -> Response:
        return await health.readyz(checks)

    async def show_health() -> Response:
        return await health.health(checks)

    app.add_api_route("/v1/models", _bound(gateway, models.list_models), methods=["GET"], name="list_models")
    app.add_api_route("/v1/models/{model_id:path}", show_model, methods=["GET"])

    async def show_schema(request: Request) -> Response:
        await gateway.authenticate(request, roles=None)
        return JSONResponse(app.openapi())

    app.add_api_route("/openapi.json", show_schema, methods=["GET"], include_in_schema=False)
    _add_get(app, "/healthz", health.healthz, "healthz")
    _add_get(app, "/readyz", readyz, "readyz")
    _add_get(app, "/health", show_health, "health")


def _add_admin(app: FastAPI, gateway: Gateway, desk: AdminDesk, checks: Mapping[str, ReadinessCheck]) -> None:
    for route in admin_routes(checks):
        endpoint = _bound(gateway, partial(answer_admin, route, desk))
        app.add_api_route(
            route.path,
            endpoint,
            methods=[route.method],
            name=route.handler.__name__,
            summary=route.handler.__doc__,
            openapi_extra=describe(route),
        )
    app.add_api_route(
        "/v1/me",
        _bound(gateway, partial(show_me, desk)),
        methods=["GET"],
        name="show_me",
        openapi_extra={"responses": described_errors((401, 403, 500, 503))},
    )


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


class Routes:
    """The paths of an app's routes, as they come."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app
        self._paths: frozenset[str] = frozenset()
        self._num_routes = 0

    def __contains__(self, path: object) -> bool:
        routes = self._app.routes
        if len(routes) != self._num_routes:
            self._num_routes = len(routes)
            self._paths = frozenset(getattr(route, "path", "") for route in routes)
        return path in self._paths


async def _framework_error(_: Request, error: Exception) -> Response:
    return api_error(error).response()


def _engines_check(client: InferenceClient) -> ReadinessCheck:
    async def check() -> Readiness:
        has_models = bool(client.models())
        return Readiness(has_models, "serving" if has_models else "starting")

    return check
