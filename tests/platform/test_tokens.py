"""`/v1/tokenize` and `/v1/detokenize` hold up nobody, and give nothing to whoever may use nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from footplate.engine.text.pipeline import TextPipeline
from footplate.platform.errors import LimitRefused
from footplate.platform.large_work import TenantThreads
from footplate.tenancy.quotas import Quota
from tests.builders import TENANT_KEY, principal
from tests.platform.conftest import Rig, chat_body

pytestmark = pytest.mark.anyio
TOKENIZE, DETOKENIZE = "/v1/tokenize", "/v1/detokenize"
MODEL = "smollm2-135m"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.parametrize("quota", [Quota(requests_per_minute=0), Quota(tokens_per_day=0)])
@pytest.mark.parametrize(("path", "body"), [(TOKENIZE, {"prompt": "hi"}), (DETOKENIZE, {"tokens": [1]})])
async def test_whoever_may_use_nothing_gets_nothing(
    rig: Rig, path: str, body: dict[str, Any], quota: Quota
) -> None:
    rig.keys.principals = {TENANT_KEY: replace(principal(), tenant_quota=quota)}
    response = await rig.post(path, {"model": MODEL, **body})
    assert (response.status_code, response.json()["error"]["code"]) == (429, "insufficient_quota")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (TOKENIZE, {"prompt": "a b c d " * 100_000}, "prompt"),
        (TOKENIZE, {"messages": [{"role": "user", "content": "a b c d " * 100_000}]}, "messages"),
        (DETOKENIZE, {"tokens": [500] * 8193}, "tokens"),
    ],
)
async def test_what_no_prompt_could_be_is_refused_as_in_a_prompt(
    rig: Rig, path: str, body: dict[str, Any], param: str
) -> None:
    response = await rig.post(path, {"model": MODEL, **body})
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    assert error["param"] == param and "8192" in error["message"]


class HeldPipeline(TextPipeline):
    """Tokenises certain texts only when it is told to."""

    def __init__(self, pipeline: TextPipeline) -> None:
        super().__init__(pipeline.tokenizer, pipeline.chat_template)
        self.may_go_on = threading.Event()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if text.startswith("held"):
            assert self.may_go_on.wait(30)
        return super().encode(text, add_special_tokens)


async def test_large_texts_of_one_tenant_hold_up_no_chat_and_no_other_tenant(
    make_rig: Callable[..., Rig], smollm2: TextPipeline
) -> None:
    pipeline = HeldPipeline(smollm2)
    rig = make_rig(load=lambda card: pipeline)
    rig.keys.principals |= {"fp_b": principal(tenant_id="tenant-b", key_id="key-b")}
    held = {"model": MODEL, "prompt": "held " + "word " * 500}
    calls = [asyncio.create_task(rig.post(TOKENIZE, held)) for _ in range(9)]
    try:
        await asyncio.sleep(0)
        messages = [{"role": "user", "content": "word " * 500}]
        assert (await rig.post("/v1/chat/completions", chat_body(messages=messages))).status_code == 200
        free = {"model": MODEL, "prompt": "word " * 500}
        assert (await rig.post(TOKENIZE, free, "fp_b")).status_code == 200
        refused = await rig.post(TOKENIZE, held)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert refused.headers["retry-after"] == "1"
    finally:
        pipeline.may_go_on.set()
    assert {call.status_code for call in await asyncio.gather(*calls)} == {200}


async def test_a_client_that_leaves_does_not_end_its_tenants_turn() -> None:
    threads = TenantThreads("test", max_waiting=1)
    has_begun, may_end = threading.Event(), threading.Event()
    order: list[str] = []

    def first() -> None:
        has_begun.set()
        assert may_end.wait(30)
        order.append("first")
        raise ValueError("nobody asks any more")

    left = asyncio.create_task(threads.run("a", first))
    while not has_begun.is_set():
        await asyncio.sleep(0)
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    second = asyncio.create_task(threads.run("a", lambda: order.append("second")))
    await asyncio.sleep(0)
    with pytest.raises(LimitRefused):
        await threads.run("a", lambda: None)
    await threads.run("b", lambda: order.append("b"))
    may_end.set()
    await second
    assert order == ["b", "first", "second"]
    await threads.run("a", lambda: None)
