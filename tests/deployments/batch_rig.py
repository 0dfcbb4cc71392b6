"""Files and batches in this process: the real app, stores and books, over an engine that plays a script."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI
from sqlalchemy import text

from footplate.deployments.batches.byte_store import DiskStore
from footplate.deployments.batches.service import BatchService, LineParts
from footplate.deployments.metering_service import MeteringService
from footplate.platform.admission import Admission
from footplate.platform.app import serve_batches
from footplate.platform.batches.store import ByteStore
from footplate.platform.batches.worker import Pace
from footplate.platform.metrics import LimitMetrics
from footplate.platform.models import PipelineProvider
from footplate.platform.settings import BatchSettings, BillingSettings
from footplate.platform.settlement import Settlement
from footplate.tenancy.limiter.local import LocalLimiter
from tests.builders import TENANT_KEY, gateway_app, known_principals, model_card, principal
from tests.deployments.gateway_process import pipeline
from tests.deployments.test_metering import Metered
from tests.fakes import KnownKeys, Script, ScriptedClient

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
MODEL, OTHER = "smollm2-135m", "other-model"
OTHER_KEY = "fp_other_secret"
NUM_PROMPT, NUM_OUTPUT = 10, 4
FAST = Pace(max_running=4, poll_s=0.02, beat_s=0.02, sweep_s=0.05)
WAIT_S = 30.0


def line(custom_id: str, **body: Any) -> dict[str, Any]:
    asked = {"model": MODEL, "prompt": [5] * NUM_PROMPT, "max_tokens": NUM_OUTPUT, **body}
    return {"custom_id": custom_id, "method": "POST", "url": TEXT, "body": asked}


def jsonl(*lines: Any) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


@dataclass
class BatchRig:
    """One gateway's worth of it."""

    app: FastAPI
    engine: ScriptedClient
    keys: KnownKeys
    metered: Metered
    service: BatchService
    data_dir: Path
    settlement: Settlement

    def http(self, key: str = TENANT_KEY) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(self.app)
        headers = {"authorization": f"Bearer {key}"}
        return httpx.AsyncClient(transport=transport, base_url="http://test/v1", headers=headers, timeout=30)

    async def upload(self, data: bytes, key: str = TENANT_KEY, **fields: str) -> str:
        answer = await self.post_file(data, key, **fields)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["id"])

    async def post_file(self, data: bytes, key: str = TENANT_KEY, **fields: str) -> httpx.Response:
        async with self.http(key) as http:
            form = {"purpose": "batch", **fields}
            return await http.post("/files", files={"file": ("in.jsonl", data)}, data=form)

    async def create(self, file_id: str, key: str = TENANT_KEY, **fields: Any) -> httpx.Response:
        async with self.http(key) as http:
            body = {"input_file_id": file_id, "endpoint": TEXT, "completion_window": "24h", **fields}
            return await http.post("/batches", json=body)

    async def begin(self, *lines: Any, key: str = TENANT_KEY, **fields: Any) -> dict[str, Any]:
        answer = await self.create(await self.upload(jsonl(*lines), key), key, **fields)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def get(self, path: str, key: str = TENANT_KEY) -> httpx.Response:
        async with self.http(key) as http:
            return await http.get(path)

    async def post(self, path: str, key: str = TENANT_KEY) -> httpx.Response:
        async with self.http(key) as http:
            return await http.post(path)

    async def batch(self, batch_id: str, key: str = TENANT_KEY) -> dict[str, Any]:
        found: dict[str, Any] = (await self.get(f"/batches/{batch_id}", key)).json()
        return found

    async def until(self, batch_id: str, status: str, key: str = TENANT_KEY) -> dict[str, Any]:
        async def is_there() -> bool:
            return bool((await self.batch(batch_id, key))["status"] == status)

        await until(is_there)
        return await self.batch(batch_id, key)

    async def lines_of(self, file_id: str | None, key: str = TENANT_KEY) -> list[dict[str, Any]]:
        assert file_id is not None
        answer = await self.get(f"/files/{file_id}/content", key)
        assert answer.status_code == 200, answer.text
        return [json.loads(each) for each in answer.text.splitlines()]

    def sql(self, query: str, **values: Any) -> list[Any]:
        with self.metered.engine.begin() as connection:
            found = connection.execute(text(query), values)
            return list(found) if found.returns_rows else []

    @property
    def paths(self) -> list[str]:
        """Everything in the file store."""
        root = self.data_dir / "files"
        return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


async def until(is_true: Callable[[], Any]) -> None:
    async with asyncio.timeout(WAIT_S):
        while True:
            found = is_true()
            if await found if asyncio.iscoroutine(found) else found:
                return
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def running(
    metered: Metered,
    data_dir: Path,
    *,
    settings: BatchSettings | None = None,
    pace: Pace = FAST,
    wrap: Callable[[ByteStore], ByteStore] = lambda store: store,
    batches_host: str = "",
) -> AsyncIterator[BatchRig]:
    """A gateway in this loop; closed in the order of the real one."""
    url = metered.options["books_url"]
    usage = MeteringService(url, metered.journal_dir, BillingSettings())
    usage.start()
    limiter = LocalLimiter()
    settlement = Settlement(limiter, sink=usage.writer)
    settlement.start()
    admission = Admission(limiter, settlement, LimitMetrics(), usage.metering)
    other = principal(tenant_id="tenant-b", key_id="key-b")
    keys = KnownKeys({**known_principals(), OTHER_KEY: other})
    engine = ScriptedClient([model_card(), model_card(OTHER)], Script([500] * 50, ends_with_stop=False))
    app = gateway_app(engine, keys, PipelineProvider(load=lambda card: pipeline()), admission=admission)
    service = BatchService(
        url.replace("host=", f"host={batches_host}"),
        "embedded",
        data_dir,
        settings or BatchSettings(),
        data=wrap(DiskStore(data_dir / "files")),
        pace=pace,
    )
    endpoints = serve_batches(app, service.parts)
    rig = BatchRig(app, engine, keys, metered, service, data_dir, settlement)
    service.start(LineParts(endpoints, engine, keys, usage.writer))
    try:
        yield rig
    finally:
        await service.close()
        await settlement.close()
        await usage.close()
