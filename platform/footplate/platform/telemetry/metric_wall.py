"""The allow-list in front of metrics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.metrics_core import Metric

from footplate.platform.telemetry.allow_list import AllowList


def walled(families: Iterable[Metric], allowed: AllowList) -> Iterator[Metric]:
    """Families as they may be shown: series with a label that may not leave are left out."""
    for family in families:
        kept = []
        for sample in family.samples:
            labels = allowed.labels(sample.labels)
            if labels is not None:
                kept.append(sample._replace(labels=labels))
        family.samples = kept
        yield family
