"""What a cascade costs and loses on a labelled set, for every threshold. Pure: answers in, figures out.

Each item of the set was answered by both models; a policy's score of it says which answer would have been
delivered. Costs are those of the platform: an attempt that was thrown away is paid for too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from footplate.routing.calibration import GRID, Calibration, Judged, calibrate, mean_bound
from footplate.routing.errors import InvalidEvaluation

MAX_ITEMS = 1_000_000
CALIBRATE, TEST = "calibrate", "test"


@dataclass(frozen=True, slots=True)
class LabelledItem:
    """One line of a set. Any of `answers` is right. `split` says what it is for."""

    id: str
    split: str
    prompt: str
    answers: tuple[str, ...]
    kind: str = ""
    tag: str = ""


def parse_set(lines: Iterable[str]) -> list[LabelledItem]:
    """The items of a JSONL file; empty lines are left out. Items without a split alternate between two.

    Raises:
        InvalidEvaluation: a line is no item, or an id stands twice; the line is named, never its text.
    """
    items: list[LabelledItem] = []
    seen: set[str] = set()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        default = TEST if len(items) % 2 else CALIBRATE
        item = _parse_item(line, number, default)
        if item.id in seen:
            raise InvalidEvaluation(f"line {number}: the id stands twice")
        seen.add(item.id)
        items.append(item)
        if len(items) > MAX_ITEMS:
            raise InvalidEvaluation(f"the set has more than {MAX_ITEMS} items")
    if not items:
        raise InvalidEvaluation("the set is empty")
    return items


def _parse_item(line: str, number: int, default_split: str) -> LabelledItem:
    try:
        given = json.loads(line)
        answers = given["answers"]
        texts = [given.get("id", str(number)), given.get("split", default_split), given["prompt"]]
        texts += [given.get("kind", ""), given.get("tag", ""), *answers]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise InvalidEvaluation(
            f'line {number}: must be a JSON object with "prompt" and "answers", a list of texts'
        ) from None
    is_list = isinstance(answers, list) and len(answers) > 0
    if not is_list or not all(isinstance(text, str) for text in texts) or not all((texts[2], *answers)):
        raise InvalidEvaluation(f"line {number}: prompt and answers must be texts that are not empty")
    return LabelledItem(texts[0], texts[1], texts[2], tuple(answers), texts[3], texts[4])


def is_right(text: str, answers: Sequence[str]) -> bool:
    """Whether an answer begins with one of the right ones as whole words, whatever its case."""
    said = text.strip().strip("'\"").lower()
    return any(re.match(re.escape(answer.lower()) + r"(?!\w)(?![.,]\d)", said) for answer in answers)


@dataclass(frozen=True, slots=True)
class Answer:
    """What one model made of one item."""

    is_right: bool
    num_prompt: int
    num_output: int


@dataclass(frozen=True, slots=True)
class Answered:
    """An item's two answers, and a policy's score of it. `num_tried`: output tokens of an escalated attempt.

    `is_asked_first`: whether the small model is asked before the decision, as by the policy `confidence`.
    """

    id: str
    split: str
    tag: str
    small: Answer
    large: Answer
    score: float
    is_asked_first: bool = False
    num_tried: int = 0

    @property
    def loss(self) -> float:
        """What is lost if the small model's answer is kept."""
        return float(self.large.is_right and not self.small.is_right)


@dataclass(frozen=True, slots=True)
class TokenPrices:
    """Of one model, for one million tokens, in any one unit."""

    input: float
    output: float

    def cost(self, num_prompt: int, num_output: int) -> float:
        """Of so many tokens, in that unit."""
        return (num_prompt * self.input + num_output * self.output) / 1e6


@dataclass(frozen=True, slots=True)
class Point:
    """A threshold's figures over some items. Shares are of the items; costs are of all items together."""

    threshold: float
    kept_share: float
    quality: float
    loss: float
    cost: float
    attempt_cost: float

    def fields(self) -> dict[str, float]:
        """As it is written."""
        return {
            "threshold": self.threshold,
            "kept_share": round(self.kept_share, 4),
            "quality": round(self.quality, 4),
            "loss": round(self.loss, 4),
            "cost": round(self.cost, 9),
            "attempt_cost": round(self.attempt_cost, 9),
        }


def point(items: Sequence[Answered], threshold: float, small: TokenPrices, large: TokenPrices) -> Point:
    """The figures of one threshold; above 1 it keeps nothing, and asks nothing of the small model first."""
    num_kept = num_right = 0
    loss = cost = attempts = 0.0
    for item in items:
        if item.score >= threshold:
            num_kept += 1
            num_right += item.small.is_right
            loss += item.loss
            cost += small.cost(item.small.num_prompt, item.small.num_output)
            continue
        num_right += item.large.is_right
        cost += large.cost(item.large.num_prompt, item.large.num_output)
        if item.is_asked_first and threshold <= 1:
            attempts += small.cost(item.small.num_prompt, item.num_tried)
    count = max(1, len(items))
    return Point(threshold, num_kept / count, num_right / count, loss / count, cost + attempts, attempts)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A policy measured. `curve` and `chosen` are of the items that only measure; `chosen` None: no threshold
    keeps the risk, so that everything goes to the large model."""

    calibration: Calibration
    always_small: Point
    always_large: Point
    chosen: Point | None
    chosen_loss_bound: float
    curve: tuple[Point, ...]
    by_tag: Mapping[str, tuple[int, float, float]]

    def fields(self) -> dict[str, Any]:
        """As it is written."""
        found, large = self.calibration, self.always_large
        chosen = None
        if self.chosen is not None:
            chosen = self.chosen.fields() | {
                "loss_bound": round(self.chosen_loss_bound, 4),
                "saving_net": round(1 - self.chosen.cost / large.cost, 4) if large.cost else 0.0,
                "saving_gross": round(1 - (self.chosen.cost - self.chosen.attempt_cost) / large.cost, 4)
                if large.cost
                else 0.0,
            }
        return {
            "calibration": {
                "threshold": found.threshold,
                "risk": found.risk,
                "confidence": found.confidence,
                "items": found.num_examples,
                "kept": found.num_kept,
                "loss": round(found.mean_loss, 4),
                "loss_bound": round(found.loss_bound, 4),
            },
            "always_small": self.always_small.fields(),
            "always_large": self.always_large.fields(),
            "at_threshold": chosen,
            "by_tag": {
                tag: {"items": count, "small": round(small, 4), "large": round(large_quality, 4)}
                for tag, (count, small, large_quality) in sorted(self.by_tag.items())
            },
            "curve": [each.fields() for each in self.curve],
        }


def evaluate(
    items: Sequence[Answered], small: TokenPrices, large: TokenPrices, *, risk: float, confidence: float
) -> Evaluation:
    """Set the threshold on the items for that, and measure it on those for that.

    Raises:
        InvalidEvaluation: there are none of either kind.
    """
    calibrating = [item for item in items if item.split == CALIBRATE]
    testing = [item for item in items if item.split == TEST]
    if not calibrating or not testing:
        raise InvalidEvaluation('the set needs items of the splits "calibrate" and "test"')
    found = calibrate([Judged(item.score, item.loss) for item in calibrating], risk, confidence)
    chosen, bound = None, 0.0
    if found.threshold is not None:
        chosen = point(testing, found.threshold, small, large)
        kept = [item.loss if item.score >= found.threshold else 0.0 for item in testing]
        bound = mean_bound(kept, confidence)
    return Evaluation(
        found,
        point(testing, 0.0, small, large),
        # Nothing reaches it.
        point(testing, 2.0, small, large),
        chosen,
        bound,
        tuple(point(testing, threshold, small, large) for threshold in reversed(GRID)),
        _by_tag(items),
    )


def _by_tag(items: Sequence[Answered]) -> dict[str, tuple[int, float, float]]:
    def share(group: Sequence[Answered], read: Callable[[Answered], bool]) -> float:
        return sum(map(read, group)) / len(group)

    found = {}
    for tag in {item.tag for item in items}:
        group = [item for item in items if item.tag == tag]
        found[tag] = (
            len(group),
            share(group, lambda item: item.small.is_right),
            share(group, lambda item: item.large.is_right),
        )
    return found
