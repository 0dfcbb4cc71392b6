"""The platform's app with its real adapters: what `GatewaySpec.app_builder` names by default."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from footplate.deployments.specs import GatewaySpec
from footplate.engine.errors import EngineError
from footplate.engine.types import ModelCard
from footplate.platform.models import PipelineProvider
from footplate.platform.ports import InferenceClient, Principal
from footplate.platform.settings import ModelSettings, load_settings
from footplate.tenancy.authenticator import CachingAuthenticator
from footplate.tenancy.secrets import MasterKey

if TYPE_CHECKING:
    from footplate.platform.http.health import Readiness, ReadinessCheck
    from footplate.tenancy.adapters.postgres.store import PostgresKeyStore

logger = logging.getLogger(__name__)


class TenancyAuthenticator:
    """Tenancy's key holders as the platform's principals; see `ports.Authenticator`."""

    def __init__(self, keys: CachingAuthenticator) -> None:
        self._keys = keys

    async def authenticate(self, key: str) -> Principal | None:
        """The principal of a live key, or None."""
        holder = await self._keys.authenticate(key)
        if holder is None:
            return None
        return Principal(
            holder.key_id,
            holder.tenant_id,
            holder.role.value,
            holder.cache_scope,
            holder.tenant_quota,
            holder.key_quota,
        )


async def build(spec: GatewaySpec, client: InferenceClient) -> Any:
    """The app of one gateway replica, with the text pipelines of the configured models loaded."""
    # The drivers are only loaded in the process that talks to the database.
    from footplate.deployments.limits import GatewayLimits
    from footplate.platform.app import create_app
    from footplate.tenancy.adapters.postgres.store import PostgresKeyStore, connect

    settings = load_settings(Path(spec.config_file) if spec.config_file else None)
    store = PostgresKeyStore(connect(spec.database_url))
    keys = CachingAuthenticator(
        store,
        MasterKey.load(Path(spec.master_key_file)),
        default_quota=settings.tenancy.default_quota.to_quota(),
    )
    pipelines = PipelineProvider(Path(spec.data_dir) / "models")
    await asyncio.gather(*(_preload(pipelines, model) for model in settings.models))
    limits = GatewayLimits(spec.redis_url, settings.limits, num_gateways=settings.server.gateway_replicas)
    limits.start()
    readiness = {"database": _database_check(store), "limits": limits.readiness_check()}
    authenticator = TenancyAuthenticator(keys)
    app = create_app(settings, client, authenticator, pipelines, readiness, admission=limits.admission)
    # What the gateway awaits once it has drained.
    app.state.closers = (limits.close,)
    return app


async def _preload(pipelines: PipelineProvider, model: ModelSettings) -> None:
    """Load a model's tokenizer while its weights load elsewhere."""
    # Only source and template say which pipeline it is; the rest comes with the replica's card.
    card = ModelCard(model.name, model.source, 0, 0, 0, "", "", chat_template_file=model.chat_template)
    try:
        await pipelines.get(card)
    except EngineError as error:
        # The replica fails on the same source and says so; the gateway serves the other models.
        logger.warning("no text pipeline for %s: %s", model.name, error)


def _database_check(store: PostgresKeyStore) -> ReadinessCheck:
    from footplate.platform.http.health import Readiness

    async def check() -> Readiness:
        # `readyz` takes an exception for not ready.
        await asyncio.to_thread(store.find_key, "")
        return Readiness(True, "serving")

    return check
