"""Echoed prompts cost once, however many choices begin with them, and large answers never the event loop."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from footplate.engine.text.pipeline import TextPipeline
from footplate.platform.http.completions import MAX_PROMPT_ENTRIES
from tests.platform.conftest import Rig, chat_body, events, text_body

pytestmark = pytest.mark.anyio
PATH = "/v1/completions"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class CountingPipeline(TextPipeline):
    """Counts the token texts that are looked up for answers, by whether the event loop waits for it."""

    def __init__(self, pipeline: TextPipeline) -> None:
        super().__init__(pipeline.tokenizer, pipeline.chat_template)
        self.num_on_loop = self.num_apart = 0

    def token_bytes(self, token_id: int) -> bytes:
        self._count()
        return super().token_bytes(token_id)

    def token_text(self, token_id: int) -> str:
        self._count()
        return super().token_text(token_id)

    def _count(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self.num_on_loop += 1
        else:
            self.num_apart += 1


@pytest.fixture
def pipeline(smollm2: TextPipeline) -> CountingPipeline:
    return CountingPipeline(smollm2)


@pytest.fixture
def counted(make_rig: Callable[..., Rig], pipeline: CountingPipeline) -> Rig:
    return make_rig(load=lambda card: pipeline)


def _prompt(num_tokens: int) -> list[int]:
    return [1000 + number for number in range(num_tokens)]


@pytest.mark.parametrize("stream", [False, True])
async def test_more_choices_look_nothing_more_up_of_the_prompt(
    counted: Rig, pipeline: CountingPipeline, stream: bool
) -> None:
    async def cost(num_tokens: int, n: int) -> int:
        pipeline.num_on_loop = pipeline.num_apart = 0
        asked = text_body(
            prompt=_prompt(num_tokens), n=n, echo=True, logprobs=20, max_tokens=1, stream=stream
        )
        assert (await counted.post(PATH, asked)).status_code == 200
        return pipeline.num_on_loop + pipeline.num_apart

    of_answers = await cost(20, 65) - await cost(20, 1)
    assert of_answers > 0
    assert await cost(300, 65) - await cost(300, 1) == of_answers


@pytest.mark.parametrize("stream", [False, True])
async def test_a_large_echo_is_made_beside_the_event_loop_and_says_the_same(
    counted: Rig, pipeline: CountingPipeline, stream: bool
) -> None:
    asked = text_body(prompt=_prompt(300), echo=True, logprobs=20, max_tokens=3, return_token_ids=True)
    response = await counted.post(PATH, {**asked, "stream": stream})
    assert pipeline.num_apart >= 300 * 21
    # A stream's own tokens go out as they come.
    assert pipeline.num_on_loop < 300
    parts = [choice for event in events(response) for choice in event["choices"]] if stream else []
    whole = parts[0] if stream else response.json()["choices"][0]
    lists = whole["logprobs"]
    assert lists["token_logprobs"][:2] == [None, -0.5]
    assert whole["prompt_token_ids"] == asked["prompt"]
    if stream:
        [shown] = (await counted.post(PATH, asked)).json()["choices"]
        shown_parts = [part["logprobs"] for part in parts if part["logprobs"]]
        joined = {name: [value for part in shown_parts for value in part[name]] for name in lists}
        assert (joined, "".join(part["text"] for part in parts)) == (shown["logprobs"], shown["text"])


async def test_many_streamed_prompts_keep_their_order_when_some_are_large(counted: Rig) -> None:
    asked = text_body(prompt=[_prompt(300), [5], _prompt(400), [6]], echo=True, logprobs=20, max_tokens=3)
    choices = (await counted.post(PATH, asked)).json()["choices"]
    chunks = events(await counted.post(PATH, {**asked, "stream": True}))
    for choice in choices:
        texts = [c["text"] for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(texts) == choice["text"]


@pytest.mark.parametrize(
    "fields",
    [
        {"echo": True, "logprobs": 20, "n": 128},
        {"echo": True, "logprobs": 4, "n": 128},
        {"prompt_logprobs": 4, "n": 128},
        {"prompt": [_prompt(4000)] * 32, "n": 4, "echo": True, "logprobs": 2},
        {"prompt": [_prompt(4000)] * 128, "prompt_logprobs": 2},
    ],
)
async def test_an_answer_of_too_many_prompt_entries_is_refused(rig: Rig, fields: dict[str, Any]) -> None:
    response = await rig.post(PATH, text_body(**{"prompt": _prompt(4000), "max_tokens": 1, **fields}))
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "invalid_value")
    assert error["param"] == ("n" if "n" in fields else "prompt")
    assert str(MAX_PROMPT_ENTRIES) in error["message"]
    assert not rig.engine.generations


async def test_prompt_logprobs_of_a_large_answer_are_made_beside_the_event_loop(
    counted: Rig, pipeline: CountingPipeline
) -> None:
    for path, body in ((PATH, text_body), ("/v1/chat/completions", chat_body)):
        text = "word " * 400
        asked = body(prompt_logprobs=20, max_tokens=1)
        asked |= {"prompt": text} if path == PATH else {"messages": [{"role": "user", "content": text}]}
        response = await counted.post(path, asked)
        assert response.status_code == 200
        shown = response.json() if path != PATH else response.json()["choices"][0]
        assert len(shown["prompt_logprobs"]) > 400
        assert pipeline.num_on_loop == 0 < pipeline.num_apart
