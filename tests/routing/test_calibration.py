"""Thresholds for a stated risk, and what an evaluation says of them. Pure."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from footplate.routing.calibration import (
    Judged,
    binomial_tail,
    calibrate,
    hoeffding_bentkus,
    mean_bound,
    p_value,
)
from footplate.routing.errors import InvalidEvaluation
from footplate.routing.evaluation import Answer, Answered, TokenPrices, evaluate, is_right, parse_set, point


def test_the_binomial_tail_is_exact() -> None:
    for num, count, chance in ((0, 5, 0.1), (2, 5, 0.3), (7, 20, 0.5), (19, 20, 0.99)):
        wanted = sum(math.comb(count, k) * chance**k * (1 - chance) ** (count - k) for k in range(num + 1))
        assert binomial_tail(num, count, chance) == pytest.approx(wanted)
    assert binomial_tail(5, 5, 0.9) == binomial_tail(0, 5, 0.0) == 1.0
    assert binomial_tail(4, 5, 1.0) == 0.0


def test_without_a_loss_the_bound_is_the_rule_of_three() -> None:
    """59 examples without a loss are what it takes for 5 % with 95 % confidence."""
    assert mean_bound([0.0] * 59, 0.95) == pytest.approx(1 - 0.05 ** (1 / 59), abs=1e-9)
    assert mean_bound([0.0] * 59, 0.95) < 0.05 < mean_bound([0.0] * 58, 0.95)
    assert mean_bound([], 0.95) == mean_bound([1.0], 0.95) == 1.0


@given(st.integers(0, 60), st.integers(61, 200), st.floats(0.01, 0.9))
def test_the_bound_for_any_losses_is_never_below_the_exact_one(num: int, count: int, risk: float) -> None:
    mean = num / count
    if mean < risk:
        assert hoeffding_bentkus(mean, count, risk) >= binomial_tail(num, count, risk) - 1e-12
    assert p_value([0.5] * num + [0.0] * (count - num), risk) <= 1


def examples(draw: random.Random, count: int) -> list[Judged]:
    """The less sure, the more often something is lost: with the chance (1 - score) / 2."""
    scores = [draw.random() for _ in range(count)]
    return [Judged(score, float(draw.random() < (1 - score) / 2)) for score in scores]


def test_the_threshold_keeps_the_risk_as_often_as_promised() -> None:
    """The true risk of a threshold t is the mean of (1 - score) / 2 over scores above it: (1 - t)² / 4."""
    draw = random.Random(7)
    rounds = [calibrate(examples(draw, 300), 0.1, 0.9) for _ in range(100)]
    risks = [(1 - found.threshold) ** 2 / 4 for found in rounds if found.threshold is not None]
    assert len(risks) == 100
    # Promised in 90 of 100; a hundred rounds of exactly that give up to 20 in all but one of a thousand.
    assert sum(risk > 0.1 for risk in risks) <= 20
    # And it is no empty promise: nearly all that may be kept is.
    assert sum(risks) / 100 > 0.05


def test_a_smaller_risk_and_a_higher_confidence_keep_less() -> None:
    given_examples = examples(random.Random(1), 500)
    thresholds = [
        calibrate(given_examples, risk, confidence).threshold
        for risk, confidence in ((0.2, 0.9), (0.1, 0.9), (0.1, 0.99), (0.03, 0.99))
    ]
    assert None not in thresholds and thresholds == sorted(thresholds)  # type: ignore[type-var]


def test_too_few_examples_promise_nothing() -> None:
    found = calibrate([Judged(0.9, 0.0)] * 58, 0.05, 0.95)
    assert (found.threshold, found.num_kept) == (None, 0)
    assert calibrate([Judged(0.9, 0.0)] * 59, 0.05, 0.95).threshold == 0.0
    assert calibrate([], 0.05, 0.95).threshold is None


def test_the_walk_ends_at_the_first_threshold_that_fails() -> None:
    """What lies below it may look well by chance, and is not looked at."""
    given_examples = [Judged(0.9, 0.0)] * 100 + [Judged(0.8, 1.0)] * 60 + [Judged(0.1, 0.0)] * 10_000
    found = calibrate(given_examples, 0.05, 0.95)
    # All the losses are within the risk over so many.
    assert found.threshold == 0.0
    found = calibrate(given_examples[:400], 0.05, 0.95)
    assert found.threshold == pytest.approx(0.805) and found.num_kept == 100


@pytest.mark.parametrize(("risk", "confidence"), [(0, 0.9), (1, 0.9), (0.1, 0), (0.1, 1)])
def test_what_is_no_risk_is_refused(risk: float, confidence: float) -> None:
    with pytest.raises(ValueError):
        calibrate([], risk, confidence)


# --- evaluation -------------------------------------------------------------------------------------------

CHEAP, DEAR = TokenPrices(1.0, 2.0), TokenPrices(10.0, 20.0)


def answered(score: float, small: bool, large: bool, split: str = "test", **fields: object) -> Answered:
    return Answered(
        "x", split, "t", Answer(small, 100, 10), Answer(large, 100, 20), score, **fields  # type: ignore[arg-type]
    )  # fmt: skip


def test_a_points_cost_is_that_of_who_answered_and_of_what_was_tried() -> None:
    items = [
        answered(0.9, True, True, is_asked_first=True, num_tried=10),
        answered(0.2, False, True, is_asked_first=True, num_tried=4),
    ]
    found = point(items, 0.5, CHEAP, DEAR)
    assert (found.kept_share, found.quality, found.loss) == (0.5, 1.0, 0.0)
    assert found.attempt_cost == pytest.approx((100 + 4 * 2) / 1e6)
    assert found.cost == pytest.approx((100 + 20) / 1e6 + (1000 + 400) / 1e6 + found.attempt_cost)
    everything = point(items, 0.0, CHEAP, DEAR)
    assert (everything.quality, everything.loss, everything.attempt_cost) == (0.5, 0.5, 0.0)
    # Always the large one: nothing is tried.
    nothing = point(items, 2.0, CHEAP, DEAR)
    assert (nothing.quality, nothing.attempt_cost, nothing.kept_share) == (1.0, 0.0, 0.0)


def test_the_threshold_is_set_on_one_part_and_measured_on_the_other() -> None:
    calibrating = [answered(0.9, True, True, "calibrate")] * 200 + [
        answered(0.1, False, True, "calibrate")
    ] * 60
    testing = [answered(0.9, True, True)] * 3 + [answered(0.1, False, True)]
    found = evaluate(
        [*calibrating, *testing, answered(0.9, False, True, "train")], CHEAP, DEAR, risk=0.05, confidence=0.95
    )
    assert found.calibration.num_examples == 260 and found.chosen is not None
    assert 0.1 < found.chosen.threshold <= 0.9
    assert (found.chosen.kept_share, found.chosen.loss, found.chosen.quality) == (0.75, 0.0, 1.0)
    assert found.always_small.quality == 0.75 and found.always_large.quality == 1.0
    shown = found.fields()
    assert shown["at_threshold"]["saving_net"] == pytest.approx(
        1 - found.chosen.cost / found.always_large.cost, abs=1e-4
    )
    with pytest.raises(InvalidEvaluation, match="calibrate"):
        evaluate(testing, CHEAP, DEAR, risk=0.05, confidence=0.95)


@pytest.mark.parametrize(
    ("text", "answers", "expected"),
    [
        (" Paris", ["Paris"], True),
        (" paris.", ["Paris"], True),
        (" Paris, the capital", ["Paris"], True),
        (" Parish", ["Paris"], False),
        (" 12", ["12"], True),
        (" 12.5", ["12"], False),
        (" 120", ["12"], False),
        (" The answer is 12", ["12"], False),
        ("", ["x"], False),
        (" 'vin'", ["vin"], True),
        (" c++ (a language)", ["C++"], True),
    ],
)
def test_an_answer_is_right_when_it_begins_with_a_right_one(
    text: str, answers: list[str], expected: bool
) -> None:
    assert is_right(text, answers) is expected


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "empty"),
        (["secret"], "line 1"),
        (['{"prompt": "secret"}'], "line 1"),
        (['{"prompt": "p", "answers": ["a"]}', '{"prompt": "secret", "answers": []}'], "line 2"),
        (['{"prompt": "secret", "answers": "a"}'], "line 1"),
        (['{"id": "1", "prompt": "p", "answers": ["a"]}'] * 2, "line 2"),
        (["[" * 100_000], "line 1"),
    ],
)
def test_a_set_that_is_none_is_refused_by_its_line_and_not_quoted(lines: list[str], words: str) -> None:
    with pytest.raises(InvalidEvaluation) as caught:
        parse_set(lines)
    assert words in caught.value.message and "secret" not in caught.value.message


def test_items_without_a_split_alternate() -> None:
    items = parse_set(['{"prompt": "p", "answers": ["a"]}', "", '{"prompt": "q", "answers": ["b"]}'])
    assert [(item.id, item.split) for item in items] == [("1", "calibrate"), ("3", "test")]
