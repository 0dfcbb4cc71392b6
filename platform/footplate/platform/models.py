"""Which models a tenant can name, and each model's text pipeline, loaded when it is first needed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

from footplate.engine.errors import EngineOverloaded
from footplate.engine.text.pipeline import TextPipeline
from footplate.engine.types import ModelCard
from footplate.platform.errors import ModelNotFound

NO_SUCH_MODEL = "There is no such model, or this key may not use it. GET /v1/models lists yours."

PipelineLoader = Callable[[ModelCard], TextPipeline]


class PipelineProvider:
    """Text pipelines by model, each loaded once, in a thread. Belongs to one event loop."""

    def __init__(self, models_dir: str | Path | None = None, load: PipelineLoader | None = None) -> None:
        self._models_dir = models_dir
        self._load = load or self._load_from_source
        self._loading: dict[tuple[str, str | None], asyncio.Task[TextPipeline]] = {}
        self._loaded: dict[tuple[str, str | None], TextPipeline] = {}

    def loaded(self, card: ModelCard) -> TextPipeline | None:
        """The pipeline if it is there already."""
        return self._loaded.get((card.source, card.chat_template_file))

    async def get(self, card: ModelCard) -> TextPipeline:
        """The pipeline of a model. A failed load is tried again by the next caller.

        Raises:
            LoadError: tokenizer or template can't be used.
        """
        key = (card.source, card.chat_template_file)
        found = self._loaded.get(key)
        if found is not None:
            return found
        task = self._loading.get(key)
        if task is None:
            task = self._loading[key] = asyncio.create_task(asyncio.to_thread(self._load, card))
        try:
            # One caller that goes away must not take the load from the others.
            pipeline = await asyncio.shield(task)
        finally:
            if task.done():
                self._loading.pop(key, None)
        self._loaded[key] = pipeline
        return pipeline

    def _load_from_source(self, card: ModelCard) -> TextPipeline:
        return TextPipeline.load(card.source, card.chat_template_file, self._models_dir)


def find_model(models: Mapping[str, ModelCard], name: str) -> ModelCard:
    """The served model of that name or alias.

    Raises:
        ModelNotFound: there is none.
        EngineOverloaded: no replica of any model has answered yet, so nobody can say.
    """
    if not models:
        raise EngineOverloaded("no model has answered yet; try again in a moment")
    card = models.get(name)
    if card is not None:
        return card
    for candidate in models.values():
        if name in candidate.aliases:
            return candidate
    raise ModelNotFound(NO_SUCH_MODEL)
