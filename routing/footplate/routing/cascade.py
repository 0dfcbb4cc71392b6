"""Which of two models answers: the small one where that is safe enough, else the large one. Pure.

Every policy makes one number of a request, its score, from 0 (hard) to 1 (easy), and keeps the request at the
small model when the score reaches a threshold. `footplate.routing.calibration` sets that threshold for a
stated risk. The policies differ in what they look at:

- `rules`: the length of the prompt, and hard conditions on tools, language and tags;
- `classifier`: cheap features of the prompt, weighed by a small trained model;
- `confidence`: the small model answers first, and the probabilities of its first tokens decide.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from footplate.routing.classifier import Classifier
from footplate.routing.prompt_facts import PromptFacts

DEFAULT_THRESHOLD = 0.7
DEFAULT_AFTER_TOKENS = 16


class Policy(StrEnum):
    """What the score of a request is made of."""

    RULES = "rules"
    CLASSIFIER = "classifier"
    CONFIDENCE = "confidence"


class Target(StrEnum):
    """What a decision says."""

    SMALL = "small"
    LARGE = "large"
    # Both may still answer: the small one is asked, and what it says decides.
    SMALL_FIRST = "small_first"


class CascadeReason(StrEnum):
    """Why a request goes where it goes."""

    EASY = "easy"  # the score reaches the threshold
    HARD = "hard"  # it does not
    TOOLS = "tools"
    LANGUAGE = "language"
    TAG = "tag"
    ASKED_FIRST = "asked_first"  # its answer is what is judged
    SURE = "sure"
    UNSURE = "unsure"
    EMPTY = "empty"  # the small model has said nothing that could be judged
    NOT_JUDGEABLE = "not_judgeable"  # no answer is asked for
    SMALL_REFUSED = "small_refused"  # overloaded, away, or the prompt does not fit
    SMALL_FAILED = "small_failed"  # it broke off


@dataclass(frozen=True, slots=True)
class Rules:
    """What a prompt for the small model may be."""

    # A prompt of this length has the score 0.5, an empty one 1, and one of twice the length 0.
    max_characters: int = 1_000
    # None: all. A language that can't be told is `unknown`.
    languages: frozenset[str] | None = None
    takes_tools: bool = False
    small_tags: frozenset[str] = frozenset()
    # Where a request has tags of both kinds, these hold.
    large_tags: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Cascade:
    """A virtual model. `small` and `large` are names of served models.

    `after_tokens`: how many tokens of each choice the policy `confidence` hears before it decides.
    """

    name: str
    small: str
    large: str
    policy: Policy = Policy.CONFIDENCE
    threshold: float = DEFAULT_THRESHOLD
    after_tokens: int = DEFAULT_AFTER_TOKENS
    rules: Rules = field(default_factory=Rules)
    classifier: Classifier | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """Where a request goes. `score` None: nothing was scored."""

    target: Target
    reason: CascadeReason
    score: float | None = None


def decide(cascade: Cascade, facts: PromptFacts) -> Decision:
    """Where a request goes, as far as its prompt alone says it."""
    if cascade.policy is Policy.CONFIDENCE:
        if not facts.wants_answer:
            return Decision(Target.LARGE, CascadeReason.NOT_JUDGEABLE)
        return Decision(Target.SMALL_FIRST, CascadeReason.ASKED_FIRST)
    if cascade.policy is Policy.RULES:
        forced = _forced(cascade.rules, facts)
        if forced is not None:
            return forced
        score = rules_score(cascade.rules, facts)
    else:
        assert cascade.classifier is not None, "settings bring one"
        score = cascade.classifier.score(facts)
    if is_kept(score, cascade.threshold):
        return Decision(Target.SMALL, CascadeReason.EASY, score)
    return Decision(Target.LARGE, CascadeReason.HARD, score)


def is_kept(score: float, threshold: float) -> bool:
    """Whether a request of that score is the small model's."""
    return score >= threshold


def rules_score(rules: Rules, facts: PromptFacts) -> float:
    """How short a prompt is: 1 for an empty one, 0.5 at the length that rules name, 0 from twice that on."""
    return max(0.0, 1.0 - facts.num_characters / (2 * rules.max_characters))


def _forced(rules: Rules, facts: PromptFacts) -> Decision | None:
    """What no length changes."""
    if facts.tags & rules.large_tags:
        return Decision(Target.LARGE, CascadeReason.TAG, 0.0)
    if facts.has_tools and not rules.takes_tools:
        return Decision(Target.LARGE, CascadeReason.TOOLS, 0.0)
    if facts.tags & rules.small_tags:
        return Decision(Target.SMALL, CascadeReason.TAG, 1.0)
    if rules.languages is not None and facts.language not in rules.languages:
        return Decision(Target.LARGE, CascadeReason.LANGUAGE, 0.0)
    return None


class ConfidenceGate:
    """Hears the first tokens of every choice of the small model's answer, and decides once.

    A choice's score is the geometric mean of its tokens' probabilities, up to `after_tokens` of them or to
    its end. The request's score is that of its least sure choice, for all are delivered or none: one that is
    unsure decides at once, and the request is kept when all are sure.
    """

    def __init__(self, num_choices: int, threshold: float, after_tokens: int) -> None:
        self._threshold = threshold
        self._after_tokens = after_tokens
        self._sums = [0.0] * num_choices
        self._counts = [0] * num_choices
        self._open = set(range(num_choices))
        self.decision: Decision | None = None
        # The least score of the choices judged so far.
        self._score = 1.0

    def hear(self, choice: int, logprobs: Sequence[float]) -> None:
        """Take the log-probabilities (nats) of a choice's next delivered tokens."""
        if choice not in self._open:
            return
        taken = logprobs[: self._after_tokens - self._counts[choice]]
        self._sums[choice] += sum(taken)
        self._counts[choice] += len(taken)
        if self._counts[choice] >= self._after_tokens:
            self._judge(choice)

    def end(self, choice: int) -> None:
        """A choice has ended."""
        if choice in self._open:
            self._judge(choice)

    def _judge(self, choice: int) -> None:
        self._open.discard(choice)
        if self.decision is not None:
            return
        score = confidence(self._sums[choice], self._counts[choice])
        if score is None or not is_kept(score, self._threshold):
            reason = CascadeReason.EMPTY if score is None else CascadeReason.UNSURE
            self.decision = Decision(Target.LARGE, reason, score or 0.0)
            return
        self._score = min(self._score, score)
        if not self._open:
            self.decision = Decision(Target.SMALL, CascadeReason.SURE, self._score)


def confidence(sum_of_logprobs: float, num_tokens: int) -> float | None:
    """The geometric mean of some tokens' probabilities; None without tokens or where it is no number."""
    if num_tokens == 0 or math.isnan(sum_of_logprobs):
        return None
    return min(1.0, math.exp(sum_of_logprobs / num_tokens))


def answer_score(logprobs: Sequence[float], after_tokens: int = DEFAULT_AFTER_TOKENS) -> float:
    """The score of a whole answer, as `ConfidenceGate` gives it; 0 for an empty one."""
    heard = logprobs[:after_tokens]
    return confidence(sum(heard), len(heard)) or 0.0
