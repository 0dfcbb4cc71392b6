"""Thresholds that keep a stated risk, from labelled examples: learn, then test. Pure.

The risk of a threshold is how often, over all requests, the small model's answer is kept although it is wrong
where the large model's is right. Thresholds of a fixed grid are tested one after the other, from the one that
keeps nothing downwards, each by an exact binomial test of "its risk is above the stated one"; the first that
can't be rejected ends the walk, and the last one before it is chosen. Since the order is fixed beforehand and
the walk ends at the first failure, the chosen threshold's risk is above the stated one with a probability of
at most 1 - confidence over the draw of the examples, however many thresholds were tried (fixed-sequence
testing; Angelopoulos et al., "Learn then Test", 2021). It holds for requests like the examples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

GRID = tuple(step / 200 for step in range(200, -1, -1))


@dataclass(frozen=True, slots=True)
class Judged:
    """One labelled example: its score, and what is lost (0 to 1) if the small model's answer is kept."""

    score: float
    loss: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """A threshold and what it promises. `threshold` None: not even the first could be accepted.

    `loss_bound`: the upper confidence bound on the risk at the threshold, by these examples alone.
    """

    threshold: float | None
    risk: float
    confidence: float
    num_examples: int
    num_kept: int
    mean_loss: float
    loss_bound: float


def calibrate(examples: Sequence[Judged], risk: float, confidence: float) -> Calibration:
    """The lowest threshold whose risk is at most `risk`, with the stated confidence.

    Raises:
        ValueError: `risk` or `confidence` is not between 0 and 1, or a loss is not within 0 to 1.
    """
    if not (0 < risk < 1 and 0 < confidence < 1):
        raise ValueError("risk and confidence lie between 0 and 1")
    if any(not 0 <= example.loss <= 1 for example in examples):
        raise ValueError("losses lie within 0 to 1")
    chosen = None
    for threshold in GRID:
        if p_value(_losses(examples, threshold), risk) > 1 - confidence:
            break
        chosen = threshold
    kept = [example for example in examples if chosen is not None and example.score >= chosen]
    losses = [0.0] * len(examples) if chosen is None else _losses(examples, chosen)
    return Calibration(
        chosen,
        risk,
        confidence,
        len(examples),
        len(kept),
        sum(losses) / len(losses) if losses else 0.0,
        mean_bound(losses, confidence),
    )


def _losses(examples: Sequence[Judged], threshold: float) -> list[float]:
    return [example.loss if example.score >= threshold else 0.0 for example in examples]


def p_value(losses: Sequence[float], risk: float) -> float:
    """How likely losses this small are if their true mean is above `risk`.

    Exact (binomial) where every loss is 0 or 1, else by the bound of Hoeffding and Bentkus.
    """
    if not losses:
        return 1.0
    total = sum(losses)
    if all(loss in (0.0, 1.0) for loss in losses):
        return binomial_tail(round(total), len(losses), risk)
    return hoeffding_bentkus(total / len(losses), len(losses), risk)


def binomial_tail(num: int, count: int, chance: float) -> float:
    """The probability of at most `num` of `count`, each with `chance`."""
    if num >= count or chance <= 0:
        return 1.0
    if chance >= 1:
        return 0.0
    logs = [
        math.lgamma(count + 1)
        - math.lgamma(k + 1)
        - math.lgamma(count - k + 1)
        + k * math.log(chance)
        + (count - k) * math.log1p(-chance)
        for k in range(num + 1)
    ]
    return min(1.0, math.fsum(map(math.exp, logs)))


def hoeffding_bentkus(mean: float, count: int, risk: float) -> float:
    """A p-value for means of values within 0 to 1: the smaller of two bounds that hold for all such."""
    if mean >= risk:
        return 1.0
    divergence = (mean * math.log(mean / risk) if mean > 0 else 0.0) + (1 - mean) * math.log(
        (1 - mean) / (1 - risk)
    )
    bentkus = math.e * binomial_tail(math.ceil(count * mean), count, risk)
    return min(1.0, math.exp(-count * divergence), bentkus)


def mean_bound(losses: Sequence[float], confidence: float) -> float:
    """The upper confidence bound on a mean: the largest one that `p_value` does not reject; 1 without losses.

    For losses of 0 and 1 it is that of Clopper and Pearson.
    """
    low, high = 0.0, 1.0
    if not losses or sum(losses) >= len(losses):
        return 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if p_value(losses, middle) > 1 - confidence:
            low = middle
        else:
            high = middle
    return high
