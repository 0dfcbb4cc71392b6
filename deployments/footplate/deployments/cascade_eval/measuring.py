"""One evaluation of a cascade: from a labelled set and two models to the files that tell of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from footplate.deployments.cascade_eval.answering import (
    ModelAnswers,
    answer_all,
    judged,
    read_answers,
    write_answers,
)
from footplate.deployments.cascade_eval.drawing import draw
from footplate.routing.calibration import binomial_tail
from footplate.routing.cascade import Cascade
from footplate.routing.evaluation import Evaluation, LabelledItem, TokenPrices, evaluate


@dataclass(frozen=True, slots=True)
class Asking:
    """How both models are asked. `reuses`: take the answers that the folder has from an earlier run."""

    sources: tuple[str, str]
    max_tokens: int
    options: dict[str, Any]
    models_dir: Path
    reuses: bool = False

    def answers(self, items: Sequence[LabelledItem], out: Path) -> tuple[ModelAnswers, ModelAnswers]:
        """Of the small and the large model, kept in `out`.

        Raises:
            EngineError: a model can't be used.
            InvalidEvaluation: what is kept is of another set.
        """
        small, large = (
            self._answers(source, out / f"answers_{name}.jsonl", items)
            for source, name in zip(self.sources, ("small", "large"), strict=True)
        )
        return small, large

    def _answers(self, source: str, file: Path, items: Sequence[LabelledItem]) -> ModelAnswers:
        if self.reuses:
            return read_answers(file, items)
        found = answer_all(source, items, self.max_tokens, self.options, self.models_dir)
        write_answers(file, found)
        return found


@dataclass(frozen=True, slots=True)
class Measure:
    """What is measured: each policy with its cascade, at prices of the small and the large model."""

    cascades: dict[str, Cascade]
    prices: tuple[TokenPrices, TokenPrices]
    risk: float
    confidence: float

    def evaluations(
        self, items: Sequence[LabelledItem], small: ModelAnswers, large: ModelAnswers
    ) -> dict[str, Evaluation]:
        """By policy. Raises InvalidEvaluation."""
        return {
            policy: evaluate(
                judged(cascade, items, small, large),
                *self.prices,
                risk=self.risk,
                confidence=self.confidence,
            )
            for policy, cascade in self.cascades.items()
        }


def write_all(
    out: Path,
    head: dict[str, Any],
    found: dict[str, Evaluation],
    answers: tuple[ModelAnswers, ModelAnswers],
    *,
    draws: bool,
) -> None:
    """`cascade.json`, `thresholds.yaml` and, where it is wanted, `cascade.png`."""
    small, large = answers
    result = {
        **head,
        "small": {"source": small.source, "seconds": round(small.seconds, 1)},
        "large": {"source": large.source, "seconds": round(large.seconds, 1)},
        "better": better(small, large),
        "policies": {name: each.fields() for name, each in found.items()},
    }
    (out / "cascade.json").write_text(_written(result), "utf-8")
    (out / "thresholds.yaml").write_text(thresholds(found), "utf-8")
    if draws:
        draw(out / "cascade.png", found, (small.source, large.source))


def better(small: ModelAnswers, large: ModelAnswers) -> dict[str, Any]:
    """Which model is right more often, and whether that could be chance: a sign test on where they differ."""
    pairs = [(one.is_right, two.is_right) for one, two in zip(small.answers, large.answers, strict=True)]
    only_small, only_large = pairs.count((True, False)), pairs.count((False, True))
    chance = min(1.0, 2 * binomial_tail(min(only_small, only_large), only_small + only_large, 0.5))
    return {
        "model": "small" if only_small > only_large else "large" if only_large > only_small else "neither",
        "both_right": pairs.count((True, True)),
        "only_small_right": only_small,
        "only_large_right": only_large,
        "neither_right": pairs.count((False, False)),
        "sign_test_p": round(chance, 5),
    }


def thresholds(found: dict[str, Evaluation]) -> str:
    """What goes into a route's `cascade:` for each policy."""
    lines = ["# For the section cascade of a route; null: no threshold keeps the stated risk."]
    for policy, each in found.items():
        threshold = each.calibration.threshold
        shown = "null" if threshold is None else f"{threshold:.3f}"
        lines.append(f"{policy}: {{policy: {policy}, threshold: {shown}}}")
    return "\n".join(lines) + "\n"


def _written(result: dict[str, Any]) -> str:
    """With a line for each point of a curve."""
    curves = {name: policy.pop("curve") for name, policy in result["policies"].items()}
    text = json.dumps(result | {"curves": {name: f"<{name}>" for name in curves}}, indent=1)
    for name, curve in curves.items():
        rows = ",\n   ".join(json.dumps(point) for point in curve)
        text = text.replace(f'"<{name}>"', f"[\n   {rows}\n  ]")
    return text + "\n"
