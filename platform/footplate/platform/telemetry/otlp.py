"""From spans, log lines and metric families to OTLP messages: the only place that writes them.

Each name and value goes through the allow-list here, so nothing else than what is on it can be written. There
is no status message, no trace state, no link, no body beyond a log line's `event`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from prometheus_client.metrics_core import Metric

from footplate.platform.telemetry import allow_list, wire
from footplate.platform.telemetry.allow_list import AllowList
from footplate.platform.telemetry.spans import INTERNAL, SERVER, Span
from footplate.platform.telemetry.wire import of_bytes, of_double, of_fixed64, of_integer

_SCOPE = of_bytes(1, b"footplate")
_CUMULATIVE = of_integer(2, 2)
_STATUS_ERROR = of_bytes(15, of_integer(3, 2))
# A span's fields that are as long in each.
_TRACE_ID, _SPAN_ID, _PARENT_ID = b"\x0a\x10", b"\x12\x08", b"\x22\x08"
_KINDS = {kind: of_integer(6, kind) for kind in (INTERNAL, SERVER)}
_BEGIN, _END = wire.tag(7, 1)[0], wire.tag(8, 1)[0]
_TIMES = struct.Struct("<BQBQ").pack
_SEVERITIES = {"debug": 5, "info": 9, "warning": 13, "error": 17, "critical": 21}
_MAX_CACHED = 8192
# Values that few requests share would push the others out of the cache.
_RARE = frozenset({"footplate.request.id", "gen_ai.response.time_to_first_chunk", "footplate.batch.id"})
# Names by the conventions, where Prometheus's differ from them.
_METRICS = {
    "gen_ai_server_request_duration_seconds": "gen_ai.server.request.duration",
    "gen_ai_server_time_to_first_token_seconds": "gen_ai.server.time_to_first_token",
    "gen_ai_server_time_per_output_token_seconds": "gen_ai.server.time_per_output_token",
}


class OtlpWriter:
    """Writes for one process. `resource`: what it says of itself."""

    def __init__(self, allowed: AllowList, resource: Mapping[str, Any]) -> None:
        self._allowed = allowed
        # Models come and go: what is cached holds for one set of them.
        self._cache: dict[tuple[str, type, Any], bytes] = {}
        self._names: dict[tuple[str, str], bytes] = {}
        self._cached_for: Any = None
        pairs = [(n, allowed.attribute(n, v, allow_list.RESOURCE)) for n, v in resource.items()]
        written = (of_bytes(1, wire.key_value(name, kept)) for name, kept in pairs if kept is not None)
        self._resource = of_bytes(1, b"".join(written))

    def traces(self, spans: Iterable[Span]) -> bytes:
        """An `ExportTraceServiceRequest`."""
        self._begin()
        return self._request([self._span(span) for span in spans])

    def logs(self, lines: Iterable[Mapping[str, Any]]) -> bytes:
        """An `ExportLogsServiceRequest`, of lines as `AllowList.log_line` takes them."""
        return self._request([self._log_record(line) for line in lines])

    def metrics(self, families: Iterable[Metric], begun_ns: int, now_ns: int) -> bytes:
        """An `ExportMetricsServiceRequest`, of sums since `begun_ns`."""
        written = (self._metric(family, begun_ns, now_ns) for family in families)
        return self._request([metric for metric in written if metric])

    def _request(self, entries: Sequence[bytes]) -> bytes:
        scoped = of_bytes(1, _SCOPE) + b"".join(of_bytes(2, entry) for entry in entries)
        return of_bytes(1, self._resource + of_bytes(2, scoped))

    def _span(self, span: Span) -> bytes:
        end_ns = span.end_ns if span.end_ns > span.begin_ns else span.begin_ns
        out = [
            _TRACE_ID,
            span.trace_id,
            _SPAN_ID,
            span.span_id,
            _PARENT_ID + span.parent_id if span.parent_id else b"",
            self._name(span.verb, span.subject),
            _KINDS[span.kind],
            _TIMES(_BEGIN, span.begin_ns, _END, end_ns),
            self._attributes(span.attributes),
        ]
        for name, at_ns in span.events:
            event = of_fixed64(1, at_ns) + of_bytes(2, self._allowed.event_name(name).encode())
            out.append(of_bytes(11, event))
        if span.is_error:
            out.append(_STATUS_ERROR)
        return b"".join(out)

    def _name(self, verb: str, subject: str) -> bytes:
        found = self._names.get((verb, subject))
        if found is None:
            found = of_bytes(5, self._allowed.span_name(verb, subject).encode())
            self._names[verb, subject] = found
        return found

    def _attributes(self, given: Mapping[str, Any]) -> bytes:
        out, cache = [], self._cache
        for name, value in given.items():
            # Equal numbers of different types are written differently.
            key = (name, value.__class__, value)
            found = None if name in _RARE else cache.get(key)
            if found is None:
                kept = self._allowed.attribute(name, value)
                found = b"" if kept is None else of_bytes(9, wire.key_value(name, kept))
                if name not in _RARE:
                    cache[key] = found
            out.append(found)
        return b"".join(out)

    def _begin(self) -> None:
        """Forget what was written for other names than those that are known now, or too much of it."""
        known = self._allowed.known_models()
        if len(self._cache) + len(self._names) > _MAX_CACHED or known != self._cached_for:
            self._cache.clear()
            self._names.clear()
            self._cached_for = known

    def _log_record(self, line: Mapping[str, Any]) -> bytes:
        fields = self._allowed.log_line(line)
        at_ns = _unix_ns(fields.pop("timestamp", None))
        level = fields.pop("level", "info")
        event = fields.pop("event", "")
        trace_id, span_id = fields.pop("trace_id", None), fields.pop("span_id", None)
        out = [
            of_fixed64(1, at_ns),
            of_fixed64(11, at_ns),
            of_integer(2, _SEVERITIES.get(level, 9)),
            of_bytes(3, str(level).upper().encode()),
            of_bytes(5, wire.any_value(str(event))),
        ]
        for name, value in fields.items():
            if value is not None:
                out.append(of_bytes(6, wire.key_value(name, value)))
        if trace_id and span_id:
            out += (of_bytes(9, bytes.fromhex(trace_id)), of_bytes(10, bytes.fromhex(span_id)))
        return b"".join(out)

    def _metric(self, family: Metric, begun_ns: int, now_ns: int) -> bytes:
        times = of_fixed64(2, begun_ns) + of_fixed64(3, now_ns)
        if family.type == "histogram":
            points = list(self._histogram_points(family, times))
            body = of_bytes(9, b"".join(of_bytes(1, point) for point in points) + _CUMULATIVE)
        else:
            points = [
                of_double(4, float(sample.value)) + times + self._labels(7, labels)
                for sample in family.samples
                if not sample.name.endswith("_created")
                and (labels := self._allowed.labels(sample.labels)) is not None
            ]
            joined = b"".join(of_bytes(1, point) for point in points)
            is_sum = family.type == "counter"
            body = of_bytes(7, joined + _CUMULATIVE + of_integer(3, 1)) if is_sum else of_bytes(5, joined)
        if not points:
            return b""
        name = _METRICS.get(family.name, family.name)
        unit = "s" if family.name.endswith("_seconds") else "1"
        return of_bytes(1, name.encode()) + of_bytes(3, unit.encode()) + body

    def _histogram_points(self, family: Metric, times: bytes) -> Iterator[bytes]:
        series: dict[tuple[tuple[str, str], ...], dict[str, Any]] = {}
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name != "le"}
            found = series.setdefault(tuple(labels.items()), {"bounds": [], "counts": [], "sum": 0.0})
            if sample.name.endswith("_bucket"):
                found["bounds"].append(float(sample.labels["le"]))
                found["counts"].append(int(sample.value))
            elif sample.name.endswith("_sum"):
                found["sum"] = float(sample.value)
        for pairs, found in series.items():
            labels_kept = self._allowed.labels(dict(pairs))
            if labels_kept is None:
                continue
            cumulative = found["counts"]
            counts = [count - before for count, before in zip(cumulative, [0, *cumulative], strict=False)]
            yield (
                times
                + of_fixed64(4, cumulative[-1])
                + of_double(5, found["sum"])
                + wire.packed_fixed64(6, counts)
                # The last bucket has no bound.
                + wire.packed_double(7, found["bounds"][:-1])
                + self._labels(9, labels_kept)
            )

    def _labels(self, number: int, labels: Mapping[str, str]) -> bytes:
        given = ((_convention_name(name), value) for name, value in labels.items() if value)
        return b"".join(of_bytes(number, wire.key_value(name, value)) for name, value in given)


_CONVENTIONS = {
    name.replace(".", "_"): name
    for name in (
        *("gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model"),
        *("gen_ai.response.model", "error.type"),
    )
}


def _convention_name(label: str) -> str:
    return _CONVENTIONS.get(label, label)


def _unix_ns(timestamp: str | None) -> int:
    try:
        return int(datetime.fromisoformat(timestamp or "").timestamp() * 1e9)
    except ValueError:
        return 0
