"""What becomes of batches and their lines, for `/metrics`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

OUTCOMES = ("succeeded", "failed", "given_back", "found", "lost")
BATCH_ENDS = ("completed", "expired", "cancelled", "failed")


class BatchMetrics:
    """Counts of one gateway, and how much waits in all, as the queue last said."""

    def __init__(self) -> None:
        self.depth: Mapping[str, int] = {}
        self._lines: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
        self._batches: Counter[str] = Counter(dict.fromkeys(BATCH_ENDS, 0))

    def line_ended(self, outcome: str) -> None:
        """One attempt at a line has ended: `found`, by an answer that a lost worker had kept."""
        self._lines[outcome] += 1

    def batch_ended(self, status: str) -> None:
        """A batch is over."""
        self._batches[status] += 1

    def families(self) -> Iterator[Metric]:
        """As Prometheus wants them."""
        lines = CounterMetricFamily(
            "footplate_batch_lines", "Attempts at lines of batches that have ended", labels=["outcome"]
        )
        for outcome, count in self._lines.items():
            lines.add_metric([outcome], count)
        yield lines
        batches = CounterMetricFamily("footplate_batches", "Batches that are over", labels=["status"])
        for status, count in self._batches.items():
            batches.add_metric([status], count)
        yield batches
        for state in ("waiting", "running"):
            yield GaugeMetricFamily(
                f"footplate_batch_lines_{state}",
                f"Lines of batches that are {state}, over all gateways",
                value=self.depth.get(state, 0),
            )
