"""What is wrong with the routes of a configuration, held against its models and its files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from footplate.platform.settings_faults import Location
from footplate.routing.classifier import read_classifier
from footplate.routing.errors import InvalidClassifier
from footplate.routing.prompt_facts import LANGUAGES

if TYPE_CHECKING:
    from footplate.platform.settings import Settings


def faults_of_routes(settings: Settings) -> Iterator[tuple[Location, str]]:
    """A place and a sentence for each fault. A route leads to models, never to another route."""
    names = {name: model.name for model in settings.models for name in (model.name, *model.aliases)}
    for number, route in enumerate(settings.routes):
        given = route.cascade
        place: Location = ("routes", number, "cascade")
        for field in ("small", "large"):
            name = getattr(given, field)
            if name not in names:
                yield (*place, field), f"there is no model {name!r}; the models are {', '.join(names)}"
        if given.small in names and names.get(given.large) == names[given.small]:
            yield (*place, "large"), f"is the same model as small: {names[given.small]!r}"
        for index, code in enumerate((given.rules and given.rules.languages) or ()):
            if code not in LANGUAGES:
                known = ", ".join(LANGUAGES)
                yield (*place, "rules", "languages", index), f"{code!r} is not told apart; known are {known}"
        if given.classifier is not None:
            try:
                read_classifier(Path(given.classifier))
            except InvalidClassifier as error:
                yield (*place, "classifier"), f"{given.classifier} {error.message}"
