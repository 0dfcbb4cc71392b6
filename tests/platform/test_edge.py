from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from structlog.testing import capture_logs

from footplate.engine.errors import EngineDead, EngineOverloaded
from footplate.engine.types import EngineStats
from footplate.platform.errors import NoRoomForBody
from footplate.platform.http.body_room import BodyRoom
from footplate.platform.http.edge import EdgeLimits
from footplate.platform.http.health import Readiness
from footplate.tenancy.errors import StoreUnavailable
from tests.builders import ADMIN_KEY, SCRAPE_KEY, TENANT_KEY, model_card
from tests.fakes import KnownKeys
from tests.platform.conftest import Rig, chat_body, events, text_body

pytestmark = pytest.mark.anyio
PATH = "/v1/chat/completions"
CANARY = "canary-41c7e2"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Wire:
    """A client at the ASGI seam: it can leave at any moment."""

    def __init__(self, body: dict[str, Any], path: str = PATH) -> None:
        data = json.dumps(body).encode()
        self.scope: dict[str, Any] = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "path": path,
            "raw_path": path.encode(), "root_path": "", "scheme": "http", "query_string": b"",
            "headers": [(b"authorization", f"Bearer {TENANT_KEY}".encode())],
        }  # fmt: skip
        self._incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._incoming.put_nowait({"type": "http.request", "body": data, "more_body": False})
        self.sent: list[dict[str, Any]] = []
        self.has_body = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        return await self._incoming.get()

    async def send(self, message: Any) -> None:
        self.sent.append(dict(message))
        if message["type"] == "http.response.body":
            self.has_body.set()

    def leave(self) -> None:
        self._incoming.put_nowait({"type": "http.disconnect"})


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_before_the_first_byte_ends_the_generation(rig: Rig, stream: bool) -> None:
    rig.says("Hello there.", hold_after=0)
    wire = Wire(chat_body(stream=stream))
    call = asyncio.create_task(rig.app(wire.scope, wire.receive, wire.send))
    await _until(lambda: bool(rig.engine.generations))
    wire.leave()
    await asyncio.wait_for(call, 5)
    await _until(rig.engine.generations[0].closed.is_set)
    assert not wire.sent


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_in_the_middle_ends_the_generation(rig: Rig, stream: bool) -> None:
    rig.says("Hello there, all of you.", hold_after=2)
    wire = Wire(chat_body(stream=stream))
    call = asyncio.create_task(rig.app(wire.scope, wire.receive, wire.send))
    if stream:
        await asyncio.wait_for(wire.has_body.wait(), 5)
    await _until(lambda: bool(rig.engine.generations))
    await asyncio.sleep(0)
    wire.leave()
    await asyncio.wait_for(call, 5)
    await _until(rig.engine.generations[0].closed.is_set)
    assert b"[DONE]" not in b"".join(message.get("body", b"") for message in wire.sent)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_reads_nothing_is_cut_and_its_generation_ends(
    make_rig: Callable[..., Rig], stream: bool
) -> None:
    rig = make_rig(edge=EdgeLimits(max_stall_s=0.01))
    rig.says("one two three four five six seven")
    stalled, others = Wire(chat_body(stream=stream)), Wire(chat_body(stream=True))

    async def send_without_a_reader(message: Any) -> None:
        stalled.sent.append(message)
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    with capture_logs() as logs:
        call = asyncio.create_task(rig.app(stalled.scope, stalled.receive, send_without_a_reader))
        await rig.app(others.scope, others.receive, others.send)
        with pytest.raises(ConnectionAbortedError):
            await asyncio.wait_for(call, 5)
    await _until(lambda: all(generation.closed.is_set() for generation in rig.engine.generations))
    # One send was held back; nothing was made or kept behind it, and it is no fault of the server.
    assert len(stalled.sent) == 2
    assert b"[DONE]" in others.sent[-1]["body"]
    assert not logs


async def test_a_client_that_leaves_ends_all_its_prompts(rig: Rig) -> None:
    rig.says("Hello there.", hold_after=1)
    wire = Wire(text_body(prompt=["a", "b", "c"], stream=True), "/v1/completions")
    call = asyncio.create_task(rig.app(wire.scope, wire.receive, wire.send))
    await asyncio.wait_for(wire.has_body.wait(), 5)
    wire.leave()
    await asyncio.wait_for(call, 5)
    assert len(rig.engine.generations) == 3
    await _until(lambda: all(generation.closed.is_set() for generation in rig.engine.generations))


async def test_a_server_that_shuts_down_cancels_for_real(rig: Rig) -> None:
    rig.says("Hello there.", hold_after=1)
    wire = Wire(chat_body(stream=True))
    call = asyncio.create_task(rig.app(wire.scope, wire.receive, wire.send))
    await asyncio.wait_for(wire.has_body.wait(), 5)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await _until(rig.engine.generations[0].closed.is_set)


async def test_pending_events_go_out_in_one_send(rig: Rig) -> None:
    rig.says("one two three four five six seven", steps_per_batch=100)
    wire = Wire(chat_body(stream=True))
    await rig.app(wire.scope, wire.receive, wire.send)
    bodies = [message["body"] for message in wire.sent if message["type"] == "http.response.body"]
    assert len(bodies) == 2
    assert bodies[0].count(b"data: ") == 1 + 7 + 1


async def test_every_response_has_an_id_of_its_own_and_its_time(rig: Rig) -> None:
    async with rig.http() as http:
        responses = [
            await http.post(PATH, json=chat_body()),
            await http.post(PATH, json=chat_body(stream=True)),
            await http.post(PATH, json={}),
            await http.post(PATH, content=b"{", headers={"x-request-id": "mine"}),
            await http.get("/nowhere"),
            await http.delete(PATH),
            await http.get("/healthz"),
            await http.get("/v1/models/none"),
        ]
    assert [response.status_code for response in responses] == [200, 200, 400, 400, 404, 405, 200, 404]
    ids = {response.headers["x-request-id"] for response in responses}
    assert len(ids) == len(responses) and "mine" not in ids
    assert all(int(response.headers["openai-processing-ms"]) >= 0 for response in responses)
    for response in responses:
        if response.status_code >= 400:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"model": "a\xff"}', b'{"prompt": "\\ud800"}', b"1" * 5000],
)
async def test_bodies_that_are_no_json_object_are_refused(rig: Rig, data: bytes) -> None:
    for path in (PATH, "/v1/completions", "/v1/tokenize", "/v1/detokenize"):
        response = await rig.post(path, data)
        assert response.status_code == 400
        assert response.json()["error"]["type"] == "invalid_request_error"


def _deep(levels: int) -> bytes:
    """A body that is an object around lists."""
    return b'{"model":"m","messages":' + b"[" * (levels - 1) + b"]" * (levels - 1) + b"}"


@pytest.mark.parametrize(
    ("data", "code", "words"),
    [
        (_deep(19_000), "invalid_value", "deeper than 200 levels"),
        (_deep(202), "invalid_value", "deeper than 200 levels"),
        (_deep(200), "invalid_value", None),
        (b'{"model":"m","max_tokens":' + b"9" * 5000 + b"}", "invalid_value", "more than 4300 digits"),
        (b'{"model":"m","max_tokens":' + b"9" * 4301 + b"}", "invalid_value", "more than 4300 digits"),
        (b'{"model":"m","max_tokens":' + b"9" * 4300 + b"}", "invalid_value", "less than or equal"),
        (b'{"model":"m","max_tokens":', "invalid_json", "not valid JSON"),
        (b'{"model":"\xff"}', "invalid_json", "not valid JSON"),
    ],
    ids=[
        "very deep",
        "just too deep",
        "deep",
        "5000 digits",
        "4301 digits",
        "4300 digits",
        "cut",
        "no UTF-8",
    ],
)
async def test_a_body_is_told_what_is_wrong_with_it(
    rig: Rig, data: bytes, code: str, words: str | None
) -> None:
    response = await rig.post(PATH, data)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, code)
    assert (words or "Input") in error["message"]
    assert ("not valid JSON" in error["message"]) == (code == "invalid_json")


async def test_the_schema_needs_a_key_of_any_role(rig: Rig) -> None:
    statuses = {}
    for key in (None, "fp_nobody_wrong", TENANT_KEY, ADMIN_KEY, SCRAPE_KEY):
        async with rig.http(key) as http:
            response = await http.get("/openapi.json")
            statuses[key] = response.status_code
            assert (await http.get("/docs")).status_code == (await http.get("/redoc")).status_code == 404
    assert list(statuses.values()) == [401, 401, 200, 200, 200]
    assert "/v1/chat/completions" in response.json()["paths"]


async def _chunks(count: int, size: int) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield b"a" * size


async def test_too_large_a_body_is_refused_before_it_is_read(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(edge=EdgeLimits(max_body_bytes=1000))
    announced = Wire(chat_body())
    announced.scope["headers"].append((b"content-length", b"100000000"))
    await rig.app(announced.scope, announced.receive, announced.send)
    assert announced.sent[0]["status"] == 413
    async with rig.http() as http:
        whole = await http.post(PATH, content=b"a" * 1001)
        chunked = await http.post(PATH, content=_chunks(100, 100))
        fits = await http.post(PATH, json=chat_body())
    assert (whole.status_code, chunked.status_code, fits.status_code) == (413, 413, 200)
    assert chunked.json()["error"]["code"] == "request_too_large"


async def test_an_unknown_caller_is_refused_before_the_body_is_read(rig: Rig) -> None:
    wire = Wire(chat_body())
    wire.scope["headers"] = []
    wire._incoming = asyncio.Queue()
    await asyncio.wait_for(rig.app(wire.scope, wire.receive, wire.send), 5)
    assert wire.sent[0]["status"] == 401


async def test_a_slow_body_times_out(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(edge=EdgeLimits(max_body_s=0.01))
    wire = Wire(chat_body())
    wire._incoming = asyncio.Queue()
    wire._incoming.put_nowait({"type": "http.request", "body": b"{", "more_body": True})
    await asyncio.wait_for(rig.app(wire.scope, wire.receive, wire.send), 5)
    assert wire.sent[0]["status"] == 408


def _begun(num_bytes: int) -> Wire:
    """A client that has sent so much of its body, and sends the rest never."""
    wire = Wire(chat_body())
    wire._incoming = asyncio.Queue()
    wire._incoming.put_nowait({"type": "http.request", "body": b"a" * num_bytes, "more_body": True})
    return wire


async def test_bodies_that_come_slowly_take_so_much_memory_and_no_more(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(edge=EdgeLimits(max_held_bytes=4_000))
    held, more = _begun(1_900), _begun(200)
    call = asyncio.create_task(rig.app(held.scope, held.receive, held.send))
    await _until(held._incoming.empty)
    await asyncio.wait_for(rig.app(more.scope, more.receive, more.send), 5)
    start, body = more.sent[:2]
    assert start["status"] == 503 and b"2000 bytes" in body["body"]
    assert {(b"retry-after", b"1"), (b"connection", b"close")} <= set(start["headers"])
    held.leave()
    await asyncio.wait_for(call, 5)
    # All of it came back, of the one that was refused too.
    async with rig.http() as http:
        whole = await http.post(PATH, content=json.dumps(chat_body()).encode().ljust(1_900))
    assert whole.status_code == 200


def test_one_tenant_has_half_of_the_room_for_bodies() -> None:
    room = BodyRoom(4_000)
    room.take("red", 2_000)
    with pytest.raises(NoRoomForBody, match="This tenant"):
        room.take("red", 1)
    room.take("blue", 1_999)
    with pytest.raises(NoRoomForBody, match="All requests"):
        room.take("green", 2)
    room.give_back("red", 2_000)
    room.take("green", 2_000)


async def test_a_client_that_leaves_while_sending_is_no_error(rig: Rig) -> None:
    wire = Wire(chat_body())
    wire._incoming = asyncio.Queue()
    wire._incoming.put_nowait({"type": "http.request", "body": b"{", "more_body": True})
    wire.leave()
    with capture_logs() as logs:
        await asyncio.wait_for(rig.app(wire.scope, wire.receive, wire.send), 5)
    assert not logs


async def test_an_unknown_failure_tells_nothing(rig: Rig) -> None:
    rig.emits([5], refusal=RuntimeError(f"secret {CANARY}"))
    with capture_logs() as logs:
        response = await rig.post(PATH, chat_body())
    assert (response.status_code, response.json()["error"]["code"]) == (500, "server_error")
    assert CANARY not in response.text and CANARY not in str(logs)
    assert (logs[0]["error"], logs[0]["route"]) == ("RuntimeError", PATH)


_DEAD, _ODD = EngineDead(CANARY), KeyError(CANARY)
# What the engine does, whether the answer is streamed, and what the client gets.
FAILURES: dict[str, tuple[dict[str, Any], bool, int, str]] = {
    "refused by the engine": ({"refusal": EngineOverloaded("full")}, False, 503, "server_is_overloaded"),
    "no replica": ({"refusal": _DEAD}, True, 503, "server_is_overloaded"),
    "dead before the first token": ({"failure": _DEAD}, False, 500, "server_error"),
    "dead before the first byte": ({"failure": _DEAD}, True, 500, "server_error"),
    "given up before the first byte": ({"error": CANARY}, True, 500, "server_error"),
    "unknown failure": ({"failure": _ODD}, False, 500, "server_error"),
    "dead in the middle of a body": ({"failure": _DEAD, "fail_after": 2}, False, 500, "server_error"),
    "dead in mid-stream": ({"failure": _DEAD, "fail_after": 2}, True, 500, "server_error"),
    "given up in mid-stream": ({"error": CANARY, "fail_after": 2}, True, 500, "server_error"),
    "unknown failure in mid-stream": ({"failure": _ODD, "fail_after": 2}, True, 500, "server_error"),
}


@pytest.mark.parametrize("case", FAILURES.values(), ids=FAILURES.keys())
async def test_every_failure_of_ours_leaves_one_line_that_names_its_request(
    rig: Rig, case: tuple[dict[str, Any], bool, int, str]
) -> None:
    script, stream, status, code = case
    rig.says("one two three four", **script)
    body = chat_body(model="small", stream=stream, messages=[{"role": "user", "content": CANARY}])
    with capture_logs() as logs:
        response = await rig.post(PATH, body)
    begun = stream and script.get("fail_after", 0) > 0
    assert response.status_code == (200 if begun else status)
    if begun:
        assert events(response)[-1]["error"]["code"] == code
    assert logs == [
        {
            **{"event": "request failed", "log_level": "error", "route": PATH, "model": "smollm2-135m"},
            **{"request_id": response.headers["x-request-id"], "status": status, "code": code},
            **{"type": "server_error", "sent_status": response.status_code, "error": logs[0]["error"]},
        }
    ]
    assert CANARY not in str(logs) and TENANT_KEY not in str(logs)


async def test_a_server_error_that_no_exception_made_is_logged_too(make_rig: Callable[..., Rig]) -> None:
    async def down() -> Readiness:
        return Readiness(False, "away")

    rig = make_rig(readiness={"database": down})
    with capture_logs() as logs:
        async with rig.http(None) as http:
            response = await http.get("/readyz")
    assert [(line["request_id"], line["status"], line["route"]) for line in logs] == [
        (response.headers["x-request-id"], 503, "/readyz")
    ]


async def test_content_and_keys_never_come_back_in_errors_or_logs(rig: Rig) -> None:
    message = {"role": "user", "content": CANARY}
    bad_bodies: list[dict[str, Any]] = [
        {"model": CANARY, "messages": [message]},
        {**chat_body(), "messages": [{"role": CANARY, "content": CANARY}]},
        {**chat_body(), "messages": [message], "stop": [CANARY] * 9},
        {**chat_body(), "messages": [message], "temperature": CANARY},
        {**chat_body(), "messages": [message], "metadata": {CANARY: 5}},
        {**chat_body(), "messages": [message], "logit_bias": {CANARY: 5}},
        {**chat_body(), "messages": [message], "tools": [{"name": CANARY}]},
        {**chat_body(), "messages": [message], "response_format": {"type": CANARY}},
        {**chat_body(), "messages": [{"role": "user", "content": [{"type": CANARY, "text": CANARY}]}]},
        {**chat_body(), "messages": [message], "max_tokens": 10**6},
        {**chat_body(), "messages": [message], "service_tier": CANARY},
    ]
    with capture_logs() as logs:
        for body in bad_bodies:
            response = await rig.post(PATH, body)
            assert 400 <= response.status_code < 500
            assert CANARY not in response.text
        assert CANARY not in (await rig.post(PATH, chat_body(), key=CANARY)).text
        assert CANARY not in (await rig.post(f"/v1/{CANARY}", {})).text
    assert CANARY not in str(logs)


async def test_a_large_prompt_does_not_stall_others(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig([model_card(max_model_len=10**6, kv_tokens=10**6)])
    text = "the quick brown fox 12345 jumps.\n" * 30_000
    worst = 0.0
    loop = asyncio.get_running_loop()
    start = loop.time()
    large = asyncio.create_task(rig.post("/v1/completions", text_body(prompt=text)))
    while not large.done():
        begin = loop.time()
        await asyncio.sleep(0.001)
        worst = max(worst, loop.time() - begin)
    assert (await large).status_code == 200
    assert worst < (loop.time() - start) / 2, "on the loop, one wait would take the whole time"


async def test_idempotency_is_refused_rather_than_ignored(rig: Rig) -> None:
    async with rig.http() as http:
        response = await http.post(PATH, json=chat_body(), headers={"idempotency-key": "k"})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "unsupported_parameter")


async def test_models_are_listed_with_their_aliases(rig: Rig) -> None:
    async with rig.http() as http:
        data = (await http.get("/v1/models")).json()["data"]
        one = (await http.get("/v1/models/small")).json()
    assert [entry["id"] for entry in data] == ["smollm2-135m", "small"]
    assert all(entry["object"] == "model" and entry["owned_by"] for entry in data)
    assert (one["id"], one["root"]) == ("small", "smollm2-135m")
    async with rig.http(None) as http:
        assert (await http.get("/v1/models")).status_code == 401


async def test_metrics_need_a_scrape_or_admin_key(rig: Rig) -> None:
    rig.engine.engine_stats = {
        ("smollm2-135m", "0"): EngineStats(
            2, 3, 100, 25, 16, 10, 5, 1, 70, 40, 9, finished={"stop": 4, "length": 2}
        )
    }
    await rig.post(PATH, chat_body(stream=True))
    for key, status in ((None, 401), (TENANT_KEY, 403), (SCRAPE_KEY, 200), (ADMIN_KEY, 200)):
        async with rig.http(key) as http:
            response = await http.get("/metrics")
        assert response.status_code == status
    text = response.text
    labels = 'engine="0",model_name="smollm2-135m"'
    for line in (
        f"vllm:num_requests_running{{{labels}}} 2.0",
        f"vllm:num_requests_waiting{{{labels}}} 3.0",
        f"vllm:kv_cache_usage_perc{{{labels}}} 0.25",
        f"vllm:prefix_cache_queries_total{{{labels}}} 10.0",
        f"vllm:prefix_cache_hits_total{{{labels}}} 5.0",
        f"vllm:num_preemptions_total{{{labels}}} 1.0",
        f"vllm:prompt_tokens_total{{{labels}}} 70.0",
        f"vllm:generation_tokens_total{{{labels}}} 40.0",
        'vllm:request_success_total{engine="0",finished_reason="stop",model_name="smollm2-135m"} 4.0',
        f"vllm:time_to_first_token_seconds_count{{{labels}}} 1.0",
        f"vllm:inter_token_latency_seconds_count{{{labels}}} 3.0",
        f"vllm:e2e_request_latency_seconds_count{{{labels}}} 1.0",
    ):
        assert line in text, text
    assert 'block_size="16"' in text


async def test_latencies_belong_to_the_engine_that_answered(rig: Rig) -> None:
    for engine, count in (("0", 1), ("3", 2)):
        rig.says("Hello there.", engine=engine)
        for _ in range(count):
            assert (await rig.post(PATH, chat_body())).status_code == 200
    rig.says("Hello there.", refusal=EngineOverloaded("full"))
    assert (await rig.post(PATH, chat_body())).status_code == 503
    async with rig.http(SCRAPE_KEY) as http:
        lines = (await http.get("/metrics")).text.splitlines()
    for name in ("time_to_first_token", "e2e_request_latency"):
        start = f"vllm:{name}_seconds_count"
        # A request that no engine accepted was not answered by engine 0 either.
        assert [line for line in lines if line.startswith(start)] == [
            f'{start}{{engine="0",model_name="smollm2-135m"}} 1.0',
            f'{start}{{engine="3",model_name="smollm2-135m"}} 2.0',
        ]


async def test_readiness_names_each_dependency(make_rig: Callable[..., Rig]) -> None:
    async def down() -> Readiness:
        raise ConnectionError(CANARY)

    async def local() -> Readiness:
        return Readiness(True, "local")

    for checks, status in (({"valkey": local}, 200), ({"valkey": local, "postgres": down}, 503)):
        rig = make_rig(readiness=checks)
        async with rig.http(None) as http:
            response = await http.get("/readyz")
            bare = await http.get("/health")
        assert (bare.status_code, bare.content) == (status, b"")
        assert response.status_code == status
        assert response.json()["dependencies"]["valkey"] == {"ready": True, "mode": "local"}
        assert CANARY not in response.text


async def test_while_keys_cannot_be_checked_clients_are_to_come_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(keys: KnownKeys, key: str) -> None:
        raise StoreUnavailable("PostgreSQL gave no answer")

    monkeypatch.setattr(KnownKeys, "authenticate", away)
    response = await rig.post(PATH, b"{}")
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert response.json()["error"]["code"] == "server_is_overloaded"
