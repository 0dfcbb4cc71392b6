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
NUM_PORTS = 32


def metrics_ports(first: int, index: int) -> list[int]:
    """Where replica `index` of a model may answer `/metrics`, best first; 0 is any free port.

    Its own is `first` + `index`. Models and generations of one node share the ports from `first` on.
    """
    if not first:
        return [0]
    ports = [first + (index + step) % NUM_PORTS for step in range(NUM_PORTS)]
    if index >= NUM_PORTS:
        ports.insert(0, first + index)
    return [port for port in ports if port <= _MAX_PORT]


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

    @property
    def metrics_port(self) -> int:
        """Where it answers `/metrics` now; 0: nowhere."""
        return self._listener.port

    async def start(self) -> None:
        """Begin."""
        self._service.start(self._metrics.collect)
        port = self._settings.engine_metrics_port
        if port is not None and self._settings.prometheus:
            own, *others = metrics_ports(port, self._index)
            await self._listener.start(self._settings.engine_metrics_host, own, others)
        self._ray = ray_metrics(self._metrics)
        if self._ray is not None:
            self._ray.start()

    async def close(self) -> None:
        """Stop, and send what is left."""
        if self._ray is not None:
            self._ray.close()
        await asyncio.gather(self._listener.close(), self._service.close())
