"""The real models say what their reference says."""

from __future__ import annotations

import math
from typing import Any

import pytest

from footplate.engine.types import EngineRequest
from tests.engine.answers import Answer, greedy, run
from tests.engine.conftest import GEMMA3, SMOLLM2, MakeEngine, golden_cases

NEAR_TIE = 0.001  # nats: under this another correct engine may pick the other token
MODELS = [(SMOLLM2, "smollm2-135m"), (GEMMA3, "gemma3-270m")]


def first_divergence(case: dict[str, Any], token_ids: list[int]) -> int | None:
    pairs = zip(case["greedy_ids"], token_ids, strict=True)
    return next((i for i, (want, got) in enumerate(pairs) if want != got), None)


def assert_agrees(case: dict[str, Any], answer: Answer) -> None:
    """The reference's ids up to a near tie, and the log-probabilities of its first steps, if asked for."""
    split = first_divergence(case, answer.token_ids)
    assert split is None or case["top1_top2_margin"][split] < NEAR_TIE, (case["id"], split)
    pairs = zip(case["top5_logprobs_first8"], answer.logprobs, strict=False)
    for step, (want, entry) in enumerate(pairs):
        if split is not None and step >= split:
            break
        got = dict(entry.top)
        for token, logprob in want:
            assert got.get(token, -math.inf) == pytest.approx(logprob, abs=1e-3), (case["id"], step)


@pytest.mark.parametrize(("source", "name"), MODELS)
def test_greedy_ids_and_logprobs_equal_the_reference_in_float32(
    make_engine: MakeEngine, source: str, name: str
) -> None:
    cases = golden_cases(name)
    requests = [EngineRequest(c["id"], c["prompt_ids"], greedy(logprobs=5)) for c in cases]
    answers = run(make_engine(source), *requests)
    for case in cases:
        assert_agrees(case, answers[case["id"], 0])


@pytest.mark.parametrize(("source", "name"), MODELS)
@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_smaller_types_stay_close_to_the_reference(
    make_engine: MakeEngine, source: str, name: str, dtype: str
) -> None:
    """No divergence where the reference is sure, and a small KL over the reference's own path.

    The KL is over the reference's top five and the rest as one event, at the first eight steps of each case:
    the golden path is forced as the prompt, so that every step is compared in the same context.
    """
    cases = golden_cases(name)
    forced = [
        EngineRequest(c["id"], c["prompt_ids"] + c["greedy_ids"][:8], greedy(1, prompt_logprobs=20))
        for c in cases
    ]
    free = [EngineRequest(c["id"] + "-free", c["prompt_ids"], greedy()) for c in cases]
    answers = run(make_engine(source, dtype, kv_cache_gib=0.2), *forced, *free)
    divergences = []
    for case in cases:
        entries = (answers[case["id"], 0].prompt_logprobs or ())[len(case["prompt_ids"]) :]
        for want, entry in zip(case["top5_logprobs_first8"], entries, strict=True):
            assert entry is not None
            divergences.append(_kl(want, dict(entry.top)))
        split = first_divergence(case, answers[case["id"] + "-free", 0].token_ids)
        assert split is None or case["top1_top2_margin"][split] <= 0.5, (case["id"], split)
    mean = sum(divergences) / len(divergences)
    assert mean < 0.02, f"mean KL {mean:.4f} nats"


def _kl(want: list[tuple[int, float]], got: dict[int, float]) -> float:
    """KL(reference | engine) with everything outside the reference's top five as one event."""
    floor = min(got.values())  # a token outside the engine's top 20 has at most this
    total, mass, other = 0.0, 0.0, 0.0
    for token, logprob in want:
        p, q = math.exp(logprob), math.exp(got.get(token, floor))
        total += p * (math.log(p) - math.log(q))
        mass, other = mass + p, other + q
    rest_p, rest_q = max(1 - mass, 1e-6), max(1 - other, 1e-6)
    return total + rest_p * math.log(rest_p / rest_q)
