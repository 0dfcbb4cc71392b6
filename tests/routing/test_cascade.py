"""Which of two models answers: rules, features, and the first tokens of an answer. Pure."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from footplate.routing.cascade import (
    Cascade,
    CascadeReason,
    ConfidenceGate,
    Decision,
    Policy,
    Rules,
    Target,
    answer_score,
    decide,
)
from footplate.routing.classifier import (
    Classifier,
    Example,
    Weighed,
    packaged_classifier,
    parse_classifier,
    read_classifier,
    train,
)
from footplate.routing.errors import InvalidClassifier
from footplate.routing.prompt_facts import MAX_LOOKED_AT, PromptFacts, prompt_facts

R = CascadeReason
SURE, HALF = math.log(0.9), math.log(0.5)


def by_rules(threshold: float = 0.5, **rules: object) -> Cascade:
    return Cascade("auto", "s", "l", Policy.RULES, threshold, rules=Rules(100, **rules))  # type: ignore[arg-type]


# --- rules ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_characters", "target"), [(0, "small"), (100, "small"), (101, "large"), (10_000, "large")]
)
def test_a_prompt_is_easy_up_to_the_length_that_rules_name(num_characters: int, target: str) -> None:
    found = decide(by_rules(), PromptFacts(num_characters))
    assert found.target == target
    assert found.reason is (R.EASY if target == "small" else R.HARD)


@pytest.mark.parametrize(("threshold", "longest"), [(0.25, 150), (0.5, 100), (0.75, 50), (1.0, 0)])
def test_the_threshold_of_rules_is_a_length(threshold: float, longest: int) -> None:
    assert decide(by_rules(threshold), PromptFacts(longest)).target is Target.SMALL
    assert decide(by_rules(threshold), PromptFacts(longest + 1)).target is Target.LARGE


def test_hard_conditions_decide_whatever_the_length() -> None:
    rules = {
        "languages": frozenset({"en"}),
        "small_tags": frozenset({"draft"}),
        "large_tags": frozenset({"law"}),
    }
    short = PromptFacts(10, language="en")
    wanted = [
        (short, Target.SMALL, R.EASY),
        (replace(short, has_tools=True), Target.LARGE, R.TOOLS),
        (replace(short, language="fr"), Target.LARGE, R.LANGUAGE),
        (replace(short, language="unknown"), Target.LARGE, R.LANGUAGE),
        (replace(short, tags=frozenset({"law", "draft"})), Target.LARGE, R.TAG),
        (replace(short, num_characters=9_999, tags=frozenset({"draft"})), Target.SMALL, R.TAG),
        (replace(short, has_tools=True, tags=frozenset({"draft"})), Target.LARGE, R.TOOLS),
    ]
    for facts, target, reason in wanted:
        found = decide(by_rules(**rules), facts)
        assert (found.target, found.reason) == (target, reason), facts


def test_tools_go_to_a_small_model_that_takes_them() -> None:
    assert decide(by_rules(takes_tools=True), PromptFacts(10, has_tools=True)).target is Target.SMALL


# --- confidence -------------------------------------------------------------------------------------------


def test_confidence_asks_the_small_model_first_unless_nothing_is_to_be_said() -> None:
    cascade = Cascade("auto", "s", "l")
    assert decide(cascade, PromptFacts(9)) == Decision(Target.SMALL_FIRST, R.ASKED_FIRST)
    silent = PromptFacts(9, wants_answer=False)
    assert decide(cascade, silent) == Decision(Target.LARGE, R.NOT_JUDGEABLE)


def test_the_gate_decides_after_so_many_tokens_and_not_before() -> None:
    gate = ConfidenceGate(1, 0.7, 3)
    gate.hear(0, [SURE])
    gate.hear(0, [SURE])
    assert gate.decision is None
    # What comes after the third token changes nothing.
    gate.hear(0, [SURE, -50.0])
    assert gate.decision is not None and gate.decision.score == pytest.approx(0.9)
    assert (gate.decision.target, gate.decision.reason) == (Target.SMALL, R.SURE)


def test_the_gate_decides_at_the_end_of_a_short_answer() -> None:
    gate = ConfidenceGate(1, 0.7, 16)
    gate.hear(0, [HALF, SURE])
    gate.end(0)
    assert gate.decision is not None and gate.decision.reason is R.UNSURE
    assert gate.decision.score == pytest.approx(math.sqrt(0.45))


def test_one_unsure_choice_sends_all_to_the_large_model_at_once() -> None:
    gate = ConfidenceGate(3, 0.7, 2)
    gate.hear(1, [SURE, SURE])
    assert gate.decision is None
    gate.hear(2, [HALF, HALF])
    assert gate.decision is not None and gate.decision.target is Target.LARGE
    first = gate.decision
    gate.hear(0, [0.0, 0.0])
    assert gate.decision is first


def test_choices_are_kept_when_all_are_sure_with_the_score_of_the_least_sure() -> None:
    gate = ConfidenceGate(2, 0.5, 1)
    gate.hear(1, [HALF])
    gate.hear(0, [SURE])
    assert gate.decision is not None and gate.decision.target is Target.SMALL
    assert gate.decision.score == pytest.approx(0.5)


def test_an_empty_answer_and_one_that_is_no_number_are_unsure_at_any_threshold() -> None:
    for logprobs in ([], [math.nan]):
        gate = ConfidenceGate(1, 0.0, 4)
        gate.hear(0, logprobs)
        gate.end(0)
        assert gate.decision == Decision(Target.LARGE, R.EMPTY, 0.0)


@given(
    st.lists(st.floats(-20, 0), max_size=40),
    st.integers(1, 20),
    st.lists(st.integers(1, 7), max_size=40),
    st.floats(0, 1),
)
def test_a_score_is_the_same_for_every_way_of_cutting_the_answer(
    logprobs: list[float], after: int, cuts: list[int], threshold: float
) -> None:
    """What serving decides is what an evaluation has measured."""
    gate = ConfidenceGate(1, threshold, after)
    left = list(logprobs)
    for cut in [*cuts, len(left)]:
        gate.hear(0, left[:cut])
        left = left[cut:]
    gate.end(0)
    assert gate.decision is not None
    score = answer_score(logprobs, after)
    assert gate.decision.score == pytest.approx(score)
    if abs(score - threshold) > 1e-9:
        assert (gate.decision.target is Target.SMALL) == (bool(logprobs) and score >= threshold)


# --- facts ------------------------------------------------------------------------------------------------


def test_facts_are_of_the_question_and_lengths_of_all() -> None:
    text = "Context, long ago.\n\nQ: Which is it: Rome, 'Oslo' or 12 and 3456?\nA) x\nB) y\nA:"
    facts = prompt_facts(["before", text])
    assert (facts.num_characters, facts.num_messages) == (6 + len(text), 2)
    assert (facts.last_numbers, facts.last_longest_number, facts.last_commas) == (2, 4, 1)
    assert (facts.last_quotes, facts.last_capitals, facts.num_options) == (2, 3, 2)
    assert not facts.has_code and prompt_facts(["def f(x): return x"]).has_code


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("What is the capital of France?", "en"),
        ("Was ist die Hauptstadt von Frankreich und wie groß ist sie?", "de"),
        ("Quelle est la capitale de la France et pour qui ?", "fr"),
        ("¿Cuál es la capital de España y por qué?", "es"),
        ("Столица Франции?", "ru"),
        ("フランスの首都はどこですか", "ja"),
        ("法国的首都在哪里", "zh"),
        ("프랑스의 수도", "ko"),
        ("12 + 12 =", "unknown"),
        ("", "unknown"),
    ],
)
def test_a_language_is_guessed(text: str, language: str) -> None:
    assert prompt_facts([text]).language == language


@given(st.lists(st.text(max_size=200), max_size=3))
def test_any_text_has_facts_and_a_score_between_0_and_1(texts: list[str]) -> None:
    facts = prompt_facts(texts)
    assert 0 <= packaged_classifier().score(facts) <= 1
    assert all(math.isfinite(value) for value in facts.numbers().values())


@pytest.mark.parametrize("piece", ["\n", " ", "A) ", "{;} ", "1", "def ", "\n \n", "'", "é", "x\n"])
def test_facts_of_a_long_text_take_steps_in_proportion_to_it(piece: str) -> None:
    """A pattern that begins again at every character took 400 times as long for 20 times as much.

    In this process's own time and against itself, with room for a slow machine: no speed is promised.
    """

    def seconds(text: str) -> float:
        begin = time.process_time()
        prompt_facts([text])
        return time.process_time() - begin

    few, many = piece * (200 // len(piece)), piece * (MAX_LOOKED_AT // len(piece))
    assert min(seconds(many) for _ in range(3)) < 200 * min(seconds(few) for _ in range(3)) + 0.05


# --- the classifier ---------------------------------------------------------------------------------------


def test_training_learns_what_separates_and_survives_its_way_to_a_file(tmp_path: Path) -> None:
    examples = [Example(PromptFacts(10 * n, last_longest_number=n % 4), n % 4 < 2) for n in range(40)]
    found = train(examples, "s", "l", ridge=0.1)
    scores = [found.score(example.facts) for example in examples]
    assert all((score > 0.5) == example.is_safe for score, example in zip(scores, examples, strict=True))
    path = tmp_path / "weights.json"
    path.write_text(found.to_json())
    assert read_classifier(path) == found
    # Far outside of what was seen nothing grows without end.
    assert 0 < found.score(PromptFacts(10**12)) < 1


def test_the_classifiers_score_meets_the_threshold() -> None:
    weights = Classifier(0.0, {"num_characters": Weighed(100.0, 10.0, -1.0)})
    cascade = Cascade("auto", "s", "l", Policy.CLASSIFIER, 0.5, classifier=weights)
    assert decide(cascade, PromptFacts(100)) == Decision(Target.SMALL, R.EASY, 0.5)
    assert decide(cascade, PromptFacts(101)).target is Target.LARGE


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"version": 2, "bias": 0, "features": {}}',
        '{"version": 1, "bias": NaN, "features": {}}',
        '{"version": 1, "bias": true, "features": {}}',
        '{"version": 1, "bias": 0, "features": {"unheard_of": {"mean": 0, "scale": 1, "weight": 1}}}',
        '{"version": 1, "bias": 0, "features": {"num_words": {"mean": 0, "scale": 0, "weight": 1}}}',
        "[" * 100_000,
    ],
)
def test_weights_that_are_none_are_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidClassifier):
        parse_classifier(text)
    path = tmp_path / "weights.json"
    path.write_text(text)
    with pytest.raises(InvalidClassifier):
        read_classifier(path)


def test_nothing_is_learnt_from_examples_of_one_kind() -> None:
    with pytest.raises(InvalidClassifier, match="both kinds"):
        train([Example(PromptFacts(n), True) for n in range(20)], "s", "l")
