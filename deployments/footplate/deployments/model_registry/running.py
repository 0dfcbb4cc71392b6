"""The models of one run: their registry and their reconciler, with what both need."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from footplate.billing.adapters.postgres.books import connect
from footplate.deployments.model_registry.applications import ServeApplications
from footplate.deployments.model_registry.checks import ModelChecker
from footplate.deployments.model_registry.reconciler import Reconciler
from footplate.deployments.model_registry.rows import PostgresModelRegistry
from footplate.deployments.specs import ReplicaSpec
from footplate.platform.model_registry import ServedModel
from footplate.platform.settings import Settings


class RunningModels:
    """Owns a connection and the reconciler's thread. `prepare` comes before gateways read the registry."""

    def __init__(
        self,
        database_url: str,
        settings: Settings,
        spec_of: Callable[[ServedModel], ReplicaSpec],
        models_dir: Path,
    ) -> None:
        self._engine = connect(database_url, pool_size=1)
        self._file = settings.models
        self._registry = PostgresModelRegistry(self._engine)
        applications = ServeApplications(ModelChecker(models_dir).has_memory)
        self.reconciler = Reconciler(self._registry, applications, self._file, spec_of)

    def prepare(self) -> None:
        """Forget what an earlier run has seen. Raises StoreUnavailable."""
        self._registry.begin_run(model.name for model in self._file)

    def start(self) -> None:
        """Begin to reconcile. Serve must be there."""
        self.reconciler.start()

    def close(self) -> None:
        """End it."""
        self.reconciler.close()
        self._engine.dispose()
