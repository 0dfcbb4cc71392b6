"""What a gateway's routers decided, for `/metrics`. Labels are served models and reasons, nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from footplate.platform.metrics import Histogram
from footplate.routing.router import Decision

_DECISION_S = (10e-6, 20e-6, 50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 5e-3)


class RoutingMetrics:
    """Counts of one gateway. `index_sizes`: of each model, keys in the index and events that were missed."""

    def __init__(self) -> None:
        self.index_sizes: Callable[[], Mapping[str, tuple[int, int]]] = dict
        self.num_moved: Callable[[], int] = int
        self._decisions: Counter[tuple[str, str]] = Counter()
        self._asked: Counter[str] = Counter()
        self._found: Counter[str] = Counter()
        self._deciding: dict[str, Histogram] = {}
        self._hashing: dict[str, Histogram] = {}

    def decided(self, model: str, decision: Decision, hashing_s: float, deciding_s: float) -> None:
        """One request's replica was chosen."""
        if not decision.ranks:
            return
        first = decision.ranks[0]
        self._decisions[model, first.reason.value] += 1
        if decision.is_matched:
            self._asked[model] += decision.num_prompt_tokens
            self._found[model] += first.num_cached_tokens
        for histograms, seconds in ((self._deciding, deciding_s), (self._hashing, hashing_s)):
            histogram = histograms.get(model)
            if histogram is None:
                histogram = histograms[model] = Histogram(_DECISION_S)
            histogram.observe(seconds)

    def families(self) -> Iterator[Metric]:
        """As Prometheus wants them."""
        decisions = CounterMetricFamily(
            "footplate_routing_decisions",
            "Requests by why their replica was chosen",
            labels=["model_name", "reason"],
        )
        for (model, reason), count in self._decisions.items():
            decisions.add_metric([model, reason], count)
        yield decisions
        for name, text, counts in (
            ("footplate_routing_prompt_tokens", "Tokens of prompts that were routed", self._asked),
            (
                "footplate_routing_expected_hit_tokens",
                "Of those, tokens that the chosen replica was thought to hold",
                self._found,
            ),
        ):
            family = CounterMetricFamily(name, text, labels=["model_name"])
            for model, count in counts.items():
                family.add_metric([model], count)
            yield family
        yield CounterMetricFamily(
            "footplate_routing_moved_requests",
            "Requests that ran again elsewhere: their replica died before a token",
            value=self.num_moved(),
        )
        sizes = GaugeMetricFamily(
            "footplate_routing_index_blocks", "Blocks in the prefix index", labels=["model_name"]
        )
        gaps = CounterMetricFamily(
            "footplate_routing_missed_events",
            "Gaps in what replicas told of their blocks",
            labels=["model_name"],
        )
        for model, (size, num_gaps) in self.index_sizes().items():
            sizes.add_metric([model], size)
            gaps.add_metric([model], num_gaps)
        yield from (sizes, gaps)
        for name, text, histograms in (
            ("footplate_routing_decision_seconds", "Time of a routing decision", self._deciding),
            ("footplate_routing_hashing_seconds", "Time to hash a prompt's blocks", self._hashing),
        ):
            times = HistogramMetricFamily(name, text, labels=["model_name"])
            for model, histogram in histograms.items():
                times.add_metric([model], histogram.cumulative(), histogram.total)
            yield times
