from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from typing import Any

import pytest

from footplate.engine.errors import EngineDead, EngineOverloaded, InvalidRequest, RequestTooLarge
from footplate.engine.text.chat_template import ChatTemplate
from footplate.engine.text.pipeline import TextPipeline
from tests.builders import ADMIN_KEY, model_card
from tests.platform.conftest import EOS, Rig, chat_body, events

pytestmark = pytest.mark.anyio
PATH = "/v1/chat/completions"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def _content(chunks: list[Any], index: int = 0) -> str:
    return "".join(
        choice["delta"].get("content", "")
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["index"] == index
    )


async def test_an_answer_has_text_reason_and_usage(rig: Rig) -> None:
    rig.says("Hello there.", cached_tokens=16)
    response = await rig.post(PATH, chat_body())
    body = response.json()
    assert response.status_code == 200
    assert body["object"] == "chat.completion"
    assert body["system_fingerprint"] == "fp_test"
    choice = body["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "Hello there.", "refusal": None}
    assert choice["finish_reason"] == "stop"
    num_prompt = len(rig.engine.requests[0].prompt_token_ids)
    num_answer = len(rig.pipeline.encode("Hello there.")) + 1
    assert body["usage"]["prompt_tokens"] == num_prompt
    assert body["usage"]["completion_tokens"] == num_answer, "EOS counts"
    assert body["usage"]["total_tokens"] == num_prompt + num_answer
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 16
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


async def test_the_prompt_goes_through_the_template(rig: Rig) -> None:
    await rig.post(PATH, chat_body())
    expected = rig.pipeline.encode_chat([{"role": "user", "content": "Hi"}])
    assert list(rig.engine.requests[0].prompt_token_ids) == expected


async def test_text_parts_and_developers_are_read(rig: Rig) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "s"}, {"role": "user", "content": parts}]
    assert (await rig.post(PATH, chat_body(messages=messages))).status_code == 200
    expected = [{"role": "system", "content": "s"}, {"role": "user", "content": "a\nb"}]
    assert list(rig.engine.requests[0].prompt_token_ids) == rig.pipeline.encode_chat(expected)


async def test_stream_frames_come_in_order(rig: Rig) -> None:
    response = await rig.post(PATH, chat_body(stream=True, stream_options={"include_usage": True}))
    assert response.headers["content-type"].startswith("text/event-stream")
    chunks = events(response)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert _content(chunks) == "Hello there."
    assert len(chunks) == 1 + 3 + 1 + 1, "a role, one event a token, an end, usage"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None] * 4 + ["stop"]
    assert chunks[-2]["choices"][0]["delta"] == {}
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 4
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1


async def test_usage_is_left_out_of_streams_that_did_not_ask(rig: Rig) -> None:
    chunks = events(await rig.post(PATH, chat_body(stream=True)))
    assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)


async def test_each_chunk_tells_what_its_choice_has_used_when_asked(rig: Rig) -> None:
    asked = {"include_usage": True, "continuous_usage_stats": True}
    rig.says("Hello there.", cached_tokens=16)
    chunks = events(await rig.post(PATH, chat_body(stream=True, n=2, stream_options=asked)))
    num_prompt = len(rig.engine.requests[0].prompt_token_ids)
    for index in range(2):
        own = [chunk for chunk in chunks[:-1] if chunk["choices"][0]["index"] == index]
        assert _content(own, index) == "Hello there."
        assert [chunk["usage"]["completion_tokens"] for chunk in own] == [0, 1, 2, 3, 4]
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {num_prompt}
    assert {chunk["usage"]["prompt_tokens_details"]["cached_tokens"] for chunk in chunks} == {16}
    assert chunks[-1]["usage"]["completion_tokens"] == 8, "of all choices"


@pytest.mark.parametrize(
    "body",
    [
        chat_body(stream=True, stream_options={"continuous_usage_stats": True}),
        chat_body(stream_options={"include_usage": True, "continuous_usage_stats": True}),
    ],
    ids=["without include_usage", "without a stream"],
)
async def test_usage_in_every_chunk_needs_usage_and_a_stream(rig: Rig, body: dict[str, Any]) -> None:
    response = await rig.post(PATH, body)
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("stream_options")


async def test_several_choices_each_stream_and_end(rig: Rig) -> None:
    chunks = events(await rig.post(PATH, chat_body(stream=True, n=3, seed=1)))
    assert [_content(chunks, index) for index in range(3)] == ["Hello there."] * 3
    ends = [c["index"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]]
    assert sorted(ends) == [0, 1, 2]
    assert rig.engine.requests[0].params.seed == 1
    body = (await rig.post(PATH, chat_body(n=2))).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert body["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize("tokens_per_step", [1, 2, 3, 5])
@pytest.mark.parametrize("stream", [False, True])
async def test_stop_strings_never_leak_and_later_tokens_are_not_counted(
    rig: Rig, tokens_per_step: int, stream: bool
) -> None:
    ids = [token for part in ("abc", "EN", "D", "xyz" * 9) for token in rig.pipeline.encode(part)]
    rig.emits([*ids, EOS], tokens_per_step=tokens_per_step)
    response = await rig.post(
        PATH,
        chat_body(
            stop=["END"], stream=stream, **({"stream_options": {"include_usage": True}} if stream else {})
        ),
    )
    if stream:
        chunks = events(response)
        text, usage = _content(chunks), chunks[-1]["usage"]
        end = chunks[-2]["choices"][0]
    else:
        end = response.json()["choices"][0]
        text, usage = end["message"]["content"], response.json()["usage"]
    counted = sum(len(rig.pipeline.encode(part)) for part in ("abc", "EN", "D"))
    assert (text, end["finish_reason"], end["stop_reason"]) == ("abc", "stop", "END")
    assert usage["completion_tokens"] == counted
    assert rig.engine.generations[0].stopped == {0}


async def test_logprobs_stand_for_delivered_tokens_streamed_or_not(rig: Rig) -> None:
    ids = [token for part in ("ab", "🧑‍🚀", "EN", "x") for token in rig.pipeline.encode(part)]
    rig.emits([*ids, EOS])
    asked = chat_body(logprobs=True, top_logprobs=2, stop="END")
    answer = (await rig.post(PATH, asked)).json()["choices"][0]
    chunks = events(await rig.post(PATH, {**asked, "stream": True}))
    streamed = [
        entry
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["logprobs"]
        for entry in choice["logprobs"]["content"]
    ]
    entries = answer["logprobs"]["content"]
    assert streamed == entries
    assert _content(chunks) == answer["message"]["content"] == "ab🧑‍🚀ENx"
    assert len(entries) == len(ids), "one entry a token, none for the hidden EOS"
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == "ab🧑‍🚀ENx"
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)


async def test_special_tokens_are_hidden_unless_asked_for(rig: Rig) -> None:
    assert "<|im_end|>" not in (await rig.post(PATH, chat_body())).text
    body = (await rig.post(PATH, chat_body(skip_special_tokens=False))).json()
    assert body["choices"][0]["message"]["content"] == "Hello there.<|im_end|>"


async def test_broken_bytes_become_replacement_characters(rig: Rig) -> None:
    lone = rig.pipeline.tokenizer.vocabulary.token_bytes.index(b"\x80")
    rig.emits([lone, EOS])
    assert _content(events(await rig.post(PATH, chat_body(stream=True)))) == "\ufffd"


async def test_length_ends_with_length(rig: Rig) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        body = (await rig.post(PATH, chat_body(**{name: 2}))).json()
        assert body["choices"][0]["finish_reason"] == "length"
        assert body["usage"]["completion_tokens"] == 2
    both = await rig.post(PATH, chat_body(max_tokens=3, max_completion_tokens=1))
    assert both.json()["usage"]["completion_tokens"] == 1, "max_completion_tokens wins"


async def test_return_token_ids_gives_all_ids(rig: Rig) -> None:
    body = (await rig.post(PATH, chat_body(return_token_ids=True))).json()
    expected = [*rig.pipeline.encode("Hello there."), EOS]
    assert body["choices"][0]["token_ids"] == expected
    assert body["prompt_token_ids"] == list(rig.engine.requests[0].prompt_token_ids)
    chunks = events(await rig.post(PATH, chat_body(return_token_ids=True, stream=True)))
    streamed = [i for chunk in chunks for choice in chunk["choices"] for i in choice.get("token_ids", [])]
    assert streamed == expected


async def test_parameters_reach_the_engine(rig: Rig) -> None:
    given = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "presence_penalty": 1,
        "frequency_penalty": -1, "repetition_penalty": 1.1, "seed": 5, "min_tokens": 1, "ignore_eos": True,
        "stop_token_ids": [9],
        "logit_bias": {"5": -100}, "allowed_token_ids": [1, 2, 5], "bad_words": ["bad"], "priority": 3,
    }  # fmt: skip
    assert (await rig.post(PATH, chat_body(**given, max_tokens=2))).status_code == 200
    request = rig.engine.requests[0]
    params = request.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 7, 0.1)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (1, -1, 1.1)
    assert (params.seed, params.min_tokens, params.ignore_eos, params.stop_token_ids) == (5, 1, True, (9,))
    assert (dict(params.logit_bias), params.allowed_token_ids) == ({5: -100.0}, (1, 2, 5))
    assert len(params.bad_words_ids) == 2
    assert (request.priority, request.tenant, request.cache_scope[:8]) == (3, "tenant-a", b"tenant-a")


async def test_a_cache_salt_only_narrows_the_tenants_scope(rig: Rig) -> None:
    for salt in ("a", "b", "a"):
        await rig.post(PATH, chat_body(cache_salt=salt))
    await rig.post(PATH, chat_body())
    one, two, again, plain = (request.cache_scope for request in rig.engine.requests)
    assert one == again and len({one, two, plain}) == 3


@pytest.mark.parametrize(
    "fields",
    [
        *({"top_p": 0}, {"top_p": 1e-9}, {"top_p": 1}, {"top_k": 0}, {"top_k": -1}, {"top_k": 1}),
        *(
            {"top_k": 49_152},
            {"top_k": 49_153},
            {"temperature": 0},
            {"stop": []},
            {"stop": ""},
            {"stop": None},
        ),
        *({"tools": []}, {"tools": None}, {"tool_choice": "none"}, {"response_format": {"type": "text"}}),
        *({"logit_bias": {}}, {"n": 1}, {"store": False}, {"service_tier": "auto"}, {"modalities": ["text"]}),
        *(
            {"metadata": {"a": "b"}},
            {"user": "u"},
            {"parallel_tool_calls": True},
            {"structured_outputs": None},
        ),
        {"logprobs": False, "top_logprobs": None, "stream_options": None, "max_tokens": None, "seed": None},
    ],
)
async def test_values_at_the_edge_or_without_meaning_are_accepted(rig: Rig, fields: dict[str, Any]) -> None:
    response = await rig.post(PATH, chat_body(**fields))
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"top_k": 1.5}, "invalid_value", "top_k"),
        ({"top_k": -2}, "invalid_value", "top_k"),
        ({"temperature": math.nan}, "invalid_value", "temperature"),
        ({"temperature": math.inf}, "invalid_value", "temperature"),
        ({"temperature": 3}, "invalid_value", "temperature"),
        ({"temperature": "hot"}, "invalid_value", "temperature"),
        ({"temperature": True}, "invalid_value", "temperature"),
        ({"seed": 10**40}, "invalid_value", "seed"),
        ({"max_tokens": 10**40}, "invalid_value", "max_tokens"),
        ({"max_tokens": -1}, "invalid_value", "max_tokens"),
        ({"max_tokens": 0}, "invalid_value", "max_completion_tokens"),
        ({"max_tokens": 9000}, "context_length_exceeded", "messages"),
        ({"n": 0}, "invalid_value", "n"),
        ({"n": 129}, "invalid_value", "n"),
        ({"stop": ["a"] * 5}, "invalid_value", "stop"),
        ({"stop": 5}, "invalid_value", "stop"),
        ({"logit_bias": {"49152": 1}}, "invalid_value", "logit_bias"),
        ({"logit_bias": {"x": 1}}, "invalid_value", "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "invalid_value", "logit_bias"),
        ({"logit_bias": {"5": 101}}, "invalid_value", "logit_bias"),
        ({"stop_token_ids": [-1]}, "invalid_value", "stop_token_ids"),
        ({"allowed_token_ids": [10**30]}, "invalid_value", "allowed_token_ids"),
        ({"top_logprobs": 2}, "invalid_value", "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "invalid_value", "top_logprobs"),
        ({"min_tokens": 5, "max_tokens": 2}, "invalid_value", "min_tokens"),
        ({"priority": -1}, "invalid_value", "priority"),
        ({"messages": []}, "invalid_value", "messages"),
        ({"messages": "hi"}, "invalid_value", "messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, "invalid_value", "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "invalid_value", "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]}, "unsupported_parameter", None),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "unsupported_parameter", None),
        ({"messages": [{"role": "tool", "content": "x"}]}, "unsupported_parameter", "messages[0].role"),
        ({"tools": [{"type": "function"}]}, "unsupported_parameter", "tools"),
        ({"tool_choice": "required"}, "unsupported_parameter", "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "unsupported_parameter", "response_format"),
        ({"structured_outputs": {"regex": "a"}}, "unsupported_parameter", "structured_outputs"),
        ({"chat_template": "{{ 1 }}"}, "unsupported_parameter", "chat_template"),
        ({"logits_processors": ["x"]}, "unsupported_parameter", "logits_processors"),
        ({"store": True}, "unsupported_parameter", "store"),
        ({"store": 0}, "unsupported_parameter", "store"),
        ({"made_up": 1}, "unsupported_parameter", "made_up"),
        ({"model": ""}, "invalid_value", "model"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_can_not_be_honoured_is_refused_before_the_first_byte(
    rig: Rig, fields: dict[str, Any], code: str, param: str | None, stream: bool
) -> None:
    """FAULTS a35."""
    # The standard writer can put NaN and huge numbers on the wire; a client's own one would refuse.
    data = json.dumps({**chat_body(stream=stream), **fields})
    response = await rig.post(PATH, data.encode())
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["code"] == code
    assert error["type"] == "invalid_request_error"
    assert set(error) == {"message", "type", "param", "code"}
    assert param is None or error["param"] == param
    assert not rig.engine.generations, "nothing reached the engine"
    assert (await rig.post(PATH, chat_body())).status_code == 200, "the next call works"


async def test_stream_options_need_a_stream(rig: Rig) -> None:
    response = await rig.post(PATH, chat_body(stream_options={"include_usage": True}))
    assert (response.status_code, response.json()["error"]["param"]) == (400, "stream_options")


async def test_an_unknown_model_is_not_found(rig: Rig) -> None:
    response = await rig.post(PATH, chat_body(model="gpt-99"))
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
    assert "gpt-99" not in response.text


async def test_an_alias_answers_as_its_model(rig: Rig) -> None:
    response = await rig.post(PATH, chat_body(model="small"))
    assert response.json()["model"] == "smollm2-135m"


async def test_keys_are_needed_and_admin_keys_can_not_call_models(rig: Rig) -> None:
    for key, status, code in (
        (None, 401, "invalid_api_key"),
        ("fp_wrong", 401, "invalid_api_key"),
        ("x" * 10_000, 401, "invalid_api_key"),
        (ADMIN_KEY, 403, "permission_denied"),
    ):
        response = await rig.post(PATH, chat_body(), key)
        assert (response.status_code, response.json()["error"]["code"]) == (status, code)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("refusal", "status", "code"),
    [
        (InvalidRequest("seed is odd", "seed"), 400, "invalid_value"),
        (RequestTooLarge("over the pool", "prompt"), 400, "context_length_exceeded"),
        (EngineOverloaded("the queue is full", 1.2), 503, "server_is_overloaded"),
        (EngineDead("gone"), 503, "server_is_overloaded"),
    ],
)
async def test_refusals_of_the_engine_are_plain_errors(
    rig: Rig, refusal: Exception, status: int, code: str, stream: bool
) -> None:
    rig.emits([5], refusal=refusal)
    response = await rig.post(PATH, chat_body(stream=stream))
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    if status == 503:
        assert int(response.headers["retry-after"]) >= 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", [{"failure": EngineDead("lost")}, {"error": "step failed"}])
async def test_a_failure_before_the_first_byte_is_a_plain_error(
    rig: Rig, script: dict[str, Any], stream: bool
) -> None:
    rig.emits([5, 6], **script)
    response = await rig.post(PATH, chat_body(stream=stream))
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"
    assert rig.engine.generations[0].closed.is_set()


@pytest.mark.parametrize("script", [{"failure": EngineDead("lost")}, {"error": "step failed"}])
async def test_a_failure_in_a_stream_is_an_error_event_and_done(rig: Rig, script: dict[str, Any]) -> None:
    rig.says("Hello there.", fail_after=2, **script)
    response = await rig.post(PATH, chat_body(stream=True))
    assert response.status_code == 200
    chunks = events(response)
    assert chunks[-1]["error"]["type"] == "server_error"
    assert not any(c.get("finish_reason") for chunk in chunks[:-1] for c in chunk["choices"])
    plain = await rig.post(PATH, chat_body())
    assert plain.status_code == 500, "half an answer is no answer"


async def test_a_template_error_is_the_clients_to_read(
    make_rig: Callable[..., Rig], smollm2: TextPipeline
) -> None:
    """FAULTS a70."""
    strict = ChatTemplate("{{ raise_exception('roles must alternate') }}", "test", {})
    for template, words in ((strict, "roles must alternate"), (None, "/v1/completions")):
        pipeline = TextPipeline(smollm2.tokenizer, template)
        rig = make_rig(load=lambda card, pipeline=pipeline: pipeline)
        response = await rig.post(PATH, chat_body())
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "messages")
        assert words in error["message"]


async def test_a_prompt_over_the_context_or_the_pool_is_refused_at_once(make_rig: Callable[..., Rig]) -> None:
    long = [{"role": "user", "content": "word " * 3000}]
    for card in (model_card(max_model_len=512), model_card(kv_tokens=512)):
        rig = make_rig([card])
        response = await rig.post(PATH, chat_body(messages=long))
        assert response.json()["error"]["code"] == "context_length_exceeded"
        assert not rig.engine.generations


async def test_many_requests_at_once_stay_apart(rig: Rig) -> None:
    responses = await asyncio.gather(*(rig.post(PATH, chat_body(stream=True)) for _ in range(20)))
    assert {_content(events(response)) for response in responses} == {"Hello there."}
    assert len({events(response)[0]["id"] for response in responses}) == 20
