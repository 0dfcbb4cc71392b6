"""Routes: the virtual models of the configuration, and which served models a request for one may end at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from footplate.engine.errors import EngineOverloaded
from footplate.engine.types import ModelCard
from footplate.platform.admission import authorise, may_use
from footplate.platform.errors import ModelNotFound
from footplate.platform.models import find_model
from footplate.platform.ports import Principal
from footplate.platform.settings import CascadeSettings, Settings
from footplate.routing.cascade import (
    DEFAULT_AFTER_TOKENS,
    Cascade,
    CascadeReason,
    Decision,
    Policy,
    Rules,
    Target,
)
from footplate.routing.classifier import packaged_classifier, read_classifier


def cascades_of(settings: Settings) -> dict[str, Cascade]:
    """The routes by name; their models by name, not by alias. Settings have been checked.

    Raises:
        InvalidClassifier: a file of weights has changed since.
    """
    names = {name: model.name for model in settings.models for name in (model.name, *model.aliases)}
    found = {}
    for route in settings.routes:
        given = route.cascade
        classifier = None
        if given.policy == "classifier":
            path = given.classifier
            classifier = packaged_classifier() if path is None else read_classifier(Path(path))
        found[route.name] = Cascade(
            route.name,
            names[given.small],
            names[given.large],
            Policy(given.policy),
            given.threshold,
            given.after_tokens or DEFAULT_AFTER_TOKENS,
            _rules(given),
            classifier,
        )
    return found


def _rules(given: CascadeSettings) -> Rules:
    rules = given.rules
    if rules is None:
        return Rules()
    return Rules(
        rules.max_characters,
        None if rules.languages is None else frozenset(rules.languages),
        rules.tools,
        frozenset(tag.casefold() for tag in rules.small_tags),
        frozenset(tag.casefold() for tag in rules.large_tags),
    )


@dataclass(frozen=True, slots=True)
class Targets:
    """The models that a request is for, in the order in which they are asked; the decision where it stands.

    `is_optional` of the first: where it can't be asked the second one answers. Of the second: it is there for
    when the first one can't, and where it can't be asked the first one answers alone.
    """

    cards: tuple[ModelCard, ...]
    decision: Decision


def targets_of(
    cascade: Cascade, decision: Decision, principal: Principal, models: Mapping[str, ModelCard]
) -> Targets:
    """What a decision leads to, every model of it authorised for the principal.

    A decision that is not final needs both. One for the small model may fall back to the large one where that
    is allowed too, and one for the large model never goes to the small one.

    Raises:
        ModelNotFound: a model that has to be there is not, or the principal may not use it.
        EngineOverloaded: no model has answered yet.
    """
    if decision.target is Target.LARGE:
        return Targets((_authorised(models, principal, cascade.large),), decision)
    small, large = models.get(cascade.small), models.get(cascade.large)
    if decision.target is Target.SMALL_FIRST:
        found = _authorised(models, principal, cascade.large)
        if small is None:
            return Targets((found,), Decision(Target.LARGE, CascadeReason.SMALL_REFUSED))
        authorise(principal, small)
        return Targets((small, found), decision)
    if small is None:
        # It is not served now: the same as one that refuses.
        found = _authorised(models, principal, cascade.large)
        return Targets((found,), Decision(Target.LARGE, CascadeReason.SMALL_REFUSED))
    authorise(principal, small)
    if large is not None and may_use(principal, large):
        return Targets((small, large), decision)
    return Targets((small,), decision)


def usable_targets(
    cascade: Cascade, principal: Principal, models: Mapping[str, ModelCard]
) -> tuple[ModelCard, ModelCard] | None:
    """Both models, where the principal may use both and both are served: then the route is shown to it."""
    try:
        return _authorised(models, principal, cascade.small), _authorised(models, principal, cascade.large)
    except (ModelNotFound, EngineOverloaded):
        return None


def check_may_end(cascade: Cascade, principal: Principal, models: Mapping[str, ModelCard]) -> None:
    """Refuse for good what no request of the principal can be answered by.

    Raises:
        ModelNotFound: whatever is decided for a request, the principal may not use what would answer.
        EngineOverloaded: no model has answered yet.
    """
    large = _authorised(models, principal, cascade.large) if cascade.policy is Policy.CONFIDENCE else None
    try:
        _authorised(models, principal, cascade.small)
    except ModelNotFound:
        # Rules and classifiers may send it to the large one alone.
        if large is not None and cascade.small in models:
            raise
        _authorised(models, principal, cascade.large)


def _authorised(models: Mapping[str, ModelCard], principal: Principal, name: str) -> ModelCard:
    card = find_model(models, name)
    authorise(principal, card)
    return card
