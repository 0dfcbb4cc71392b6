"""An OTLP receiver over real HTTP; it reads what comes with the classes of opentelemetry-proto.

`python -m tests.otlp_receiver` shows the traces that come to port 4318, or to the one it is given.
"""

from __future__ import annotations

import argparse
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

_KINDS: dict[str, Any] = {
    "/v1/traces": ExportTraceServiceRequest,
    "/v1/metrics": ExportMetricsServiceRequest,
    "/v1/logs": ExportLogsServiceRequest,
}


@dataclass
class Receiver:
    """What has come. `statuses`: what is answered, the last one for ever; `gate`: answers wait for it."""

    url: str = ""
    statuses: list[int] = field(default_factory=lambda: [200])
    headers: list[dict[str, str]] = field(default_factory=list)
    requests: list[tuple[str, Any]] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)
    changed: threading.Condition = field(default_factory=threading.Condition)
    answer: bytes = b""
    num_asked: int = 0

    def __post_init__(self) -> None:
        self.gate.set()

    def take(self, path: str, headers: dict[str, str], body: bytes) -> int:
        with self.changed:
            self.num_asked += 1
            status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
            self.headers.append(headers)
            if status == 200:
                self.bodies.append(body)
                self.requests.append((path, _KINDS[path].FromString(body)))
            self.changed.notify_all()
        return status

    def spans(self) -> list[Any]:
        """All spans that have come."""
        return [
            span
            for path, request in list(self.requests)
            if path == "/v1/traces"
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def log_records(self) -> list[Any]:
        return [
            record
            for path, request in list(self.requests)
            if path == "/v1/logs"
            for resource in request.resource_logs
            for scope in resource.scope_logs
            for record in scope.log_records
        ]

    def metrics(self) -> dict[str, Any]:
        """The last reading of each metric, by name."""
        return {
            metric.name: metric
            for path, request in list(self.requests)
            if path == "/v1/metrics"
            for resource in request.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }

    def wait_for(self, is_there: Any, timeout_s: float = 20.0) -> None:
        """Return once `is_there()`, asked after each arrival."""
        with self.changed:
            assert self.changed.wait_for(is_there, timeout_s), f"not there: {self.requests}"


@contextmanager
def receiving(port: int = 0) -> Iterator[Receiver]:
    """A receiver on this port of loopback; 0: a free one."""
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            receiver.gate.wait(30)
            status = receiver.take(self.path, {k.lower(): v for k, v in self.headers.items()}, body)
            self.send_response(status)
            self.send_header("content-length", str(len(receiver.answer)))
            self.end_headers()
            self.wfile.write(receiver.answer)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    receiver.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield receiver
    finally:
        receiver.gate.set()
        server.shutdown()
        server.server_close()
        thread.join()


def value_of(value: AnyValue) -> Any:
    """A value as Python has it."""
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [value_of(item) for item in value.array_value.values]
    return None if kind is None else getattr(value, kind)


def attributes(pairs: Any) -> dict[str, Any]:
    """Attributes by name; a name may stand there once."""
    found = {pair.key: value_of(pair.value) for pair in pairs if isinstance(pair, KeyValue)}
    assert len(found) == len(pairs)
    return found


def outline(spans: Sequence[Any]) -> Iterator[str]:
    """A line for each span and event, by trace: depth, milliseconds from its beginning, attributes."""
    for trace_id in dict.fromkeys(span.trace_id for span in spans):
        yield f"trace {trace_id.hex()}"
        trace = sorted(
            (span for span in spans if span.trace_id == trace_id),
            key=lambda span: (span.start_time_unix_nano, -span.end_time_unix_nano),
        )
        zero_ns = trace[0].start_time_unix_nano
        depths: dict[bytes, int] = {}
        for span in trace:
            depth = depths[span.span_id] = depths.get(span.parent_span_id, 0) + 1
            begin_ms, end_ms = (
                (at - zero_ns) / 1e6 for at in (span.start_time_unix_nano, span.end_time_unix_nano)
            )
            told = " ".join(f"{name}={value}" for name, value in attributes(span.attributes).items())
            yield f"{'  ' * depth}{span.name}  {begin_ms:.2f} to {end_ms:.2f}  {told}".rstrip()
            for event in span.events:
                yield f"{'  ' * (depth + 1)}· {event.name}  {(event.time_unix_nano - zero_ns) / 1e6:.2f}"


def show(port: int) -> None:
    """Print spans as they come, until Ctrl-C."""
    with receiving(port) as receiver:
        print(f"otlp_endpoint: {receiver.url}", flush=True)
        num_shown = 0
        while True:
            with receiver.changed:
                receiver.changed.wait_for(lambda known=num_shown: len(receiver.spans()) > known)
            spans = receiver.spans()
            print(*outline(spans[num_shown:]), sep="\n", flush=True)
            num_shown = len(spans)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Print the spans that come over OTLP/HTTP, until Ctrl-C.")
    parser.add_argument("port", nargs="?", type=int, default=4318)
    try:
        show(parser.parse_args().port)
    except KeyboardInterrupt:
        pass
