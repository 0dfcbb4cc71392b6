"""The telemetry of one process: what is exported, from where, how often. Belongs to one event loop."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from prometheus_client.metrics_core import Metric

from footplate.deployments.logs import set_line_sink
from footplate.deployments.sparse_lines import SparseLines
from footplate.platform.errors import SettingsError
from footplate.platform.telemetry.allow_list import AllowList
from footplate.platform.telemetry.otlp import OtlpWriter
from footplate.platform.telemetry.otlp_export import ExportTarget, OtlpExporter
from footplate.platform.telemetry.settings import TelemetrySettings
from footplate.platform.telemetry.setup import Telemetry
from footplate.platform.telemetry.spans import Tracer

logger = logging.getLogger(__name__)
_MAX_HEADERS_BYTES = 16_384


class TelemetryService:
    """Owns the exporter's thread and the task that reads metrics. `start`, then `close`."""

    def __init__(self, telemetry: Telemetry, metrics_interval_s: float = 15.0) -> None:
        self.telemetry = telemetry
        self._interval_s = metrics_interval_s
        self._lines = SparseLines()
        self._reading: asyncio.Task[None] | None = None
        self._collect: Callable[[], Iterable[Metric]] | None = None

    @staticmethod
    def of(
        process: str, settings: TelemetrySettings, *, model: str = "", replica: str = ""
    ) -> TelemetryService:
        """As the settings say. `process`: gateway or engine; an engine's model and replica.

        Raises:
            SettingsError: the file of headers can't be read.
        """
        if settings.otlp_endpoint is None:
            return TelemetryService(Telemetry())
        allowed = AllowList(lambda: frozenset({model}))
        resource = {
            "service.name": f"footplate-{process}",
            "service.namespace": "footplate",
            "service.version": _version(),
            "service.instance.id": f"{_host()}-{os.getpid()}",
            **({"gen_ai.request.model": model, "footplate.replica": replica} if model else {}),
        }
        headers = {} if settings.otlp_headers_file is None else read_headers(Path(settings.otlp_headers_file))
        writer = OtlpWriter(allowed, resource)
        exporter = OtlpExporter(writer, ExportTarget(settings.otlp_endpoint, headers))
        tracer = Tracer(exporter, settings.trace_ratio, trusts_client=settings.trusts_traceparent)
        return TelemetryService(Telemetry(allowed, tracer, exporter))

    def start(self, collect: Callable[[], Iterable[Metric]]) -> None:
        """Begin to export; `collect` gives all metrics as they stand, on this event loop."""
        exporter = self.telemetry.exporter
        if exporter is None:
            return
        self._collect = collect
        exporter.start()
        set_line_sink(exporter.take_line)
        self._reading = asyncio.create_task(self._read_forever(), name="telemetry-metrics")

    async def close(self) -> None:
        """Send what is left; a receiver that is away costs three seconds."""
        exporter = self.telemetry.exporter
        if exporter is None:
            return
        set_line_sink(None)
        if self._reading is not None:
            self._reading.cancel()
            self._read()
        await asyncio.to_thread(exporter.close)

    async def _read_forever(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            self._read()

    def _read(self) -> None:
        exporter, collect = self.telemetry.exporter, self._collect
        if exporter is None or collect is None:
            return
        try:
            exporter.take_metrics(collect())
        except Exception as error:
            if self._lines.is_due(type(error)):
                logger.error("metrics could not be read", exc_info=error)


def read_headers(file: Path) -> dict[str, str]:
    """`name: value` lines. Raises SettingsError; what stands in the file is in no message."""
    try:
        text = file.read_bytes()[: _MAX_HEADERS_BYTES + 1].decode("ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(
            f"telemetry.otlp_headers_file can't be read: {type(error).__name__}", ()
        ) from None
    headers = {}
    for number, line in enumerate(text.splitlines(), 1):
        name, colon, value = line.partition(":")
        if not line.strip():
            continue
        if not colon or not name.strip() or not value.strip() or len(text) > _MAX_HEADERS_BYTES:
            raise SettingsError(f"telemetry.otlp_headers_file: line {number} is no `name: value`", ())
        headers[name.strip().lower()] = value.strip()
    return headers


def _version() -> str:
    try:
        return version("footplate")
    except PackageNotFoundError:
        return "unknown"


def _host() -> str:
    return "".join(c if c.isalnum() or c in "-." else "-" for c in socket.gethostname())[:64] or "host"
