"""The registry of models in one gateway: what follows it, and the desk of the endpoints that change it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from footplate.billing.adapters.postgres.books import connect
from footplate.deployments.model_registry.checks import ModelChecker
from footplate.deployments.model_registry.folders import ModelFolders
from footplate.deployments.model_registry.following import ModelFollower, ServesModels
from footplate.deployments.model_registry.rows import PostgresModelRegistry
from footplate.deployments.specs import GatewaySpec
from footplate.platform.model_desk import ModelDesk
from footplate.platform.settings import ModelSettings, Settings


class ModelService:
    """Owns a pool; belongs to one event loop."""

    def __init__(
        self,
        database_url: str,
        settings: Settings,
        client: ServesModels,
        checker: ModelChecker,
        preload: Callable[[ModelSettings], Awaitable[None]],
    ) -> None:
        self._engine = connect(database_url, pool_size=1)
        registry = PostgresModelRegistry(self._engine)
        self._follower = ModelFollower(registry, settings.models, client, preload=preload)
        self.desk = ModelDesk(registry, settings, checker.check, self._follower.catch_up)
        self.changed = self._follower.changed

    @classmethod
    def of(
        cls,
        spec: GatewaySpec,
        settings: Settings,
        client: object,
        models_dir: Path,
        preload: Callable[[ModelSettings], Awaitable[None]],
    ) -> ModelService | None:
        """The service, where the run has a registry and the client's models can change."""
        if not spec.has_registry or not isinstance(client, ServesModels):
            return None
        config_file = Path(spec.config_file) if spec.config_file else None
        folders = ModelFolders.of(settings, config_file, Path(spec.data_dir))
        checker = ModelChecker(models_dir, folders, is_whole_cluster=settings.ray.address == "local")
        return cls(spec.database_url, settings, client, checker, preload)

    def start(self) -> None:
        """Begin to follow."""
        self._follower.start()

    async def close(self) -> None:
        """End it."""
        await self._follower.close()
        self.desk.close()
        self._engine.dispose()
