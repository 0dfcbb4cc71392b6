"""A route one of whose models can't be loaded."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from footplate.engine.errors import LoadError
from footplate.engine.text.pipeline import TextPipeline
from footplate.engine.types import ModelCard
from tests.platform.test_cascade import TEXT, Routed, anyio_backend, asking, make_routed, models_named

__all__ = ["anyio_backend", "make_routed"]  # fixtures
pytestmark = pytest.mark.anyio


def broken(*names: str, pipeline: TextPipeline) -> Callable[[ModelCard], TextPipeline]:
    def load(card: ModelCard) -> TextPipeline:
        if card.name in names:
            raise LoadError("no tokenizer")
        return pipeline

    return load


@pytest.mark.parametrize("policy", ["rules", "confidence"])
async def test_a_model_that_cannot_be_loaded_takes_the_other_down_with_it_only_where_it_has_to_answer(
    make_routed: Callable[..., Routed], smollm2: TextPipeline, policy: str
) -> None:
    rules = {"rules": {"max_characters": 20}} if policy == "rules" else {}
    for names, easy, hard in (
        ("big", "little", None),
        ("little", "big", "big"),
        (("little", "big"), None, None),
    ):
        load = broken(*([names] if isinstance(names, str) else names), pipeline=smollm2)
        routed = make_routed(load=load, policy=policy, threshold=0.5, **rules)
        for prompt, wanted in (("short", easy), ("a text beyond the length", hard)):
            if policy == "confidence" and names == "big":
                wanted = None  # the small one is never asked alone
            response = await routed.post(TEXT, asking(TEXT, prompt=prompt))
            if wanted is None:
                assert (response.status_code, response.json()["error"]["code"]) == (500, "server_error")
            else:
                assert models_named(response) == {wanted}
