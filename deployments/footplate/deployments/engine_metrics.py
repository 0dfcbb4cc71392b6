"""What one engine replica tells of itself: its statistics, and histograms of the requests it has had.

One recorder: the replica's own `/metrics`, OTLP and Ray's metrics all read it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry

from footplate.deployments.channel.outlet import Delivery
from footplate.engine.types import EngineStats
from footplate.platform.metrics import (
    FIRST_TOKEN_S,
    LABELS,
    REQUEST_S,
    TOKEN_GAP_S,
    Histogram,
    engine_families,
)
from footplate.platform.telemetry.allow_list import AllowList
from footplate.platform.telemetry.metric_wall import walled

_TOKENS = tuple(float(step * 10**power) for power in range(6) for step in (1, 2, 5))
# Name below `vllm:`, help, bounds. The names are others', which dashboards read.
HISTOGRAMS: tuple[tuple[str, str, tuple[float, ...]], ...] = (
    ("time_to_first_token_seconds", "Time to the first token, in the engine", FIRST_TOKEN_S),
    ("inter_token_latency_seconds", "Mean time between a request's tokens", TOKEN_GAP_S),
    ("request_time_per_output_token_seconds", "The same, under its older name", TOKEN_GAP_S),
    ("e2e_request_latency_seconds", "Time of a whole request, in the engine", REQUEST_S),
    ("request_queue_time_seconds", "Time until the engine began a request", REQUEST_S),
    ("request_prefill_time_seconds", "Time from there to its first token", REQUEST_S),
    ("request_decode_time_seconds", "Time from there to its last token", REQUEST_S),
    ("request_prompt_tokens", "Tokens of a request's prompt", _TOKENS),
    ("request_generation_tokens", "Tokens of a request's answers", _TOKENS),
)


class EngineMetrics(Collector):
    """Belongs to the replica's event loop, as the deliveries do that it hears of."""

    def __init__(self, model: str, engine: str, stats: Callable[[], EngineStats]) -> None:
        self.labels = (model, engine)
        self._stats = stats
        self._histograms = {name: Histogram(bounds) for name, _, bounds in HISTOGRAMS}
        self._allowed = AllowList(lambda: frozenset({model}))
        self._registry = CollectorRegistry()
        self._registry.register(self)
        # Hears of each value too, by the histogram's name.
        self.observed: Callable[[str, float], None] | None = None

    def stats(self) -> EngineStats:
        """The engine's statistics as they stand."""
        return self._stats()

    def ended(self, delivery: Delivery) -> None:
        """Nothing more of a request goes to its gateway."""
        now, begun = time.monotonic(), delivery.begun
        if begun is None:
            return  # it never ran
        num_tokens = sum(delivery.num_sent)
        whole_s, first_s = now - delivery.came_at, begun.queue_s + begun.prefill_s
        decode_s = max(whole_s - first_s, 0.0)
        self._observe("time_to_first_token_seconds", first_s)
        self._observe("e2e_request_latency_seconds", whole_s)
        self._observe("request_queue_time_seconds", begun.queue_s)
        self._observe("request_prefill_time_seconds", begun.prefill_s)
        self._observe("request_decode_time_seconds", decode_s)
        self._observe("request_prompt_tokens", delivery.num_prompt)
        self._observe("request_generation_tokens", num_tokens)
        num_gaps = num_tokens - len(delivery.num_sent)
        if num_gaps > 0:
            gap_s = decode_s * len(delivery.num_sent) / num_gaps
            self._observe("request_time_per_output_token_seconds", gap_s)
            self._observe("inter_token_latency_seconds", gap_s)

    def collect(self) -> Iterator[Metric]:
        """As Prometheus wants it."""
        return walled(self._families(), self._allowed)

    def exposition(self) -> bytes:
        """The text format."""
        return generate_latest(self._registry)

    def _families(self) -> Iterator[Metric]:
        yield from engine_families({self.labels: self._stats()})
        for name, text, _ in HISTOGRAMS:
            histogram = self._histograms[name]
            family = HistogramMetricFamily(f"vllm:{name}", text, labels=LABELS)
            family.add_metric(self.labels, histogram.cumulative(), histogram.total)
            yield family

    def _observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)
        if self.observed is not None:
            self.observed(name, value)


class EnginePorts:
    """For a gateway's `/metrics`: where replicas answer theirs. `ports`: by model and engine; 0: nowhere."""

    def __init__(self, ports: Callable[[], Mapping[tuple[str, str], int]]) -> None:
        self._ports = ports

    def families(self) -> Iterator[Metric]:
        """As Prometheus wants it."""
        text = "Where a replica answers /metrics itself"
        family = GaugeMetricFamily("footplate_engine_metrics_port", text, labels=LABELS)
        for labels, port in self._ports().items():
            if port:
                family.add_metric(labels, port)
        yield family
