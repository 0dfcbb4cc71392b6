"""What one engine replica tells, and to whom: its own `/metrics`, Ray's metrics, an OTLP endpoint."""

from __future__ import annotations

import asyncio
import logging

from footplate.deployments.engine_metrics import EngineMetrics
from footplate.deployments.metrics_listener import MayScrape, MetricsListener
from footplate.deployments.ray_metrics import RayMetrics, ray_metrics
from footplate.deployments.specs import ReplicaSpec
from footplate.deployments.telemetry_service import TelemetryService
from footplate.platform.errors import SettingsError
from footplate.platform.telemetry.setup import Telemetry

logger = logging.getLogger(__name__)
_MAX_PORT = 65_535


class ReplicaTelemetry:
    """Belongs to the replica's event loop. `start`, then `close`; neither fails the replica."""

    def __init__(self, spec: ReplicaSpec, index: str, metrics: EngineMetrics, may_scrape: MayScrape) -> None:
        self._settings = spec.telemetry
        place = index.rpartition(".")[2]  # behind its generation
        self._index = int(place) if place.isdecimal() else 0
        self._metrics = metrics
        self._listener = MetricsListener(metrics.exposition, may_scrape)
        try:
            service = TelemetryService.of("engine", spec.telemetry, model=spec.model.name, replica=index)
        except SettingsError as error:
            # The gateway has the same settings, and says so where somebody reads it.
            logger.error("this replica exports nothing: %s", error)
            service = TelemetryService(Telemetry())
        self._service = service
        self._ray: RayMetrics | None = None
        self.metrics_port = 0

    async def start(self) -> None:
        """Begin."""
        self._service.start(self._metrics.collect)
        port = self._settings.engine_metrics_port
        if port is not None and self._settings.prometheus:
            wanted = port + self._index if port else 0
            if wanted <= _MAX_PORT:
                self.metrics_port = await self._listener.start(self._settings.engine_metrics_host, wanted)
        self._ray = ray_metrics(self._metrics)
        if self._ray is not None:
            self._ray.start()

    async def close(self) -> None:
        """Stop, and send what is left."""
        if self._ray is not None:
            self._ray.close()
        await asyncio.gather(self._listener.close(), self._service.close())
