"""The openai SDK is the judge of the wire."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import openai
import pytest

from footplate.engine.errors import EngineDead, EngineOverloaded
from footplate.engine.types import TokenLogprob
from tests.builders import TENANT_KEY
from tests.platform.conftest import Rig

pytestmark = pytest.mark.anyio
USER: Any = [{"role": "user", "content": "Hi"}]
MODEL = "smollm2-135m"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def sdk(rig: Rig) -> AsyncIterator[openai.AsyncOpenAI]:
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(rig.app))
    client = openai.AsyncOpenAI(
        api_key=TENANT_KEY, base_url="http://test/v1", http_client=http, max_retries=0
    )
    yield client
    await client.close()


async def test_a_chat_answer(sdk: openai.AsyncOpenAI) -> None:
    answer = await sdk.chat.completions.create(model=MODEL, messages=USER, logprobs=True, top_logprobs=1)
    assert answer.choices[0].message.content == "Hello there."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].logprobs and answer.choices[0].logprobs.content
    assert answer.usage and answer.usage.prompt_tokens_details
    assert answer._request_id and answer._request_id.startswith("req_")


async def test_a_chat_stream(sdk: openai.AsyncOpenAI) -> None:
    stream = await sdk.chat.completions.create(
        model=MODEL, messages=USER, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "Hello there."
    assert chunks[-1].usage and chunks[-1].usage.completion_tokens == 4


async def test_the_stream_helper_folds_to_the_answer(sdk: openai.AsyncOpenAI) -> None:
    async with sdk.chat.completions.stream(model=MODEL, messages=USER) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == "Hello there."


async def test_a_completion_with_extras(rig: Rig, sdk: openai.AsyncOpenAI) -> None:
    answer = await sdk.completions.create(
        model=MODEL, prompt=["a", "b"], echo=True, logprobs=1, extra_body={"top_k": 5, "min_p": 0.1}
    )
    assert [choice.text for choice in answer.choices] == ["aHello there.", "bHello there."]
    assert answer.choices[0].logprobs and answer.choices[0].logprobs.token_logprobs
    assert answer.choices[0].logprobs.token_logprobs[0] is None
    assert rig.engine.requests[0].params.top_k == 5


async def test_models(sdk: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in sdk.models.list()] == [MODEL, "small"]
    assert (await sdk.models.retrieve(MODEL)).id == MODEL


async def test_errors_have_their_classes(rig: Rig, sdk: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await sdk.chat.completions.create(model=MODEL, messages=USER, n=1000)
    assert (bad.value.code, bad.value.param) == ("invalid_value", "n")
    with pytest.raises(openai.NotFoundError) as missing:
        await sdk.chat.completions.create(model="none", messages=USER)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError):
        await sdk.with_options(api_key="wrong").models.list()
    rig.emits([5], refusal=EngineOverloaded("full", 3))
    with pytest.raises(openai.InternalServerError) as full:
        await sdk.chat.completions.create(model=MODEL, messages=USER)
    assert full.value.status_code == 503
    assert full.value.response.headers["retry-after"] == "3"


async def test_a_failure_in_a_stream_is_raised(rig: Rig, sdk: openai.AsyncOpenAI) -> None:
    rig.says("Hello there.", failure=EngineDead("lost"), fail_after=2)
    stream = await sdk.chat.completions.create(model=MODEL, messages=USER, stream=True)
    with pytest.raises(openai.APIError) as failed:
        async for _ in stream:
            pass
    assert failed.value.code == "server_error"


async def test_infinite_logprobs_are_finite_on_the_wire(
    rig: Rig, sdk: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = TokenLogprob(5, -math.inf, 49_152, ((6, -0.1),))
    monkeypatch.setattr("tests.fakes.logprob_of", lambda token_id, num_top, logprob: entry)
    answer = await sdk.chat.completions.create(model=MODEL, messages=USER, logprobs=True)
    assert answer.choices[0].logprobs and answer.choices[0].logprobs.content
    assert answer.choices[0].logprobs.content[0].logprob == -9999.0
