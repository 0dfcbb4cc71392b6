"""Strings planted in every field of every endpoint are in no span, metric, log line, error, dump or export.

Endpoints are those of the app's own table, and fields those of their schemas: one that is new is driven too,
or fails `test_every_route_has_a_body_to_plant_in`.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog
import uvicorn
from starlette.routing import Route

from footplate.deployments import migrations
from footplate.deployments.batches import schema as batch_schema
from footplate.deployments.batches.byte_store import DiskStore
from footplate.deployments.batches.service import BatchService, LineParts
from footplate.deployments.key_service import TenancyAuthenticator
from footplate.deployments.logs import configure_logging, set_line_sink
from footplate.deployments.metering_service import MeteringService
from footplate.engine.errors import EngineDead, EngineOverloaded, LoadError
from footplate.engine.text.pipeline import TextPipeline
from footplate.platform.admission import Admission
from footplate.platform.app import serve_batches
from footplate.platform.batches.worker import Pace
from footplate.platform.http.admin.endpoints import admin_routes
from footplate.platform.http.batches import CreateBatchBody
from footplate.platform.http.schemas import (
    Body,
    ChatCompletionBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from footplate.platform.metrics import LimitMetrics
from footplate.platform.models import PipelineProvider
from footplate.platform.settings import BatchSettings, BillingSettings
from footplate.platform.settlement import Settlement
from footplate.platform.telemetry.setup import Telemetry
from footplate.tenancy.limiter.local import LocalLimiter
from tests.builders import gateway_app
from tests.fakes import Script
from tests.otlp_receiver import Receiver
from tests.platform.admin.conftest import ROUTED, World
from tests.platform.admin.test_matrix import BODIES, VALUES
from tests.platform.conftest import EOS, chat_body, text_body
from tests.platform.telemetry.canaries import Canaries, plantings, raw_plantings
from tests.postgres_server import PostgresServer, connected

ADMIN = {(route.method, route.path): route for route in admin_routes({})}
UPLOAD = ("POST", "/v1/files")
POSTS: dict[str, type[Body]] = {
    "/v1/chat/completions": ChatCompletionBody,
    "/v1/completions": CompletionBody,
    "/v1/tokenize": TokenizeBody,
    "/v1/detokenize": DetokenizeBody,
    "/v1/batches": CreateBatchBody,
}
BASES: dict[str, Any] = {
    **BODIES,
    "/v1/chat/completions": chat_body(max_tokens=4),
    "/v1/completions": text_body(max_tokens=4),
    "/v1/batches": {"input_file_id": "file-x", "endpoint": "/v1/completions", "completion_window": "24h"},
}
# Nobody traces these.
UNTRACED = {"/health", "/healthz", "/readyz", "/metrics"}


class Kept(logging.Handler):
    """Everything that reaches the root of all loggers, in every form that a handler could write."""

    def __init__(self) -> None:
        super().__init__(logging.NOTSET)
        self.written: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.written.append(f"{self.format(record)} {record.__dict__}")


@dataclass
class Site:
    """One gateway over real stores, behind a real HTTP server; all that it writes is kept."""

    world: World
    app: Any
    canaries: Canaries
    logs: io.StringIO
    kept: Kept
    data_dir: Path
    url: str = ""
    errors: list[str] = field(default_factory=list)
    answers: list[tuple[str, str, int]] = field(default_factory=list)

    def says(self, **script: Any) -> None:
        ids = [*self.world.pipeline.encode("Hello there, all of you."), EOS]
        self.world.models.script = Script(ids, **script)

    async def ask(
        self, http: httpx.AsyncClient, method: str, path: str, *, key: str = "member", **options: Any
    ) -> httpx.Response:
        headers = {"authorization": f"Bearer {self.world.keys.get(key, key)}", **options.pop("headers", {})}
        answer = await http.request(method, path, headers=headers, **options)
        self.answers.append((method, path, answer.status_code))
        if answer.status_code >= 400 or 'data: {"error":' in answer.text:
            self.errors.append(f"{answer.text}{answer.headers}")
        return answer


@contextlib.contextmanager
def written_down() -> Iterator[tuple[io.StringIO, Kept]]:
    """Our log lines, and whatever reaches the root logger."""
    ours, root = logging.getLogger("footplate"), logging.getLogger()
    before = (ours.handlers, ours.level, ours.propagate, root.level, logging.getLogRecordFactory())
    hooks = sys.excepthook, threading.excepthook, logging.raiseExceptions
    logs, kept = io.StringIO(), Kept()
    configure_logging("gateway", logs)
    root.addHandler(kept)
    root.setLevel(logging.INFO)
    try:
        yield logs, kept
    finally:
        root.removeHandler(kept)
        ours.handlers, ours.propagate = before[0], before[2]
        ours.setLevel(before[1])
        root.setLevel(before[3])
        logging.setLogRecordFactory(before[4])
        sys.excepthook, threading.excepthook, logging.raiseExceptions = hooks
        logging.captureWarnings(False)
        structlog.reset_defaults()
        set_line_sink(None)


@contextlib.asynccontextmanager
async def running(
    world: World, telemetry: Telemetry, data_dir: Path, logs: io.StringIO, kept: Kept
) -> AsyncIterator[Site]:
    url = world.engine.url.render_as_string(hide_password=False)
    usage = MeteringService(url, data_dir / "journal", BillingSettings())
    usage.start()
    limiter = LocalLimiter()
    settlement = Settlement(limiter, sink=usage.writer)
    admission = Admission(limiter, settlement, LimitMetrics(), usage.metering, claims=usage.claims)
    keys = TenancyAuthenticator(world.cache)
    pipelines = PipelineProvider(load=lambda card: world.pipeline)
    app = gateway_app(
        world.models, keys, pipelines, ROUTED, desk=world.desk, admission=admission, telemetry=telemetry
    )
    pace = Pace(max_running=4, poll_s=0.02, beat_s=0.05, sweep_s=0.1)
    store = DiskStore(data_dir / "files")
    batches = BatchService(url, "embedded", data_dir, BatchSettings(), data=store, pace=pace)
    endpoints = serve_batches(app, batches.parts)
    batches.start(LineParts(endpoints, world.models, keys, usage.writer, tracer=telemetry.tracer))
    assert telemetry.exporter is not None
    set_line_sink(telemetry.exporter.take_line)
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    server = uvicorn.Server(uvicorn.Config(app, log_level="info", lifespan="off", timeout_keep_alive=300))
    serving = asyncio.create_task(server.serve([listener]))
    while not server.started:
        await asyncio.sleep(0.01)
    site = Site(world, app, Canaries(), logs, kept, data_dir, f"http://127.0.0.1:{listener.getsockname()[1]}")
    site.says()
    try:
        yield site
    finally:
        server.should_exit = True
        await serving
        await batches.close()
        await settlement.close()
        telemetry.exporter.take_metrics(app.state.gateway.metrics.collect())
        await usage.close()


def routes_of(app: Any) -> list[tuple[str, str]]:
    return sorted(
        (method, route.path)
        for route in app.routes
        if isinstance(route, Route)
        for method in route.methods or ()
    )


def base_of(method: str, path: str) -> Any:
    """A body that is good, or nearly."""
    route = ADMIN.get((method, path))
    if route is None or route.body is None:
        return BASES.get(path, {})
    known = BASES.get(route.handler.__name__)
    if known is not None:
        return known
    return {name: VALUES[name] for name in route.body.model_fields if name in VALUES}


def body_of(method: str, path: str) -> type[Body] | None:
    route = ADMIN.get((method, path))
    return POSTS.get(path) if route is None else route.body


async def drive(site: Site, http: httpx.AsyncClient, method: str, path: str) -> None:
    """Everything that a client can write in requests to one endpoint."""
    canaries, place, is_admin = site.canaries, f"{method} {path}", (method, path) in ADMIN
    key = "platform_admin" if is_admin else "scrape" if path == "/metrics" else "member"
    in_path = canaries.new(f"{place} path")
    filled = "/".join(in_path if part.startswith("{") else part for part in path.split("/"))
    urls = (filled, f"{filled}?{canaries.query(place)}", f"{filled}/{in_path}", f"{filled}?a={in_path}")
    asked = [site.ask(http, method, url, key=key, headers=canaries.headers(place)) for url in urls]
    asked.append(site.ask(http, method, filled, key=canaries.new(f"{place} key")))
    wrong = f"fp_{in_path}_{in_path}"
    asked.append(site.ask(http, method, filled, key=wrong, headers={"x-api-key": in_path}))
    kind = body_of(method, path)
    if kind is not None:
        json_type = {"content-type": "application/json"}
        base = base_of(method, path)
        bodies = [
            json.dumps(body).encode()
            for body in plantings(kind.model_json_schema(), base, canaries, place, is_name=is_admin)
        ]
        for body in (*bodies, *raw_plantings(canaries, place)):
            asked.append(site.ask(http, method, filled, content=body, key=key, headers=json_type))
    # Side by side: alone, each waits for the kernel's delayed acknowledgements.
    await asyncio.gather(*asked)


def whole(site: Site, **fields: Any) -> dict[str, Any]:
    """A chat with strings wherever a good one may have them."""

    def new(name: str) -> str:
        return site.canaries.new(f"a good chat's {name}")

    return {
        "model": "smollm2-135m",
        "messages": [
            {"role": "system", "content": new("system")},
            {"role": "user", "content": [{"type": "text", "text": new("part")}], "name": new("name")},
            {"role": "assistant", "content": new("assistant")},
            {"role": "user", "content": new("user")},
        ],
        "stop": [new("stop"), new("stop")],
        "user": new("user id"),
        "safety_identifier": new("safety_identifier"),
        "prompt_cache_key": new("prompt_cache_key"),
        "cache_salt": new("cache_salt"),
        "metadata": {new("metadata key"): new("metadata value"), "tags": new("tags")},
        "bad_words": [new("bad_words")],
        **fields,
    }


async def drive_good_and_failing(site: Site, http: httpx.AsyncClient) -> None:
    """Whole requests with strings in them, answered, refused, failed at once, failed in the middle."""
    text = site.canaries.new("an exception's text")
    for stream in (False, True):
        for script, status in (
            ({}, 200),
            # What an engine refuses with is a sentence of its own, which is told as it is.
            ({"refusal": EngineOverloaded("it is full", 1)}, 503),
            ({"refusal": EngineDead(text)}, 503),
            ({"failure": EngineDead(text)}, 500),
            ({"failure": RuntimeError(text)}, 500),
            ({"failure": RuntimeError(text), "fail_after": 2}, 200 if stream else 500),
            ({"error": text, "fail_after": 2}, 200 if stream else 500),
        ):
            site.says(**script)
            answer = await site.ask(http, "POST", "/v1/chat/completions", json=whole(site, stream=stream))
            assert answer.status_code == status, answer.text
    site.says()
    for model in ("auto", "sure", "seen", "small"):
        await site.ask(http, "POST", "/v1/chat/completions", json=whole(site, model=model))
    unknown = site.canaries.new("an unknown model")
    assert (await site.ask(http, "POST", "/v1/completions", json=text_body(model=unknown))).status_code == 404
    prompt = site.canaries.new("a prompt")
    answer = await site.ask(http, "POST", "/v1/completions", json=text_body(prompt=[prompt, prompt], n=2))
    assert answer.status_code == 200, answer.text


async def leave_streams(site: Site, http: httpx.AsyncClient) -> None:
    """Clients that go away amid an answer."""
    site.says(hold_after=3)
    headers = {"authorization": f"Bearer {site.world.keys['member']}"}
    for _ in range(3):
        sent = whole(site, stream=True)
        async with http.stream("POST", "/v1/chat/completions", json=sent, headers=headers) as response:
            async for _ in response.aiter_lines():
                break
    for generation in site.world.models.generations[-3:]:
        await asyncio.wait_for(generation.closed.wait(), 10)
    site.says()


async def drive_batches(site: Site, http: httpx.AsyncClient) -> None:
    """Files and batches whose names, lines, ids and metadata hold strings."""

    def new(name: str) -> str:
        return site.canaries.new(f"a batch's {name}")

    lines = [
        {"custom_id": new("custom_id"), "method": "POST", "url": "/v1/chat/completions", "body": whole(site)},
        {
            "custom_id": new("custom_id"),
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {**whole(site), "stop": {new("wrong stop"): 1}},
        },
    ]
    data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    for content, form in (
        (data, {"purpose": "batch"}),
        (new("broken line").encode(), {"purpose": "batch"}),
        (data, {"purpose": new("purpose")}),
        (data, {"purpose": "batch", new("field"): new("field's value")}),
        (data, {"purpose": "batch", "expires_after[anchor]": new("anchor")}),
    ):
        files = {"file": (new("file name"), content, new("media type"))}
        uploaded = await site.ask(http, "POST", "/v1/files", files=files, data=form)
        if uploaded.status_code != 200:
            continue
        asked = {
            **BASES["/v1/batches"],
            "endpoint": "/v1/chat/completions",
            "metadata": {new("key"): new("value")},
        }
        asked["input_file_id"] = uploaded.json()["id"]
        batch = (await site.ask(http, "POST", "/v1/batches", json=asked)).json()
        async with asyncio.timeout(30):
            while batch["status"] not in ("completed", "failed"):
                await asyncio.sleep(0.05)
                batch = (await site.ask(http, "GET", f"/v1/batches/{batch['id']}")).json()
        for name in ("output_file_id", "error_file_id"):
            if batch.get(name):
                await site.ask(http, "GET", f"/v1/files/{batch[name]}/content")
    for content in raw_plantings(site.canaries, "an upload"):
        kind = f"multipart/form-data; boundary={new('boundary')}"
        await site.ask(http, "POST", "/v1/files", content=content, headers={"content-type": kind})


async def drive_names(site: Site, http: httpx.AsyncClient) -> None:
    """What administrators name goes into answers to them, and nowhere else."""

    def new(name: str) -> str:
        return site.canaries.new(f"an administrator's {name}", is_name=True)

    asked = {"name": new("tenant"), "cost_center": new("cost centre"), "labels": {new("label"): new("value")}}
    tenant = (await site.ask(http, "POST", "/admin/v1/tenants", key="platform_admin", json=asked)).json()
    path = f"/admin/v1/tenants/{tenant['id']}/keys"
    asked = {"name": new("key"), "role": "member", "labels": {new("label"): new("value")}}
    made = (await site.ask(http, "POST", path, key="platform_admin", json=asked)).json()
    for stream in (False, True):
        answer = await site.ask(
            http, "POST", "/v1/chat/completions", key=made["key"], json=whole(site, stream=stream)
        )
        assert answer.status_code == 200, answer.text


async def export_all(site: Site, http: httpx.AsyncClient) -> bytes:
    """Every kind of usage export, of all that was asked."""
    found = b""
    for kind in ("csv", "jsonl", "focus"):
        asked = {"from": "2026-01-01", "to": "2030-01-01", "format": kind}
        made = await site.ask(http, "POST", "/admin/v1/exports", key="finance", json=asked)
        assert made.status_code < 300, made.text
        shown = await site.ask(http, "GET", f"/admin/v1/exports/{made.json()['id']}", key="finance")
        assert shown.status_code == 200, shown.text
    for file in sorted(site.world.exports_dir.rglob("*")):
        found += file.read_bytes() if file.is_file() else b""
    return found


@pytest.fixture
def site_of(
    postgres: PostgresServer,
    smollm2: TextPipeline,
    tmp_path: Path,
    make_telemetry: Callable[..., Telemetry],
) -> Iterator[Callable[[], Any]]:
    telemetry = make_telemetry(max_spans=1 << 20, max_lines=1 << 20)
    with (
        written_down() as (logs, kept),
        connected(postgres.new_database(is_migrated=True)) as engine,
    ):
        migrations.upgrade(engine, batch_schema)
        world = World(engine, smollm2, tmp_path / "exports")
        yield lambda: running(world, telemetry, tmp_path, logs, kept)
        world.billing.close()
        world.desk.close()
        world.reader.close()


def test_strings_of_requests_are_in_nothing_that_is_told(
    site_of: Callable[[], Any], receiver: Receiver, capfd: pytest.CaptureFixture[str]
) -> None:
    async def run() -> tuple[Site, str, bytes]:
        async with site_of() as site:
            limits = httpx.Limits(max_connections=24)
            async with httpx.AsyncClient(base_url=site.url, timeout=30, limits=limits) as http:
                for method, path in routes_of(site.app):
                    await drive(site, http, method, path)
                await drive_good_and_failing(site, http)
                await leave_streams(site, http)
                await drive_batches(site, http)
                await drive_names(site, http)
                exported = await export_all(site, http)
                shown = await site.ask(http, "GET", "/metrics", key="scrape")
                assert shown.status_code == 200
        return site, shown.text, exported

    site, metrics, exported = asyncio.run(run())
    canaries = site.canaries
    site.app.state.telemetry.exporter.close(timeout_s=20)
    told = {
        "spans, metrics and log records": b"".join(receiver.bodies),
        "/metrics": metrics,
        "our log": site.logs.getvalue(),
        "other loggers": "\n".join(site.kept.written),
        "standard output and error": "".join(capfd.readouterr()),
        "error bodies": "\n".join(site.errors),
        "the journal of usage": b"".join(
            file.read_bytes() for file in (site.data_dir / "journal").rglob("*") if file.is_file()
        ),
    }
    leaks = {name: canaries.found_in(data) for name, data in told.items()}
    leaks["exports"] = canaries.found_in(exported, names_too=False)
    assert {name: found for name, found in leaks.items() if found} == {}
    # That nothing was found means nothing where nothing was told.
    assert len(canaries.planted) > 1_000
    assert len(site.errors) > 1_000 and len(site.kept.written) > 1_000 and exported
    _assert_all_was_told(site, receiver)


def _assert_all_was_told(site: Site, receiver: Receiver) -> None:
    names = {span.name for span in receiver.spans()}
    routes = {f"{method} {path}" for method, path in routes_of(site.app) if path not in UNTRACED}
    assert {name for name in routes if not name.startswith("HEAD ")} <= names
    assert {"chat smollm2-135m", "chat auto", "text_completion smollm2-135m", "footplate.batch_line"} <= names
    assert "gen_ai.server.request.duration" in receiver.metrics()
    failed = [record for record in receiver.log_records() if record.body.string_value == "request failed"]
    assert len(failed) >= 8 and all(record.trace_id for record in failed)
    outcomes = {
        pair.value.string_value
        for span in receiver.spans()
        for pair in span.attributes
        if pair.key == "footplate.outcome"
    }
    assert {"completed", "failed", "client_cancelled"} <= outcomes


def test_every_route_has_a_body_to_plant_in(site_of: Callable[[], Any]) -> None:
    async def found() -> list[tuple[str, str]]:
        async with site_of() as site:
            return routes_of(site.app)

    for method, path in asyncio.run(found()):
        if method in ("POST", "PUT", "PATCH") and (method, path) != UPLOAD:
            has_body = body_of(method, path) is not None
            takes_none = path.endswith("/cancel") or ADMIN.get((method, path)) is not None
            assert has_body or takes_none, f"say what the body of {method} {path} is, in POSTS"


def test_texts_of_failing_stores_and_tokenizers_are_not_told(
    make_rig: Callable[..., Any], make_telemetry: Callable[..., Telemetry], receiver: Receiver
) -> None:
    text = Canaries().new("a failure")

    def fail(_: Any) -> TextPipeline:
        raise LoadError(text)

    with written_down() as (logs, kept):
        telemetry = make_telemetry()
        rig = make_rig(load=fail, telemetry=telemetry)
        answers = [asyncio.run(rig.post("/v1/chat/completions", chat_body()))]

        class Broken(dict[str, Any]):
            def get(self, *_: Any) -> Any:
                raise OSError(text)

        rig.keys.principals = Broken()
        answers.append(asyncio.run(rig.post("/v1/chat/completions", chat_body())))
        receiver.wait_for(lambda: len(receiver.spans()) == 2)
    assert [answer.status_code for answer in answers] == [500, 500]
    told: Mapping[str, Any] = {
        "spans": b"".join(receiver.bodies),
        "log": logs.getvalue(),
        "others": str(kept.written),
        "answers": "".join(answer.text for answer in answers),
    }
    assert [name for name, data in told.items() if Canaries().found_in(data)] == []
    assert logs.getvalue().count("LoadError") == logs.getvalue().count("OSError") == 1
