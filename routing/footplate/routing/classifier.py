"""A logistic regression over cheap features of a prompt: how likely the small model's answer loses nothing.

Trained by `routing/training/train_classifier.py`; the weights are data, and say what they were trained on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path

from footplate.routing.errors import InvalidClassifier
from footplate.routing.prompt_facts import PromptFacts

PACKAGED = "classifier_weights.json"
_VERSION = 1
_MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Weighed:
    """One feature: what it is moved and scaled by, and what it then weighs."""

    mean: float
    scale: float
    weight: float


@dataclass(frozen=True, slots=True)
class Classifier:
    """Weights by the names of `PromptFacts.numbers`. `small` and `large`: the models it was trained for."""

    bias: float
    features: Mapping[str, Weighed]
    small: str = ""
    large: str = ""
    num_examples: int = 0

    def score(self, facts: PromptFacts) -> float:
        """From 0 to 1: how likely it loses nothing to keep a prompt like this at the small model."""
        return sigmoid(self.bias + sum(self.contributions(facts).values()))

    def contributions(self, facts: PromptFacts) -> dict[str, float]:
        """What each feature adds to the sum that the score is made of; above 0 speaks for the small model."""
        numbers = facts.numbers()
        return {
            name: each.weight * clipped((numbers[name] - each.mean) / each.scale)
            for name, each in self.features.items()
        }

    def to_json(self) -> str:
        """As `read_classifier` takes it."""
        shown = {"version": _VERSION, **asdict(self)}
        return json.dumps(shown, indent=1, sort_keys=True) + "\n"


def sigmoid(value: float) -> float:
    """The logistic function, also far from 0."""
    if value >= 0:
        return 1 / (1 + math.exp(-min(value, 700)))
    power = math.exp(max(value, -700))
    return power / (1 + power)


def clipped(value: float) -> float:
    """A standardised feature: what lies far outside of what was trained on says no more than its border."""
    return min(4.0, max(-4.0, value))


def packaged_classifier() -> Classifier:
    """The one that ships: trained on the small tasks of `routing/eval`."""
    return parse_classifier((files("footplate.routing") / PACKAGED).read_text("utf-8"))


def read_classifier(path: Path) -> Classifier:
    """The weights of a file.

    Raises:
        InvalidClassifier: it can't be read, or holds no weights of this version.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise InvalidClassifier(f"can't be read: {error.strerror}") from None
    if len(data) > _MAX_BYTES:
        raise InvalidClassifier(f"is larger than {_MAX_BYTES} bytes")
    try:
        return parse_classifier(data.decode("utf-8"))
    except UnicodeDecodeError:
        raise InvalidClassifier("is not UTF-8") from None


def parse_classifier(text: str) -> Classifier:
    """Raises InvalidClassifier."""
    try:
        given = json.loads(text)
        if given["version"] != _VERSION:
            raise InvalidClassifier(f"is of version {given['version']!r}; this release reads {_VERSION}")
        features = {
            name: Weighed(*(_number(each[part]) for part in ("mean", "scale", "weight")))
            for name, each in given["features"].items()
        }
        found = Classifier(
            _number(given["bias"]),
            features,
            str(given.get("small", "")),
            str(given.get("large", "")),
            int(given.get("num_examples", 0)),
        )
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise InvalidClassifier("holds no weights; train_classifier.py writes them") from error
    known = PromptFacts(0).numbers()
    for name, each in features.items():
        if name not in known or each.scale <= 0:
            raise InvalidClassifier(
                "has a feature that this release doesn't know, or a scale that is not above 0"
            )
    return found


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError("weights are finite numbers")
    return float(value)


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt, and whether the small model's answer lost nothing against the large one's."""

    facts: PromptFacts
    is_safe: bool


def train(
    examples: Sequence[Example], small: str, large: str, *, ridge: float = 1.0, num_steps: int = 500
) -> Classifier:
    """Fit by Newton's method with a ridge penalty on all but the bias; the same examples, the same weights.

    Raises:
        InvalidClassifier: fewer than 10 examples, or all of one kind.
    """
    import numpy as np

    labels = np.array([float(example.is_safe) for example in examples])
    if len(examples) < 10 or labels.min() == labels.max():
        raise InvalidClassifier("needs at least 10 examples, of both kinds")
    names = sorted(examples[0].facts.numbers())
    rows = np.array([[example.facts.numbers()[name] for name in names] for example in examples])
    mean, scale = rows.mean(axis=0), rows.std(axis=0)
    used = scale > 1e-9
    names = [name for name, is_used in zip(names, used, strict=True) if is_used]
    mean, scale = mean[used], scale[used]
    inputs = np.clip((rows[:, used] - mean) / scale, -4, 4)
    inputs = np.hstack([np.ones((len(inputs), 1)), inputs])
    penalty = np.full(inputs.shape[1], ridge)
    penalty[0] = 1e-6
    weights = np.zeros(inputs.shape[1])
    for _ in range(num_steps):
        chance = 1 / (1 + np.exp(-np.clip(inputs @ weights, -30, 30)))
        slope = inputs.T @ (chance - labels) + penalty * weights
        curve = (inputs * (chance * (1 - chance))[:, None]).T @ inputs + np.diag(penalty)
        step = np.linalg.solve(curve, slope)
        weights = weights - step
        if float(np.abs(step).max()) < 1e-10:
            break
    features = {
        name: Weighed(round(float(mean[i]), 6), round(float(scale[i]), 6), round(float(weights[i + 1]), 6))
        for i, name in enumerate(names)
    }
    return Classifier(round(float(weights[0]), 6), features, small, large, len(examples))
