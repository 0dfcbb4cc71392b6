from __future__ import annotations

from typing import Any

import pytest

from tests.platform.conftest import EOS, Rig, events, text_body

pytestmark = pytest.mark.anyio
PATH = "/v1/completions"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_a_prompt_is_tokenised_as_it_stands_and_gets_sixteen_tokens(rig: Rig) -> None:
    body = (await rig.post(PATH, text_body())).json()
    assert body["object"] == "text_completion"
    assert body["choices"][0]["text"] == "Hello there."
    assert list(rig.engine.requests[0].prompt_token_ids) == rig.pipeline.encode("Once upon")
    assert rig.engine.requests[0].params.max_tokens == 16


@pytest.mark.parametrize("stream", [False, True])
async def test_each_prompt_has_its_own_choices(rig: Rig, stream: bool) -> None:
    prompts = ["one", "two", "three"]
    response = await rig.post(PATH, text_body(prompt=prompts, n=2, stream=stream))
    if stream:
        chunks = events(response)
        texts = {
            index: "".join(c["text"] for chunk in chunks for c in chunk["choices"] if c["index"] == index)
            for index in range(6)
        }
    else:
        choices = response.json()["choices"]
        texts = {choice["index"]: choice["text"] for choice in choices}
        num_prompt = sum(len(rig.pipeline.encode(prompt)) for prompt in prompts)
        assert response.json()["usage"]["prompt_tokens"] == num_prompt, "a prompt counts once, whatever n is"
    assert texts == {index: "Hello there." for index in range(6)}
    assert [list(request.prompt_token_ids) for request in rig.engine.requests] == [
        rig.pipeline.encode(prompt) for prompt in prompts
    ]
    assert all(generation.closed.is_set() for generation in rig.engine.generations)


@pytest.mark.parametrize(
    ("prompt", "given"),
    [
        ([1.5], "a list of numbers with a fraction"),
        ([True], "a list of booleans"),
        ({}, "an object"),
        (5, "an integer"),
        (None, "null"),
        (["a", 1], "a list of integers and strings"),
        ([[1], "a"], "a list of lists of integers and strings"),
        ([[1], ["a", 2.5]], "a list of lists of integers and numbers with a fraction and strings"),
        ([[[1]]], "a list of lists of lists"),
    ],
)
async def test_a_prompt_of_no_known_form_is_told_all_forms_and_its_own(
    rig: Rig, prompt: Any, given: str
) -> None:
    response = await rig.post(PATH, text_body(prompt=prompt))
    assert response.status_code == 400
    assert response.json()["error"] == {
        "message": "This must be a string, a list of strings, a list of token ids, or a list of lists "
        f"of token ids; it is {given}.",
        **{"type": "invalid_request_error", "param": "prompt", "code": "invalid_value"},
    }


async def test_a_stop_of_no_known_form_is_told_all_forms(rig: Rig) -> None:
    error = (await rig.post(PATH, text_body(stop=[5]))).json()["error"]
    assert error["message"] == "This must be a string or a list of strings; it is a list of integers."
    error = (await rig.post(PATH, text_body(stop=["a"] * 5))).json()["error"]
    assert "at most 4" in error["message"]


@pytest.mark.parametrize(
    ("prompt", "n", "param"),
    [(["a"] * 65, 2, "n"), (["a"] * 129, 1, "prompt"), ([[5]] * 2, 65, "n"), ([[5]] * 1000, 128, "n")],
)
async def test_choices_of_all_prompts_together_have_a_limit(
    rig: Rig, prompt: list[Any], n: int, param: str
) -> None:
    # An unknown model: nothing was looked up, tokenised or submitted when the refusal came.
    response = await rig.post(PATH, text_body(model="nobody", prompt=prompt, n=n))
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "invalid_value", param)
    assert f"{len(prompt)} prompts with {n} choices each" in error["message"] and "128" in error["message"]


@pytest.mark.parametrize(("prompt", "n"), [(["a"] * 64, 2), ([5] * 200, 128), ("a" * 200, 128)])
async def test_as_many_choices_as_the_limit_are_served(rig: Rig, prompt: Any, n: int) -> None:
    response = await rig.post(PATH, text_body(prompt=prompt, n=n))
    assert response.status_code == 200
    assert len(response.json()["choices"]) == 128


@pytest.mark.parametrize("prompt", [[5, 6, 7], [[5, 6], [7]]])
async def test_ids_are_taken_as_they_are(rig: Rig, prompt: list[Any]) -> None:
    assert (await rig.post(PATH, text_body(prompt=prompt))).status_code == 200
    expected = prompt if isinstance(prompt[0], list) else [prompt]
    assert [list(request.prompt_token_ids) for request in rig.engine.requests] == expected


@pytest.mark.parametrize(
    "prompt",
    [
        *("", [], [""], ["a", ""], [[]], [[1], []], [-1], [49_152], [10**30], [1.5], [True], [None], None, 5),
        *({"a": 1}, [[["x"]]]),
    ],
)
async def test_empty_and_odd_prompts_are_refused_and_the_next_call_works(rig: Rig, prompt: Any) -> None:
    response = await rig.post(PATH, text_body(prompt=prompt))
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert (await rig.post(PATH, text_body())).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_echo_gives_the_prompt_and_at_most_the_tokens_asked_for(
    rig: Rig, max_tokens: int, stream: bool
) -> None:
    """FAULTS a32."""
    asked = text_body(echo=True, max_tokens=max_tokens, stream=stream)
    if stream:
        asked["stream_options"] = {"include_usage": True}
    response = await rig.post(PATH, asked)
    if stream:
        chunks = events(response)
        text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
        usage = chunks[-1]["usage"]
    else:
        text, usage = response.json()["choices"][0]["text"], response.json()["usage"]
    assert text == "Once upon" + ("Hello" if max_tokens else "")
    assert usage["completion_tokens"] == max_tokens


async def test_max_tokens_zero_needs_echo(rig: Rig) -> None:
    """FAULTS a32."""
    assert (await rig.post(PATH, text_body(max_tokens=0))).status_code == 400


async def test_echoed_logprobs_begin_with_null_and_offsets_point_into_the_text(rig: Rig) -> None:
    prompt = "Größe 🧑‍🚀 once"
    body = (await rig.post(PATH, text_body(prompt=prompt, echo=True, logprobs=2, max_tokens=2))).json()
    choice = body["choices"][0]
    lists = choice["logprobs"]
    ids = [*rig.pipeline.encode(prompt), *rig.pipeline.encode("Hello there")]
    assert len(lists["tokens"]) == len(ids)
    assert lists["token_logprobs"] == [None] + [-0.5] * (len(ids) - 1)
    assert lists["top_logprobs"][0] is None
    assert all(len(top) == 2 for top in lists["top_logprobs"][1:])
    assert choice["text"] == prompt + "Hello there"
    for token, offset in zip(lists["tokens"], lists["text_offset"], strict=True):
        assert token.startswith("bytes:\\x") or choice["text"][offset:].startswith(token)


@pytest.mark.parametrize("prompt", ["<|im_start|>user\nhi<|im_end|>\nso", [1, 2, 3, 400, 500]])
async def test_offsets_count_the_markers_that_an_echoed_prompt_shows(
    rig: Rig, prompt: str | list[int]
) -> None:
    body = (await rig.post(PATH, text_body(prompt=prompt, echo=True, logprobs=1, max_tokens=2))).json()
    choice = body["choices"][0]
    assert "<|im_start|>" in choice["text"]
    lists = choice["logprobs"]
    for token, offset in zip(lists["tokens"], lists["text_offset"], strict=True):
        assert choice["text"][offset:].startswith(token)


async def test_a_token_after_a_broken_character_begins_behind_it(rig: Rig) -> None:
    broken = rig.pipeline.encode("🧑")[0]
    rig.emits([broken, *rig.pipeline.encode("transfer"), EOS])
    choice = (await rig.post(PATH, text_body(logprobs=0, max_tokens=9))).json()["choices"][0]
    assert choice["text"] == "\ufffdtransfer"
    assert choice["logprobs"]["text_offset"][:2] == [0, 1]


async def test_a_harness_can_cut_one_entry_off_even_when_the_answer_is_eos(rig: Rig) -> None:
    rig.emits([EOS])
    asked = text_body(prompt=[5, 6, 7, 8], echo=True, logprobs=1, max_tokens=1, temperature=0)
    lists = (await rig.post(PATH, asked)).json()["choices"][0]["logprobs"]
    assert len(lists["token_logprobs"]) == 5
    assert lists["token_logprobs"][1:-1] == [-0.5] * 3
    assert [max(top.values()) for top in lists["top_logprobs"][1:-1]] == [-0.5] * 3


async def test_the_same_echo_twice_gives_equal_answers(rig: Rig) -> None:
    """FAULTS a16."""
    asked = text_body(echo=True, logprobs=1, max_tokens=1)
    rig.says("Hello there.")
    first = (await rig.post(PATH, asked)).json()["choices"]
    rig.says("Hello there.", cached_tokens=16)
    assert (await rig.post(PATH, asked)).json()["choices"] == first


async def test_streamed_logprobs_join_to_the_one_shot_ones(rig: Rig) -> None:
    rig.says("Hello 🧑‍🚀 there, all of you END never", tokens_per_step=3)
    asked = text_body(echo=True, logprobs=1, stop="END", max_tokens=40, n=2)
    choices = (await rig.post(PATH, asked)).json()["choices"]
    chunks = events(await rig.post(PATH, {**asked, "stream": True}))
    for choice in choices:
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        for name, values in choice["logprobs"].items():
            streamed = [value for part in parts if part["logprobs"] for value in part["logprobs"][name]]
            assert streamed == values


async def test_logprobs_without_echo_are_the_answers_only(rig: Rig) -> None:
    lists = (await rig.post(PATH, text_body(logprobs=0))).json()["choices"][0]["logprobs"]
    assert "".join(lists["tokens"]) == "Hello there."
    assert lists["text_offset"][0] == 0


async def test_prompt_logprobs_are_keyed_by_id(rig: Rig) -> None:
    body = (await rig.post(PATH, text_body(prompt_logprobs=1))).json()
    shown = body["choices"][0]["prompt_logprobs"]
    ids = rig.pipeline.encode("Once upon")
    assert shown[0] is None
    assert shown[1][str(ids[1])]["decoded_token"] == rig.pipeline.token_text(ids[1])


async def test_streamed_and_plain_usage_are_equal(rig: Rig) -> None:
    plain = (await rig.post(PATH, text_body())).json()["usage"]
    asked = text_body(stream=True, stream_options={"include_usage": True})
    last = events(await rig.post(PATH, asked))[-1]
    assert last["choices"] == []
    assert last["usage"] == plain


async def test_each_chunk_tells_the_usage_of_its_own_prompt(rig: Rig) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    prompts = [[5, 6, 7], [8]]
    asked = text_body(prompt=prompts, stream=True, stream_options=options, echo=True, logprobs=0)
    chunks = events(await rig.post(PATH, asked))
    for index, prompt in enumerate(prompts):
        own = [chunk["usage"] for chunk in chunks[:-1] if chunk["choices"][0]["index"] == index]
        assert {usage["prompt_tokens"] for usage in own} == {len(prompt)}
        counts = [usage["completion_tokens"] for usage in own]
        assert counts[0] == 0
        assert counts == sorted(counts)
        assert counts[-1] > 1
    assert chunks[-1]["usage"]["prompt_tokens"] == 4


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"max_tokens": 8192}, "context_length_exceeded"),
        ({"prompt": [1] * 8192}, "context_length_exceeded"),
        ({"prompt": "word " * 100_000}, "context_length_exceeded"),
        ({"best_of": 3}, "unsupported_parameter"),
        ({"suffix": "x"}, "unsupported_parameter"),
        ({"logprobs": 21}, "invalid_value"),
        ({"prompt": ["a"] * 1025}, "invalid_value"),
        ({"prompt": ["a"] * 100, "n": 128}, "invalid_value"),
        ({"stream": True, "prompt_logprobs": 1}, "invalid_value"),
        ({"messages": []}, "unsupported_parameter"),
    ],
)
async def test_what_can_not_be_honoured_is_refused(rig: Rig, fields: dict[str, Any], code: str) -> None:
    response = await rig.post(PATH, text_body(**fields))
    assert (response.status_code, response.json()["error"]["code"]) == (400, code)
    assert not rig.engine.generations


async def test_tokenize_and_detokenize_are_inverse(rig: Rig) -> None:
    for given in ({"prompt": "Hello 🧑‍🚀"}, {"messages": [{"role": "user", "content": "Hi"}]}):
        asked = {"model": "smollm2-135m", "return_token_strs": True, **given}
        body = (await rig.post("/v1/tokenize", asked)).json()
        assert body["count"] == len(body["tokens"]) == len(body["token_strs"])
        assert body["max_model_len"] == 8192
        back = await rig.post("/v1/detokenize", {"model": "smollm2-135m", "tokens": body["tokens"]})
        assert given.get("prompt", "Hi") in back.json()["prompt"]
    wrong = await rig.post("/v1/detokenize", {"model": "smollm2-135m", "tokens": [10**30]})
    assert wrong.status_code == 400
    both = {"model": "smollm2-135m", "prompt": "a", "messages": [{"role": "user", "content": "Hi"}]}
    assert (await rig.post("/v1/tokenize", both)).status_code == 400
