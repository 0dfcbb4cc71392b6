"""The names that a gateway's `/metrics` really has, from the objects that make them; nothing is connected."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from prometheus_client.metrics_core import Metric

from footplate.deployments.limits import GatewayLimits
from footplate.deployments.metering_service import MeteringService
from footplate.engine.types import EngineStats
from footplate.platform.batches.metrics import BatchMetrics
from footplate.platform.metrics import GatewayMetrics
from footplate.platform.routing_metrics import RoutingMetrics
from footplate.platform.settings import BillingSettings, LimitSettings

NOWHERE = "127.0.0.1:1"


def gateway_metrics(scratch: Path) -> GatewayMetrics:
    """All that a gateway puts together. Needs a running event loop, as a gateway has one."""
    metering = MeteringService(f"postgresql+psycopg://u@{NOWHERE}/d", scratch, BillingSettings())
    limits = GatewayLimits(f"redis://{NOWHERE}/0", LimitSettings(), metering=metering.metering)
    counts = limits.admission.metrics
    metrics = GatewayMetrics(
        lambda: {("m", "0"): EngineStats()},
        counts,
        metering.metrics,
        BatchMetrics(),
        RoutingMetrics(),
        limits.admission.cascades,
    )
    metrics.latencies("m", "0").first_token.observe(0.1)
    return metrics


def series_names(families: Iterable[Metric]) -> set[str]:
    """Names of series, of families without any too."""
    names = set()
    for family in families:
        endings = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(family.type, ("",))
        names |= {family.name + ending for ending in endings}
        names |= {sample.name for sample in family.samples}
    return names


def label_values(families: Iterable[Metric], label: str) -> dict[str, set[str]]:
    """By series, the values of a label that it has."""
    found: dict[str, set[str]] = {}
    for family in families:
        for sample in family.samples:
            if label in sample.labels:
                found.setdefault(sample.name, set()).add(sample.labels[label])
    return found
