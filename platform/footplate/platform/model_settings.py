"""What is wrong with the models of a configuration, beyond what each field says of itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from footplate.engine.errors import LoadError
from footplate.engine.text.pipeline import check_template_file
from footplate.platform.settings_faults import Location

if TYPE_CHECKING:
    from footplate.platform.settings import Settings


def faults_of_models(settings: Settings) -> Iterator[tuple[Location, str]]:
    """A place and a sentence for each fault: names that stand for two things, templates that are none."""
    taken: dict[str, str] = {}
    for place, what, name in _names(settings):
        if name in taken:
            yield place, f"{name!r} is the name of {taken[name]} already"
        taken.setdefault(name, what)
    for number, model in enumerate(settings.models):
        if model.chat_template is not None:
            try:
                check_template_file(Path(model.chat_template))
            except LoadError as error:
                yield ("models", number, "chat_template"), str(error)


def _names(settings: Settings) -> Iterator[tuple[Location, str, str]]:
    """All that clients may send as the model: where it stands, what it stands for, and itself."""
    for number, model in enumerate(settings.models):
        yield ("models", number, "name"), "a model", model.name
        for index, alias in enumerate(model.aliases):
            yield ("models", number, "aliases", index), "a model", alias
    for number, route in enumerate(settings.routes):
        yield ("routes", number, "name"), "a route", route.name
