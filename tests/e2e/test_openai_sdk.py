"""The openai SDK against the running platform, with real models."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.serve_process import BASE, SMALL, ServeProcess, run_all

pytestmark = pytest.mark.e2e
GOLDEN = Path(__file__).parents[1] / "golden" / "smollm2-135m.json"
HI: Any = [{"role": "user", "content": "Write about the sea."}]


def test_a_golden_question_gets_its_answer(sdk: openai.OpenAI) -> None:
    cases = {case["id"]: case for case in json.loads(GOLDEN.read_text())["cases"]}
    messages = cases["p00_short_fact"]["messages"]
    answer = sdk.chat.completions.create(model=SMALL, messages=messages, temperature=0, max_tokens=32)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.model == SMALL
    assert answer._request_id is not None and answer._request_id.startswith("req_")
    assert "," not in answer._request_id


@pytest.mark.parametrize("options", [{}, {"n": 2}, {"logprobs": True, "top_logprobs": 2}], ids=str)
def test_the_stream_joins_to_the_answer(sdk: openai.OpenAI, options: dict[str, Any]) -> None:
    body: dict[str, Any] = {"model": SMALL, "messages": HI, "max_tokens": 12, "seed": 3, **options}
    answer = sdk.chat.completions.create(**body)
    chunks = list(sdk.chat.completions.create(**body, stream=True, stream_options={"include_usage": True}))
    for choice in answer.choices:
        parts = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert "".join(part.delta.content or "" for part in parts) == choice.message.content
        assert [part.finish_reason for part in parts if part.finish_reason] == [choice.finish_reason]
        if options.get("logprobs"):
            streamed = [entry for part in parts if part.logprobs for entry in part.logprobs.content or ()]
            assert choice.logprobs is not None and choice.logprobs.content is not None
            assert [entry.token for entry in streamed] == [entry.token for entry in choice.logprobs.content]
            assert len(streamed) == 12
            assert all(entry.logprob <= 0 and len(entry.top_logprobs) == 2 for entry in streamed)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12 * len(answer.choices)
    assert [bool(chunk.usage) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == answer.usage.prompt_tokens


def test_two_choices_differ_and_a_stream_without_options_has_no_usage(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.create(model=SMALL, messages=HI, max_tokens=16, n=2, seed=1)
    assert answer.choices[0].message.content != answer.choices[1].message.content
    chunks = list(sdk.chat.completions.create(model=SMALL, messages=HI, max_tokens=3, stream=True))
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)


def test_a_seed_gives_the_same_answer_also_while_others_run(sdk: openai.OpenAI) -> None:
    def ask() -> str:
        answer = sdk.chat.completions.create(model=SMALL, messages=HI, max_tokens=16, seed=11)
        return answer.choices[0].message.content or ""

    alone = ask()
    answers: list[str] = []

    def other(number: int) -> Callable[[], object]:
        prompt = [number + 50] * (20 * number)
        return lambda: sdk.completions.create(model=SMALL, prompt=prompt, max_tokens=20 + number)

    run_all([*(other(number) for number in range(1, 4)), *[lambda: answers.append(ask())] * 2])
    assert answers == [alone, alone]
    assert len(alone) > 10


def test_a_stop_string_ends_the_answer_and_is_not_shown(sdk: openai.OpenAI) -> None:
    body: dict[str, Any] = {"model": SMALL, "prompt": "1, 2, 3, 4,", "temperature": 0, "max_tokens": 24}
    free = sdk.completions.create(**body).choices[0]
    middle = len(free.text) // 2
    stop = free.text[middle : middle + 4]
    stopped = sdk.completions.create(**body, stop=[stop]).choices[0]
    assert (stopped.text, stopped.finish_reason) == (free.text[: free.text.index(stop)], "stop")
    streamed = "".join(
        chunk.choices[0].text for chunk in sdk.completions.create(**body, stop=stop, stream=True)
    )
    assert streamed == stopped.text


def test_echo_scores_the_prompt_as_text_and_as_ids(served: ServeProcess, sdk: openai.OpenAI) -> None:
    text = "The capital of France is Paris."
    with served.http() as http:
        ids = http.post("/v1/tokenize", json={"model": SMALL, "prompt": text}).json()["tokens"]
    body: dict[str, Any] = {"model": SMALL, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    by_text = sdk.completions.create(**body, prompt=text).choices[0]
    by_ids = sdk.completions.create(**body, prompt=[ids, ids]).choices
    assert len(by_ids) == 2
    for choice in (by_text, *by_ids):
        assert choice.text.startswith(text)
        assert choice.logprobs is not None
        scores = choice.logprobs.token_logprobs or []
        assert len(scores) == len(ids) + 1
        assert scores[0] is None
        assert all(score is not None and math.isfinite(score) and score <= 0 for score in scores[1:])
    assert by_ids[0] == by_ids[1].model_copy(update={"index": 0})
    assert by_text.logprobs is not None and by_ids[0].logprobs is not None
    assert by_text.logprobs.token_logprobs == by_ids[0].logprobs.token_logprobs


def test_models(sdk: openai.OpenAI) -> None:
    assert sorted(model.id for model in sdk.models.list()) == [BASE, SMALL]
    assert sdk.models.retrieve(BASE).id == BASE
    with pytest.raises(openai.NotFoundError):
        sdk.models.retrieve("nobody")


def test_a_base_model_completes_and_refuses_to_chat(sdk: openai.OpenAI) -> None:
    answer = sdk.completions.create(
        model=BASE, prompt="What is the capital of France?", temperature=0, max_tokens=10
    )
    assert "Paris" in answer.choices[0].text
    assert answer.model == BASE
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="chat template") as refused:
            sdk.chat.completions.create(model=BASE, messages=HI, stream=stream)
        assert refused.value.param == "messages"


@pytest.mark.parametrize("stream", [False, True])
def test_errors_have_the_sdks_classes(sdk: openai.OpenAI, stream: bool) -> None:
    with pytest.raises(openai.AuthenticationError) as unknown:
        sdk.with_options(api_key="fp_nobody_wrong").chat.completions.create(
            model=SMALL, messages=HI, stream=stream
        )
    assert (unknown.value.code, unknown.value.status_code) == ("invalid_api_key", 401)
    with pytest.raises(openai.NotFoundError) as missing:
        sdk.chat.completions.create(model="nobody", messages=HI, stream=stream)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        sdk.completions.create(model=SMALL, prompt=[5] * 50_000, stream=stream)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as bad:
        sdk.chat.completions.create(model=SMALL, messages=HI, temperature=9, stream=stream)
    assert (bad.value.code, bad.value.param) == ("invalid_value", "temperature")
    with pytest.raises(openai.BadRequestError) as unsupported:
        sdk.chat.completions.create(model=SMALL, messages=HI, store=True, stream=stream)
    assert unsupported.value.code == "unsupported_parameter"
