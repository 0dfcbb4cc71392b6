"""A receiver, and an exporter that sends to it at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from footplate.platform.telemetry.allow_list import AllowList
from footplate.platform.telemetry.otlp import OtlpWriter
from footplate.platform.telemetry.otlp_export import ExportLimits, ExportTarget, OtlpExporter
from footplate.platform.telemetry.setup import Telemetry
from footplate.platform.telemetry.spans import Tracer
from tests.otlp_receiver import Receiver, receiving

RESOURCE = {"service.name": "footplate-gateway", "service.instance.id": "host-1"}


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as found:
        yield found


@pytest.fixture
def make_telemetry(receiver: Receiver) -> Iterator[Callable[..., Telemetry]]:
    made: list[OtlpExporter] = []

    def make(ratio: float = 1.0, headers: Any = None, **limits: Any) -> Telemetry:
        allowed = AllowList()
        bounds = ExportLimits(**{"every_s": 0.02, "timeout_s": 5.0, **limits})
        target = ExportTarget(receiver.url, headers or {})
        exporter = OtlpExporter(OtlpWriter(allowed, RESOURCE), target, bounds)
        exporter.start()
        made.append(exporter)
        return Telemetry(allowed, Tracer(exporter, ratio), exporter)

    yield make
    receiver.gate.set()
    for exporter in made:
        exporter.close()
