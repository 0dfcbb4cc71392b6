"""What is exported arrives, and an endpoint that is slow, wrong or gone costs no request anything."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import structlog
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from footplate.platform.telemetry.genai_metrics import GenAiMetrics
from footplate.platform.telemetry.otlp_export import OtlpExporter
from footplate.platform.telemetry.setup import Telemetry
from footplate.platform.telemetry.spans import Span
from tests.otlp_receiver import Receiver, attributes

SECRET = "Bearer s3cr3t-canary"


def span(number: int = 0, **fields: Any) -> Span:
    return Span(bytes([1] * 16), number.to_bytes(8, "big"), b"", "footplate.queue", 1, 2, **fields)


def counts(exporter: OtlpExporter) -> dict[str, dict[str, float]]:
    return {
        family.name.removeprefix("footplate_telemetry_"): {
            sample.labels["signal"]: sample.value for sample in family.samples
        }
        for family in exporter.families()
    }


def until(is_true: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_headers_and_resource_go_along(make_telemetry: Callable[..., Telemetry], receiver: Receiver) -> None:
    exporter = make_telemetry(headers={"authorization": SECRET}).exporter
    exporter.take([span()])
    receiver.wait_for(receiver.spans)
    assert receiver.headers[0]["authorization"] == SECRET
    assert receiver.headers[0]["content-type"] == "application/x-protobuf"
    [(_, request)] = receiver.requests
    resource = attributes(request.resource_spans[0].resource.attributes)
    assert resource == {"service.name": "footplate-gateway", "service.instance.id": "host-1"}


def test_a_slow_endpoint_holds_nobody_up_and_what_finds_no_room_is_counted(
    make_telemetry: Callable[..., Telemetry], receiver: Receiver
) -> None:
    exporter = make_telemetry(max_spans=100, max_batch=10).exporter
    receiver.gate.clear()
    begin = time.perf_counter()
    for number in range(10_000):
        exporter.take([span(number)])
        exporter.take_line({"event": "x"})
        exporter.take_metrics(())
    assert time.perf_counter() - begin < 2.0
    dropped = counts(exporter)["dropped"]
    assert dropped["traces"] >= 10_000 - 100 - 10
    assert dropped["logs"] > 0 and dropped["metrics"] > 0
    receiver.gate.set()
    until(lambda: counts(exporter)["sent"]["traces"] == 10_000 - dropped["traces"])
    assert len(receiver.spans()) == 10_000 - dropped["traces"]


def test_what_clients_force_leaves_half_of_the_queue_to_others(
    make_telemetry: Callable[..., Telemetry], receiver: Receiver
) -> None:
    exporter = make_telemetry(max_spans=100, max_batch=1_000, every_s=60.0).exporter
    for number in range(200):
        exporter.take([span(number)], is_forced=True)
    assert counts(exporter)["dropped"]["traces"] == 150
    for number in range(50):
        exporter.take([span(number)])
    assert counts(exporter)["dropped"]["traces"] == 150
    assert exporter.flush() and len(receiver.spans()) == 100


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_what_passes_is_tried_again(
    make_telemetry: Callable[..., Telemetry], receiver: Receiver, status: int
) -> None:
    receiver.statuses = [status, 200]
    exporter = make_telemetry().exporter
    exporter.take([span()])
    receiver.wait_for(receiver.spans)
    until(lambda: counts(exporter)["sent"]["traces"] == 1)
    assert counts(exporter)["failures"]["traces"] == 1


def test_a_refusal_is_not_tried_again_and_says_nothing_of_itself(
    make_telemetry: Callable[..., Telemetry], receiver: Receiver
) -> None:
    receiver.statuses, receiver.answer = [400, 200], b"canary of the endpoint"
    with structlog.testing.capture_logs() as lines:
        exporter = make_telemetry(headers={"authorization": SECRET}).exporter
        exporter.take([span()])
        until(lambda: counts(exporter)["dropped"]["traces"] == 1)
        exporter.take([span()])
        receiver.wait_for(receiver.spans)
    assert receiver.num_asked == 2
    [line] = lines
    assert line["code"] == "status_400"
    assert "canary" not in str(lines) and receiver.url not in str(lines)


def test_an_endpoint_that_is_gone_is_told_of_once(
    make_telemetry: Callable[..., Telemetry], receiver: Receiver
) -> None:
    with structlog.testing.capture_logs() as lines:
        telemetry = make_telemetry(max_tries=1)
        exporter = telemetry.exporter
        exporter._target = type(exporter._target)("http://127.0.0.1:1", {"authorization": SECRET})
        for number in range(3):
            exporter.take([span(number)])
            until(lambda number=number: counts(exporter)["dropped"]["traces"] == number + 1)
    [line] = lines
    assert line["code"] == "no_answer"
    assert "canary" not in str(lines) and "127.0.0.1" not in str(lines)


def test_closing_sends_what_is_left_and_waits_for_no_dead_endpoint(
    make_telemetry: Callable[..., Telemetry], receiver: Receiver
) -> None:
    exporter = make_telemetry(every_s=60.0).exporter
    exporter.take([span()])
    exporter.close()
    assert len(receiver.spans()) == 1
    stuck = make_telemetry(every_s=60.0).exporter
    receiver.gate.clear()
    stuck.take([span()])
    begin = time.monotonic()
    stuck.close(timeout_s=0.2)
    assert time.monotonic() - begin < 5


def test_what_is_not_on_the_list_is_not_written(
    make_telemetry: Callable[..., Telemetry], receiver: Receiver
) -> None:
    exporter = make_telemetry().exporter
    exporter.take(
        [
            Span(
                bytes(15) + b"1", b"12345678", b"", "canary verb", 1, 2,
                {
                    "gen_ai.input.messages": "canary", "gen_ai.request.model": "canary-model",
                    "http.route": "/canary of a client", "error.type": "canary: text",
                    "footplate.tenant.id": "canary with spaces", "gen_ai.usage.input_tokens": "canary",
                    "gen_ai.request.temperature": float("nan"), "footplate.reason": "Canary",
                },
                events=[("canary", 1)],
                is_error=True,
            )
        ]
    )  # fmt: skip
    exporter.take_line({"event": "failed", "level": "error", "prompt": "canary", "route": "canary"})
    family = CounterMetricFamily("footplate_x", "X", labels=["reason"])
    family.add_metric(["some canary text"], 1)
    family.add_metric(["full"], 2)
    unknown = GaugeMetricFamily("footplate_y", "Y", labels=["prompt"])
    unknown.add_metric(["canary"], 1)
    exporter.take_metrics([family, unknown])
    receiver.wait_for(lambda: receiver.spans() and receiver.log_records() and receiver.metrics())
    assert b"anary" not in b"".join(receiver.bodies)
    [found] = receiver.spans()
    assert (found.name, [event.name for event in found.events]) == ("other", ["other"])
    assert attributes(found.attributes) == {"gen_ai.request.model": "_unknown"}
    assert list(receiver.metrics()) == ["footplate_x"]
    [point] = receiver.metrics()["footplate_x"].sum.data_points
    assert (attributes(point.attributes), point.as_double) == ({"reason": "full"}, 2.0)


def test_metrics_keep_their_numbers_and_get_their_conventions_names(
    make_telemetry: Callable[..., Telemetry], receiver: Receiver
) -> None:
    telemetry = make_telemetry()
    telemetry.allowed.known_models = lambda: frozenset({"m"})
    genai = GenAiMetrics()
    genai.ended(("chat", "m", "m", ""), 0.02, 0.005, 0.03)
    genai.ended(("chat", "m", "m", "EngineDead"), 100.0)
    gauge = GaugeMetricFamily("footplate_open", "Open")
    gauge.add_metric([], 3)
    telemetry.exporter.take_metrics([*genai.families(), gauge])
    receiver.wait_for(receiver.metrics)
    found = receiver.metrics()
    assert found["footplate_open"].gauge.data_points[0].as_double == 3
    duration = found["gen_ai.server.request.duration"]
    assert (duration.unit, duration.histogram.aggregation_temporality) == ("s", 2)
    good, failed = duration.histogram.data_points
    assert attributes(good.attributes) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "footplate",
        "gen_ai.request.model": "m",
        "gen_ai.response.model": "m",
    }
    assert attributes(failed.attributes)["error.type"] == "EngineDead"
    assert list(good.explicit_bounds) == [round(0.01 * 2**power, 2) for power in range(14)]
    assert (good.count, good.sum, list(good.bucket_counts)[:3]) == (1, 0.02, [0, 1, 0])
    assert (failed.count, failed.bucket_counts[-1]) == (1, 1)
    assert good.start_time_unix_nano < good.time_unix_nano
    assert {"gen_ai.server.time_to_first_token", "gen_ai.server.time_per_output_token"} <= set(found)


def test_log_lines_become_records(make_telemetry: Callable[..., Telemetry], receiver: Receiver) -> None:
    exporter = make_telemetry().exporter
    line = {
        "event": "request failed", "level": "error", "logger": "footplate.edge", "status": 500,
        "timestamp": "2026-11-01T12:00:00.500000Z", "trace_id": "ab" * 16, "span_id": "cd" * 8,
        "where": ["edge.py:1 send", "a b c:1 x", "chat.py:22 work"], "code": None,
    }  # fmt: skip
    exporter.take_line(line)
    receiver.wait_for(receiver.log_records)
    [record] = receiver.log_records()
    assert (record.severity_number, record.severity_text) == (17, "ERROR")
    assert record.body.string_value == "request failed"
    assert record.time_unix_nano == 1_793_534_400_500_000_000
    assert (record.trace_id.hex(), record.span_id.hex()) == ("ab" * 16, "cd" * 8)
    assert attributes(record.attributes) == {
        "logger": "footplate.edge",
        "status": 500,
        "where": ["edge.py:1 send", "chat.py:22 work"],
    }


@pytest.mark.parametrize("number", [0, 1, 127, 128, 300, 2**31, 2**63 - 1, -1, -(2**63) + 1])
def test_numbers_of_every_length_are_read_as_they_were_written(
    make_telemetry: Callable[..., Telemetry], receiver: Receiver, number: int
) -> None:
    exporter = make_telemetry().exporter
    exporter.take([span(attributes={"gen_ai.usage.input_tokens": number, "gen_ai.request.stream": True})])
    exporter.take([span(1, attributes={"gen_ai.request.temperature": 1, "footplate.retry_count": 1})])
    receiver.wait_for(lambda: len(receiver.spans()) == 2)
    first, second = receiver.spans()
    assert attributes(first.attributes) == {
        "gen_ai.usage.input_tokens": number,
        "gen_ai.request.stream": True,
    }
    assert attributes(second.attributes) == {"gen_ai.request.temperature": 1, "footplate.retry_count": 1}
