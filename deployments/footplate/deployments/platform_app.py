"""The platform's app with its real adapters: what `GatewaySpec.app_builder` names by default."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from footplate.deployments.specs import GatewaySpec
from footplate.engine.errors import EngineError
from footplate.engine.types import ModelCard
from footplate.platform.models import PipelineProvider
from footplate.platform.ports import InferenceClient
from footplate.platform.settings import ModelSettings, Settings, load_settings
from footplate.tenancy.secrets import MasterKey

if TYPE_CHECKING:
    from footplate.deployments.books_service import BooksService
    from footplate.deployments.capture.service import CaptureService
    from footplate.deployments.key_service import KeyService
    from footplate.deployments.limits import GatewayLimits
    from footplate.deployments.model_registry.service import ModelService

logger = logging.getLogger(__name__)


async def build(spec: GatewaySpec, client: InferenceClient) -> Any:
    """The app of one gateway replica, with the text pipelines of the configured models loaded."""
    # The drivers are only loaded in the process that talks to the database.
    from footplate.deployments.batches.service import BatchService, LineParts
    from footplate.deployments.books_service import BooksService
    from footplate.deployments.capture.service import CaptureService
    from footplate.deployments.limits import GatewayLimits
    from footplate.deployments.metering_service import MeteringService
    from footplate.deployments.model_registry.service import ModelService
    from footplate.deployments.run_paths import RunPaths
    from footplate.deployments.telemetry_service import TelemetryService
    from footplate.platform.app import create_app, serve_batches

    settings = load_settings(Path(spec.config_file) if spec.config_file else None)
    models_dir = Path(spec.data_dir) / "models"
    pipelines = PipelineProvider(models_dir)
    await asyncio.gather(*(_preload(pipelines, model) for model in settings.models))
    paths = RunPaths.of(Path(spec.data_dir))
    usage = MeteringService(spec.database_url, paths.usage_journal_dir, settings.billing)
    books = BooksService(spec.database_url, spec.redis_url, settings.billing, paths)
    limits = GatewayLimits(
        spec.redis_url,
        settings.limits,
        num_gateways=settings.server.gateway_replicas,
        metering=usage.metering,
        budgets=usage.budgets,
        claims=usage.claims,
        keeper=usage.keeper,
    )
    models = ModelService.of(spec, settings, client, models_dir, partial(_preload, pipelines))
    captures = CaptureService(spec.database_url, settings.telemetry.content_capture)
    keys = _key_service(spec, settings, limits, books, models, captures)
    batches = BatchService(spec.database_url, settings.storage.files_url, paths.data_dir, settings.batches)
    telemetry = TelemetryService.of("gateway", settings.telemetry)
    usage.start()
    limits.start()
    keys.start()
    captures.start()
    if models is not None:
        models.start()
    readiness = {
        "database": keys.readiness_check(),
        "limits": limits.readiness_check(),
        "usage": usage.readiness_check(),
    }
    app = create_app(
        settings,
        client,
        keys.authenticator,
        pipelines,
        readiness,
        admission=limits.admission,
        desk=keys.desk,
        telemetry=telemetry.telemetry,
        captures=captures.recorder,
    )
    telemetry.start(app.state.gateway.metrics.collect_own)
    endpoints = serve_batches(app, batches.parts)
    cascades = app.state.gateway.cascades
    tracer = telemetry.telemetry.tracer
    batches.start(LineParts(endpoints, client, keys.authenticator, usage.writer, cascades, tracer))
    # What the gateway awaits once it has drained; reservations end when their events are durable.
    closers = () if models is None else (models.close,)
    stores = (usage.close, captures.close, books.close, keys.close, telemetry.close)
    app.state.closers = (*closers, batches.close, limits.close, *stores)
    return app


def _key_service(
    spec: GatewaySpec,
    settings: Settings,
    limits: GatewayLimits,
    books: BooksService,
    models: ModelService | None,
    captures: CaptureService,
) -> KeyService:
    """Keys, tenants and their administration, with what the admin API reaches beside them."""
    from footplate.deployments.key_service import KeyService
    from footplate.platform.use import LimiterUse

    return KeyService(
        spec.database_url,
        spec.redis_url,
        MasterKey.load(Path(spec.master_key_file)),
        default_quota=settings.tenancy.default_quota.to_quota(),
        use=LimiterUse(limits.limiter),
        source_header=spec.source_header,
        billing=books.desk,
        models=models.desk if models is not None else None,
        models_changed=models.changed if models is not None else _nothing,
        captures=captures.store,
    )


def _nothing() -> None:
    """Nobody is to be told."""


async def _preload(pipelines: PipelineProvider, model: ModelSettings) -> None:
    """Load a model's tokenizer while its weights load elsewhere."""
    # Only source and template say which pipeline it is; the rest comes with the replica's card.
    card = ModelCard(model.name, model.source, 0, 0, 0, "", "", chat_template_file=model.chat_template)
    try:
        await pipelines.get(card)
    except EngineError as error:
        # The replica fails on the same source and says so; the gateway serves the other models.
        logger.warning("no text pipeline for %s: %s", model.name, error)
