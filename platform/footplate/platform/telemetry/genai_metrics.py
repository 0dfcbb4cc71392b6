"""The GenAI conventions' server metrics, recorded once for `/metrics` and for OTLP.

Source of names and buckets: OpenTelemetry semantic conventions for generative AI, development status.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from footplate.platform.metrics import Histogram

_REQUEST_S = tuple(round(0.01 * 2**power, 2) for power in range(14))
_FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
_LABELS = (
    *("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model"),
    *("gen_ai_response_model", "error_type"),
)
_Key = tuple[str, str, str, str]


class GenAiMetrics:
    """Histograms of one gateway, by operation, model asked for, model that answered, and kind of failure."""

    def __init__(self) -> None:
        self._requests: dict[_Key, Histogram] = {}
        self._first_tokens: dict[_Key, Histogram] = {}
        self._tokens: dict[_Key, Histogram] = {}

    def ended(
        self,
        key: _Key,
        duration_s: float,
        first_token_s: float | None = None,
        token_s: float | None = None,
    ) -> None:
        """A request for a model is over; `key`: operation, model asked for, model that answered, error.

        `token_s`: time for each token behind the first, where there is one.
        """
        _observe(self._requests, key, _REQUEST_S, duration_s)
        if first_token_s is not None:
            _observe(self._first_tokens, key, _FIRST_TOKEN_S, first_token_s)
        if token_s is not None:
            _observe(self._tokens, key, _TOKEN_S, token_s)

    def families(self) -> Iterator[Metric]:
        """As Prometheus wants them."""
        for name, text, histograms in (
            ("request_duration", "Time of a request for a model", self._requests),
            ("time_to_first_token", "Time to the first token of an answer", self._first_tokens),
            ("time_per_output_token", "Time for each token behind the first", self._tokens),
        ):
            family = HistogramMetricFamily(f"gen_ai_server_{name}_seconds", text, labels=_LABELS)
            for (operation, asked, answered, error), histogram in histograms.items():
                labels = [operation, "footplate", asked, answered, error]
                family.add_metric(labels, histogram.cumulative(), histogram.total)
            yield family


def _observe(histograms: dict[_Key, Histogram], key: _Key, bounds: tuple[float, ...], value: float) -> None:
    found = histograms.get(key)
    if found is None:
        found = histograms[key] = Histogram(bounds)
    found.observe(value)
