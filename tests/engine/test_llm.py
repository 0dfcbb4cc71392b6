"""Offline inference: text, ids and conversations in; answers, usage and log-probabilities out."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from footplate.engine.errors import InvalidRequest, RequestTooLarge
from footplate.engine.llm import LLM
from footplate.engine.types import FinishReason, SamplingParams
from tests.engine.conftest import SMOLLM2

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)


@pytest.fixture(scope="module")
def loaded() -> Iterator[LLM]:
    with LLM(SMOLLM2, max_model_len=512, kv_cache_gib=0.05) as llm:
        yield llm


@pytest.fixture
def llm(loaded: LLM) -> Iterator[LLM]:
    """The shared engine, with an empty cache; every test must leave it idle."""
    loaded.core.scheduler.pool.reset_cache()
    yield loaded
    assert loaded.stats().running == loaded.stats().waiting == loaded.stats().kv_blocks_used == 0
    loaded.core.scheduler.check()


def test_text_and_ids_are_completed_alike_in_the_prompts_order(llm: LLM) -> None:
    texts = ["The capital of France is", "One, two, three,", "Water boils at"]
    ids = [llm.text.encode(t) for t in texts]
    by_text, by_ids = llm.generate(texts, GREEDY), llm.generate(ids, GREEDY)
    for text, prompt, a, b in zip(texts, ids, by_text, by_ids, strict=True):
        assert a.prompt_token_ids == b.prompt_token_ids == prompt
        assert (a.token_ids, a.text) == (b.token_ids, b.text)
        assert llm.generate(text, GREEDY)[0].token_ids == a.token_ids  # one prompt without a list
    assert "Paris" in by_text[0].text
    assert llm.generate(ids[0], GREEDY)[0].token_ids == by_text[0].token_ids
    assert llm.generate([], GREEDY) == []


def test_usage_counts_prompt_output_and_cached_tokens(llm: LLM) -> None:
    prompt = list(range(100, 140))
    params = dataclasses.replace(GREEDY, n=2, ignore_eos=True)
    first, second = (llm.generate(prompt, params)[0] for _ in range(2))
    assert (first.usage.prompt_tokens, first.usage.completion_tokens) == (40, 24)
    assert (first.usage.cached_tokens, second.usage.cached_tokens) == (0, 32)
    assert first.usage.total_tokens == 64
    assert first.finish_reason is FinishReason.LENGTH


def test_chat_goes_through_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    params = SamplingParams(max_tokens=32, temperature=0.0)
    (answer,) = llm.chat(messages, params)
    assert answer.prompt_token_ids == llm.text.encode_chat(messages)
    assert "Paris" in answer.text and "<|im_end|>" not in answer.text
    assert answer.finish_reason is FinishReason.STOP
    both = llm.chat([messages, [{"role": "user", "content": "Hi"}]], params)
    assert [both[0].token_ids, len(both)] == [answer.token_ids, 2]


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    settings = [dataclasses.replace(GREEDY, max_tokens=count, ignore_eos=True) for count in (1, 5, 3)]
    outputs = llm.generate(["a", "b", "c"], settings)
    assert [len(o.token_ids) for o in outputs] == [1, 5, 3]
    with pytest.raises(InvalidRequest, match="2 sampling parameters for 1 prompts"):
        llm.generate(["a"], settings[:2])


def test_a_stop_string_ends_the_choice_at_the_engine(llm: LLM) -> None:
    free = dataclasses.replace(GREEDY, max_tokens=200, ignore_eos=True)
    prompt = "Count: one, two, three,"
    whole = llm.generate(prompt, dataclasses.replace(free, max_tokens=16))[0].text
    stop = whole[6:9]
    before = llm.stats().generation_tokens
    (output,) = llm.generate(prompt, dataclasses.replace(free, stop=(stop,), logprobs=0))
    assert output.text == whole[: whole.index(stop)]
    assert output.finish_reason is FinishReason.STOP
    assert output.logprobs is not None and len(output.logprobs) == len(output.token_ids)
    # the token that completes the stop, and with one step ahead one or two more
    assert llm.stats().generation_tokens - before <= len(output.token_ids) + 2


def test_choices_come_by_index_and_a_stop_string_ends_only_its_own(llm: LLM) -> None:
    params = SamplingParams(max_tokens=10, temperature=1.5, seed=3, n=3, ignore_eos=True)
    (output,) = llm.generate("Once upon a time", params)
    assert [c.index for c in output.choices] == [0, 1, 2]
    assert len({c.text for c in output.choices}) == 3
    stop = output.choices[1].text[:4]
    assert not any(stop in output.choices[i].text for i in (0, 2))
    (stopped,) = llm.generate("Once upon a time", dataclasses.replace(params, stop=(stop,)))
    assert [c.finish_reason for c in stopped.choices] == ["length", "stop", "length"]
    assert stopped.choices[2].token_ids == output.choices[2].token_ids


def test_logprobs_come_when_asked(llm: LLM) -> None:
    params = dataclasses.replace(GREEDY, max_tokens=3, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    asked, plain = llm.generate(["A quick brown fox", "A quick brown fox"], [params, GREEDY])
    assert plain.logprobs is None and plain.prompt_logprobs is None
    assert asked.logprobs is not None and asked.prompt_logprobs is not None
    assert [e.token_id for e in asked.logprobs] == asked.token_ids
    assert all(len(e.top) == 2 and e.rank == 1 for e in asked.logprobs)
    assert len(asked.prompt_logprobs) == len(asked.prompt_token_ids)


def test_bad_words_are_given_as_text(llm: LLM) -> None:
    prompt = "The capital of France is"
    assert "Paris" in llm.generate(prompt, GREEDY)[0].text
    assert "Paris" not in llm.generate(prompt, dataclasses.replace(GREEDY, bad_words=("Paris",)))[0].text


@pytest.mark.parametrize(
    ("prompts", "params"),
    [
        (["fine", ""], GREEDY),
        (["fine", []], GREEDY),
        ([[1, 2], [10**9]], GREEDY),
        (["fine", "fine too"], [GREEDY, SamplingParams(temperature=-1.0)]),
        (["fine", [5] * 600], GREEDY),
    ],
)
def test_one_bad_prompt_and_nothing_runs(llm: LLM, prompts: list[Any], params: Any) -> None:
    steps = llm.stats().steps
    with pytest.raises(InvalidRequest):
        llm.generate(prompts, params)
    assert llm.stats().steps == steps
    assert len(llm.generate("fine", GREEDY)) == 1


def test_a_call_may_bring_more_prompts_than_a_server_would_queue(llm: LLM) -> None:
    with pytest.raises(RequestTooLarge):  # the last prompt is refused, not the 4097th as overload
        llm.generate([[1]] * 5000 + [[1] * 600], GREEDY)


def test_an_interrupted_call_leaves_nothing_to_the_next(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step, calls = llm.core.step, 0

    def interrupted() -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.core, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], dataclasses.replace(GREEDY, max_tokens=400, ignore_eos=True))
    before = llm.stats().generation_tokens
    assert len(llm.generate("c", dataclasses.replace(GREEDY, ignore_eos=True))[0].token_ids) == 12
    assert llm.stats().generation_tokens - before == 12


def test_progress_may_be_shown(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a"], GREEDY)
    assert capsys.readouterr().out == ""
    assert len(llm.generate(["a"], GREEDY, show_progress=True)) == 1


def test_leaving_the_context_ends_the_device_thread(loaded: LLM) -> None:
    with LLM(SMOLLM2, max_model_len=64, kv_cache_gib=0.01) as short:
        assert short.max_model_len == 64
        assert short.generate("a", GREEDY)[0].token_ids
    with pytest.raises(RuntimeError, match="shutdown"):
        short.generate("a", GREEDY)
    short.shutdown()  # once more is fine
