"""Latency histograms of the gateway, and the engine's counters, under the names that dashboards read.

Recording is a bisection and three additions: it happens for each token.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry

from footplate.engine.types import EngineStats
from footplate.platform.telemetry.allow_list import AllowList
from footplate.platform.telemetry.metric_wall import walled

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LABELS = ("model_name", "engine")
FIRST_TOKEN_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
TOKEN_GAP_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1,
    2.5,
    5,
    10,
    20,
    40,
    80,
)
REQUEST_S = (
    0.1,
    0.3,
    0.5,
    0.8,
    1,
    1.5,
    2,
    2.5,
    5,
    10,
    15,
    20,
    30,
    40,
    50,
    60,
    120,
    240,
    480,
    960,
    1920,
    7680,
)

StatsSource = Callable[[], Mapping[tuple[str, str], EngineStats]]


class Histogram:
    """Counts by bucket. `bounds` are inclusive upper bounds, ascending, in seconds."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def cumulative(self) -> list[tuple[str, float]]:
        """Buckets as Prometheus wants them."""
        running = 0
        buckets = []
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            running += count
            buckets.append(("+Inf" if bound == float("inf") else repr(float(bound)), float(running)))
        return buckets


class EngineLatencies:
    """What clients wait for the answers of one engine, as the gateway sees it."""

    __slots__ = ("first_token", "prefill", "queue", "request", "token_gap")

    def __init__(self) -> None:
        self.first_token = Histogram(FIRST_TOKEN_S)
        self.token_gap = Histogram(TOKEN_GAP_S)
        self.request = Histogram(REQUEST_S)
        # As the engine says itself.
        self.queue = Histogram(REQUEST_S)
        self.prefill = Histogram(REQUEST_S)


class LimitMetrics:
    """What limits did. `gauges` are read when asked for: a name under `footplate_`, its help, its value."""

    def __init__(self, gauges: Sequence[tuple[str, str, Callable[[], float]]] = ()) -> None:
        self._gauges = gauges
        self._refused: Counter[str] = Counter()
        self._shadow: Counter[str] = Counter()
        self._num_over_soft = 0

    def soft_budget_exceeded(self) -> None:
        """A request ran although a soft budget is passed."""
        self._num_over_soft += 1

    def refused(self, reason: str) -> None:
        """A request was refused by a limit."""
        self._refused[reason] += 1

    def shadow_exceeded(self, kind: str) -> None:
        """A limit in shadow mode would have refused a request."""
        self._shadow[kind] += 1

    def families(self) -> Iterator[Metric]:
        """As Prometheus wants them."""
        counters = (
            ("footplate_limit_refusals", "Requests refused by limits", "reason", self._refused),
            (
                "footplate_limit_shadow_exceeded",
                "Limits in shadow mode that were exceeded",
                "kind",
                self._shadow,
            ),
        )
        for name, text, label, counts in counters:
            counter = CounterMetricFamily(name, text, labels=[label])
            for value, count in counts.items():
                counter.add_metric([value], count)
            yield counter
        text = "Requests beyond a soft budget"
        yield CounterMetricFamily("footplate_soft_budget_exceeded", text, value=self._num_over_soft)
        for name, text, read in self._gauges:
            yield GaugeMetricFamily(f"footplate_{name}", text, value=read())


class FamilySource(Protocol):
    """Whatever else has something to tell."""

    def families(self) -> Iterator[Metric]:
        """As Prometheus wants them."""
        ...


class GatewayMetrics(Collector):
    """All that `/metrics` tells. Belongs to one event loop."""

    def __init__(self, stats: StatsSource, *others: FamilySource) -> None:
        self._stats = stats
        self._others = list(others)
        self._latencies: dict[tuple[str, str], EngineLatencies] = {}
        # None: what isn't served under any name is not told apart.
        self.allowed: AllowList | None = None
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def add(self, other: FamilySource) -> None:
        """Tell of something else too."""
        self._others.append(other)

    def latencies(self, model: str, engine: str) -> EngineLatencies:
        """The histograms of one engine of a served model (never of a name a client made up)."""
        found = self._latencies.get((model, engine))
        if found is None:
            found = self._latencies[model, engine] = EngineLatencies()
        return found

    def exposition(self) -> bytes:
        """The text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        yield from self._walled(engine_families(self._stats()))
        yield from self.collect_own()

    def collect_own(self) -> Iterable[Metric]:
        """What this gateway alone knows: all but what engines tell of themselves."""
        return self._walled(self._own_families())

    def _walled(self, families: Iterable[Metric]) -> Iterable[Metric]:
        return families if self.allowed is None else walled(families, self.allowed)

    def _own_families(self) -> Iterator[Metric]:
        yield from self._latency_families()
        for other in self._others:
            yield from other.families()

    def _latency_families(self) -> Iterator[Metric]:
        families = (
            ("vllm:time_to_first_token_seconds", "Time to the first token", "first_token"),
            ("vllm:inter_token_latency_seconds", "Time between tokens", "token_gap"),
            ("vllm:e2e_request_latency_seconds", "Time of a whole request", "request"),
            ("vllm:request_queue_time_seconds", "Time until the engine began a request", "queue"),
            ("vllm:request_prefill_time_seconds", "Time from there to its first token", "prefill"),
        )
        for name, text, attribute in families:
            family = HistogramMetricFamily(name, text, labels=LABELS)
            for labels, latencies in self._latencies.items():
                histogram: Histogram = getattr(latencies, attribute)
                family.add_metric(labels, histogram.cumulative(), histogram.total)
            yield family


_GAUGES: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("vllm:num_requests_running", "Requests in the running batch", lambda stats: stats.running),
    ("vllm:num_requests_waiting", "Requests that wait", lambda stats: stats.waiting),
    ("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1", lambda stats: stats.kv_usage),
)
_COUNTERS: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("vllm:prefix_cache_queries", "Prompt tokens looked up in the cache", lambda stats: stats.prefix_queries),
    ("vllm:prefix_cache_hits", "Prompt tokens found in the cache", lambda stats: stats.prefix_hits),
    ("vllm:num_preemptions", "Sequences preempted", lambda stats: stats.preemptions),
    ("vllm:prompt_tokens", "Prompt tokens taken in", lambda stats: stats.prompt_tokens),
    ("vllm:generation_tokens", "Tokens generated", lambda stats: stats.generation_tokens),
)


def engine_families(by_engine: Mapping[tuple[str, str], EngineStats]) -> Iterator[Metric]:
    """What engines tell of themselves, by model and engine, as Prometheus wants it."""
    for name, text, read in _GAUGES:
        gauge = GaugeMetricFamily(name, text, labels=LABELS)
        for labels, stats in by_engine.items():
            gauge.add_metric(labels, read(stats))
        yield gauge
    for name, text, read in _COUNTERS:
        counter = CounterMetricFamily(name, text, labels=LABELS)
        for labels, stats in by_engine.items():
            counter.add_metric(labels, read(stats))
        yield counter
    finished = CounterMetricFamily(
        "vllm:request_success", "Requests ended", labels=(*LABELS, "finished_reason")
    )
    cache = GaugeMetricFamily(
        "vllm:cache_config_info", "Shape of the KV cache", labels=(*LABELS, "block_size", "num_gpu_blocks")
    )
    for labels, stats in by_engine.items():
        for reason, count in stats.finished.items():
            finished.add_metric([*labels, reason], count)
        cache.add_metric([*labels, str(stats.block_size), str(stats.kv_blocks_total)], 1)
    yield finished
    yield cache
