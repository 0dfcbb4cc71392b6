"""One evaluation of a cascade: from a labelled set and two models to the files that tell of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from footplate.deployments.cascade_eval.answering import (
    AskedModel,
    ModelAnswers,
    answer_all,
    judged,
    read_answers,
    write_answers,
)
from footplate.deployments.cascade_eval.drawing import draw
from footplate.routing.calibration import binomial_tail
from footplate.routing.cascade import Cascade, Policy
from footplate.routing.evaluation import Evaluation, LabelledItem, TokenPrices, evaluate


@dataclass(frozen=True, slots=True)
class Asking:
    """How both models are asked. `reuses`: take the answers that the folder has from an earlier run."""

    models: tuple[AskedModel, AskedModel]
    max_tokens: int
    options: dict[str, Any]
    models_dir: Path
    as_chat: bool = False
    reuses: bool = False

    def answers(self, items: Sequence[LabelledItem], out: Path) -> tuple[ModelAnswers, ModelAnswers]:
        """Of the small and the large model, kept in `out`.

        Raises:
            EngineError: a model can't be used.
            InvalidEvaluation: what is kept is of another set.
        """
        small, large = (
            self._answers(model, out / f"answers_{name}.jsonl", items)
            for model, name in zip(self.models, ("small", "large"), strict=True)
        )
        return small, large

    def _answers(self, model: AskedModel, file: Path, items: Sequence[LabelledItem]) -> ModelAnswers:
        if self.reuses:
            return read_answers(file, items)
        found = answer_all(model, items, self.max_tokens, self.options, self.models_dir, as_chat=self.as_chat)
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
    routes: str,
    *,
    draws: bool,
) -> None:
    """`cascade.json`, `routes.yaml` and, where it is wanted, `cascade.png`."""
    small, large = answers
    result = {
        **head,
        "small": {"source": small.source, "seconds": round(small.seconds, 1)},
        "large": {"source": large.source, "seconds": round(large.seconds, 1)},
        "better": better(small, large),
        "policies": {name: each.fields() for name, each in found.items()},
    }
    (out / "cascade.json").write_text(_written(result), "utf-8")
    (out / "routes.yaml").write_text(routes, "utf-8")
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


def routes_text(
    cascades: Mapping[str, Cascade], found: Mapping[str, Evaluation], asking: Asking, classifier: Path | None
) -> str:
    """A configuration's `routes:` with the thresholds that were set, to be named and pasted."""
    form = "chats of one message" if asking.as_chat else "plain completions"
    lines = [
        "# Name your models for SMALL and LARGE. A threshold holds for requests like those that set it:",
        f"# {form}, greedy, at most {asking.max_tokens} tokens, to the end of a line.",
        "routes:",
    ]
    for policy, each in found.items():
        threshold, cascade = each.calibration.threshold, cascades[policy]
        if threshold is None:
            lines.append(f"  # {policy}: no threshold keeps the stated risk")
            continue
        options = {
            Policy.RULES: f"rules: {{max_characters: {cascade.rules.max_characters}}}",
            Policy.CLASSIFIER: f"classifier: {'null' if classifier is None else json.dumps(str(classifier))}",
            Policy.CONFIDENCE: f"after_tokens: {cascade.after_tokens}",
        }
        lines.append(
            f"  - {{name: auto-{policy}, cascade: {{small: SMALL, large: LARGE, policy: {policy}, "
            f"threshold: {threshold:.3f}, {options[cascade.policy]}}}}}"
        )
    return "\n".join(lines) + "\n"


def _written(result: dict[str, Any]) -> str:
    """With a line for each point of a curve."""
    curves = {name: policy.pop("curve") for name, policy in result["policies"].items()}
    text = json.dumps(result | {"curves": {name: f"<{name}>" for name in curves}}, indent=1)
    for name, curve in curves.items():
        rows = ",\n   ".join(json.dumps(point) for point in curve)
        text = text.replace(f'"<{name}>"', f"[\n   {rows}\n  ]")
    return text + "\n"
