"""Sends what is told to an OTLP endpoint over HTTP, from a thread of its own with bounded queues.

`take…` never waits: what finds its queue full is dropped and counted. Neither an endpoint that is slow nor
one that is gone holds a request up.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import structlog
from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric

from footplate.platform.telemetry.bounded_post import Poster
from footplate.platform.telemetry.otlp import OtlpWriter
from footplate.platform.telemetry.spans import Span

_log = structlog.get_logger("footplate.telemetry")
_PATHS = {"traces": "/v1/traces", "metrics": "/v1/metrics", "logs": "/v1/logs"}
# By OTLP's specification; any other refusal would be one again.
_PASSING = frozenset({429, 502, 503, 504})
_MAX_WAIT_S = 5.0


@dataclass(frozen=True, slots=True)
class ExportTarget:
    """Where it goes: `http(s)://host:port`, to which OTLP's paths are added. `headers` may hold secrets."""

    endpoint: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class ExportLimits:
    """Bounds. Times in seconds; the queues in spans and lines."""

    max_spans: int = 16_384
    max_lines: int = 4_096
    max_metrics: int = 4
    max_batch: int = 512
    every_s: float = 1.0
    timeout_s: float = 5.0
    max_tries: int = 4
    complain_every_s: float = 60.0


class OtlpExporter:
    """A `SpanSink`, and the same for log lines and metrics. `start`, then `close`, which sends the rest."""

    def __init__(self, writer: OtlpWriter, target: ExportTarget, limits: ExportLimits | None = None) -> None:
        self._writer = writer
        self._target = target
        self._limits = limits or ExportLimits()
        self._spans: deque[Span] = deque()
        self._lines: deque[Mapping[str, Any]] = deque()
        self._metrics: deque[tuple[Sequence[Metric], int]] = deque()
        self._sent: Counter[str] = Counter(dict.fromkeys(_PATHS, 0))
        self._dropped: Counter[str] = Counter(dict.fromkeys(_PATHS, 0))
        self._failures: Counter[str] = Counter(dict.fromkeys(_PATHS, 0))
        self._begun_ns = time.time_ns()
        self._wake = threading.Event()
        self._sent_all = threading.Event()
        self._is_over = False
        self._complained_at = float("-inf")
        self._poster: Poster | None = None
        self._thread = threading.Thread(target=self._run, name="footplate-telemetry", daemon=True)

    def start(self) -> None:
        """Begin to send."""
        self._thread.start()

    def close(self, timeout_s: float = 3.0) -> None:
        """Send what is left, once, and stop; returns after `timeout_s` at the latest."""
        self._is_over = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Wait until what has been taken is sent or dropped; whether it was in time."""
        self._sent_all.clear()
        self._wake.set()
        return self._sent_all.wait(timeout_s)

    def take(self, spans: Sequence[Span], is_forced: bool = False) -> None:
        """As `SpanSink.take`. Forced spans find room while the queue is less than half full."""
        room = self._limits.max_spans // 2 if is_forced else self._limits.max_spans
        if len(self._spans) + len(spans) > room:
            self._dropped["traces"] += len(spans)
            return
        self._spans.extend(spans)
        if len(self._spans) >= self._limits.max_batch:
            self._wake.set()

    def take_line(self, fields: Mapping[str, Any]) -> None:
        """One log line; the same promise."""
        if len(self._lines) >= self._limits.max_lines:
            self._dropped["logs"] += 1
            return
        self._lines.append(fields)

    def take_metrics(self, families: Iterable[Metric]) -> None:
        """What all metrics stand at by now; the same promise. They are read here, on the caller's thread."""
        if len(self._metrics) >= self._limits.max_metrics:
            self._dropped["metrics"] += 1
            return
        self._metrics.append((list(families), time.time_ns()))

    def families(self) -> Iterator[Metric]:
        """What became of it, for `/metrics`."""
        for name, text, counts in (
            ("sent", "Spans, log lines and readings of metrics that an OTLP endpoint has taken", self._sent),
            ("dropped", "Those that were dropped: a queue was full, or the endpoint did not take them",
             self._dropped),
            ("failures", "Times an OTLP endpoint did not take what was sent", self._failures),
        ):  # fmt: skip
            family = CounterMetricFamily(f"footplate_telemetry_{name}", text, labels=["signal"])
            for signal, count in counts.items():
                family.add_metric([signal], count)
            yield family

    def _run(self) -> None:
        while not self._is_over:
            self._wake.wait(self._limits.every_s)
            self._wake.clear()
            self._send_all()
            self._sent_all.set()
        self._send_all()
        if self._poster is not None:
            self._poster.close()

    def _send_all(self) -> None:
        while self._spans:
            spans = _taken(self._spans, self._limits.max_batch)
            self._send("traces", len(spans), partial(self._writer.traces, _gently(spans)))
        while self._lines:
            lines = _taken(self._lines, self._limits.max_batch)
            self._send("logs", len(lines), partial(self._writer.logs, lines))
        while self._metrics:
            families, at_ns = self._metrics.popleft()
            self._send("metrics", 1, partial(self._writer.metrics, families, self._begun_ns, at_ns))

    def _send(self, signal: str, count: int, make: Callable[[], bytes]) -> None:
        try:
            body = make()
            is_sent = self._deliver(signal, body)
        except Exception as error:
            # Nothing of telemetry may end the thread that sends it.
            self._complain(type(error).__name__)
            is_sent = False
        (self._sent if is_sent else self._dropped)[signal] += count

    def _deliver(self, signal: str, body: bytes) -> bool:
        wait_s = 0.5
        for attempt in range(1, self._limits.max_tries + 1):
            status, after_s = self._post(_PATHS[signal], body)
            if 200 <= status < 300:
                return True
            self._failures[signal] += 1
            self._complain(f"status_{status}" if status else "no_answer")
            may_pass = status == 0 or status in _PASSING
            if not may_pass or self._is_over or attempt == self._limits.max_tries:
                return False
            self._wake.wait(min(after_s or wait_s, _MAX_WAIT_S))
            if not self._is_over:
                self._wake.clear()
            wait_s *= 2
        return False

    def _post(self, path: str, body: bytes) -> tuple[int, float | None]:
        """The status (0: no answer) and what `Retry-After` says. What the endpoint writes is not kept."""
        if self._poster is None:
            target = self._target
            self._poster = Poster(target.endpoint, target.headers, self._limits.timeout_s)
        status, after = self._poster.post(path, body)
        return status, float(after) if after.isascii() and after.isdigit() else None

    def _complain(self, why: str) -> None:
        """One line a minute, by code: errors of connections quote URLs, and those may hold secrets."""
        now = time.monotonic()
        if now - self._complained_at > self._limits.complain_every_s:
            self._complained_at = now
            _log.warning("telemetry is not taken by its endpoint", code=why.lower())


def _taken(queue: deque[Any], most: int) -> list[Any]:
    return [queue.popleft() for _ in range(min(most, len(queue)))]


def _gently(spans: Sequence[Span]) -> Iterator[Span]:
    """Lets requests' thread come in between: what is long for Python's lock is short here."""
    for number, span in enumerate(spans):
        if number % 32 == 31:
            time.sleep(0)
        yield span
