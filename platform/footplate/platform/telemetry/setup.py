"""The telemetry of one process, put together."""

from __future__ import annotations

from dataclasses import dataclass, field

from footplate.platform.telemetry.allow_list import AllowList
from footplate.platform.telemetry.otlp_export import OtlpExporter
from footplate.platform.telemetry.spans import Tracer


@dataclass(slots=True)
class Telemetry:
    """Without an exporter nothing leaves but `/metrics` and log lines."""

    allowed: AllowList = field(default_factory=AllowList)
    tracer: Tracer = field(default_factory=Tracer)
    exporter: OtlpExporter | None = None
