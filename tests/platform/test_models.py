from __future__ import annotations

import asyncio

import pytest

from footplate.engine.errors import EngineOverloaded, LoadError
from footplate.engine.text.pipeline import TextPipeline
from footplate.engine.types import ModelCard
from footplate.platform.errors import ModelNotFound
from footplate.platform.models import PipelineProvider, find_model
from tests.builders import model_card

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_a_pipeline_is_loaded_once_for_all_who_wait(smollm2: TextPipeline) -> None:
    loads: list[str] = []

    def load(card: ModelCard) -> TextPipeline:
        loads.append(card.source)
        return smollm2

    provider = PipelineProvider(load=load)
    card = model_card()
    assert provider.loaded(card) is None
    found = await asyncio.gather(*(provider.get(card) for _ in range(10)))
    assert set(map(id, found)) == {id(smollm2)}
    assert loads == [card.source]
    assert provider.loaded(card) is smollm2
    assert provider.loaded(model_card(chat_template_file="/other.jinja")) is None


async def test_a_failed_load_is_tried_again(smollm2: TextPipeline) -> None:
    attempts = [LoadError("no such file"), None]

    def load(card: ModelCard) -> TextPipeline:
        failure = attempts.pop(0)
        if failure is not None:
            raise failure
        return smollm2

    provider = PipelineProvider(load=load)
    with pytest.raises(LoadError):
        await provider.get(model_card())
    assert await provider.get(model_card()) is smollm2


async def test_a_caller_that_leaves_does_not_take_the_load_along(smollm2: TextPipeline) -> None:
    provider = PipelineProvider(load=lambda card: smollm2)
    leaving = asyncio.create_task(provider.get(model_card()))
    await asyncio.sleep(0)
    leaving.cancel()
    assert await provider.get(model_card()) is smollm2


def test_models_are_found_by_name_then_alias() -> None:
    cards = {card.name: card for card in (model_card("a", aliases=("x",)), model_card("b"))}
    assert find_model(cards, "a").name == find_model(cards, "x").name == "a"
    with pytest.raises(ModelNotFound):
        find_model(cards, "c")


def test_while_no_replica_has_answered_clients_are_to_come_again() -> None:
    """A 404 would end a client for good that is only early."""
    with pytest.raises(EngineOverloaded, match="try again"):
        find_model({}, "small")
