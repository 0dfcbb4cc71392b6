"""What became of usage events, for `/metrics`: the writer's observer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from footplate.billing.errors import JournalFailed
from footplate.billing.store import CommitOutcome
from footplate.platform.metrics import Histogram

_COMMIT_S = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)


class UsageMetrics:
    """Counts of one gateway. `gauges` are read when asked for: name under `footplate_`, help, value."""

    def __init__(self) -> None:
        self.gauges: list[tuple[str, str, Callable[[], float]]] = []
        self._outcomes: Counter[str] = Counter(dict.fromkeys(map(str, CommitOutcome), 0))
        self._commits = Histogram(_COMMIT_S)
        self._num_journalled = 0
        self._num_replayed = 0
        self._num_refused = 0
        self._store_failures = 0
        self._journal_failures = 0

    def committed(self, outcomes: Sequence[CommitOutcome], took_s: float, *, is_replay: bool) -> None:
        """A group is in the database."""
        self._outcomes.update(str(outcome) for outcome in outcomes)
        self._num_replayed += len(outcomes) if is_replay else 0
        self._commits.observe(took_s)

    def journalled(self, num_events: int) -> None:
        """A group is in the journal."""
        self._num_journalled += num_events

    def store_failed(self) -> None:
        """The database gave no answer."""
        self._store_failures += 1

    def journal_failed(self, error: JournalFailed) -> None:
        """The journal takes no events."""
        self._journal_failures += 1

    def refused(self, num_events: int) -> None:
        """The database refuses events as they are."""
        self._num_refused += num_events

    def families(self) -> Iterator[Metric]:
        """As Prometheus wants them."""
        name = "footplate_usage_events"
        outcomes = CounterMetricFamily(name, "Usage events that the database has taken", labels=["outcome"])
        for outcome, count in self._outcomes.items():
            outcomes.add_metric([outcome], count)
        yield outcomes
        counters = (
            ("usage_journal_events", "Events that went to the local journal", self._num_journalled),
            ("usage_replayed_events", "Events that came from a local journal", self._num_replayed),
            ("usage_quarantined", "Events without a price", self._outcomes[CommitOutcome.QUARANTINED]),
            ("usage_refused_events", "Events put aside: the database can't hold them", self._num_refused),
            ("usage_store_failures", "Times the database of events gave no answer", self._store_failures),
            ("usage_journal_failures", "Times the local journal took no events", self._journal_failures),
        )
        for short, text, value in counters:
            yield CounterMetricFamily(f"footplate_{short}", text, value=value)
        commits = HistogramMetricFamily("footplate_usage_commit_seconds", "Time of a commit of events")
        commits.add_metric([], self._commits.cumulative(), self._commits.total)
        yield commits
        for short, text, read in self.gauges:
            yield GaugeMetricFamily(f"footplate_{short}", text, value=read())
