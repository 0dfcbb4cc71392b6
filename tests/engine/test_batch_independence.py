"""A prompt's answer is its own: no mate, cut, cache, preemption or overlap of steps changes an id."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from footplate.engine.types import EngineRequest, SamplingParams
from tests.engine.answers import Answer, greedy, run, run_batch, run_one
from tests.engine.conftest import SMOLLM2, MakeEngine, golden_cases

OUTPUT = 8
# Packed weights are the engine's default on CPU; their kernels are bitwise independent of the batch.
DTYPES = ["float32", "auto"]
BLOCK_GIB = {"float32": 16 * 46080 / 2**30, "auto": 16 * 23040 / 2**30}  # KV of one block of SmolLM2
TINY_BLOCKS = 10


def prompts() -> list[list[int]]:
    """Six prompts of odd lengths; two share 32 tokens, and one is a multiple of the block size."""
    pool = [token for case in golden_cases("smollm2-135m") for token in case["prompt_ids"]]
    rng = random.Random(5)
    drawn = [[rng.choice(pool) for _ in range(count)] for count in (1, 15, 32, 47)]
    return [*drawn, drawn[2] + drawn[1], drawn[2] + drawn[0] * 5]


PROMPTS = prompts()


def settings() -> list[SamplingParams]:
    """Greedy and drawn, so that both ids and draws are compared."""
    drawn = {"temperature": 0.9, "top_p": 0.95}
    return [greedy(OUTPUT, **(drawn | {"seed": i} if i % 2 else {})) for i in range(len(PROMPTS))]


def requests(order: Sequence[int], name: str) -> list[EngineRequest]:
    params = settings()
    return [EngineRequest(f"{name}-{i}", PROMPTS[i], params[i]) for i in order]


def together(core: Any, order: Sequence[int], name: str) -> list[list[int]]:
    """Ids by prompt, run in one batch in the order given."""
    answers = run(core, *requests(order, name))
    return [answers[f"{name}-{i}", 0].token_ids for i in sorted(order)]


Solo = dict[str, list[list[int]]]


@pytest.fixture(scope="module")
def solo() -> Solo:
    return {}


def alone(make_engine: MakeEngine, solo: Solo, dtype: str) -> list[list[int]]:
    """Each prompt by itself, whole, with an empty cache and no overlap: what all others are held to."""
    if dtype not in solo:
        core = make_engine(SMOLLM2, dtype, prefix_caching=False)
        solo[dtype] = [run(core, r)[r.request_id, 0].token_ids for r in requests(range(len(PROMPTS)), "solo")]
    return solo[dtype]


@pytest.mark.parametrize(("dtype", "ahead"), [("float32", True), ("auto", False), ("auto", True)])
def test_random_batches_and_a_warm_cache_give_the_solo_ids(
    make_engine: MakeEngine, solo: Solo, dtype: str, ahead: bool
) -> None:
    core, rng = make_engine(SMOLLM2, dtype, async_scheduling=ahead), random.Random(1)
    everyone = list(range(len(PROMPTS)))
    for round_number in range(2):  # the second round finds its prefixes in the cache
        rng.shuffle(everyone)
        assert together(core, everyone, f"r{round_number}") == alone(make_engine, solo, dtype)
    assert core.stats().prefix_hits > 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("budget", [16, 512])
def test_any_cut_of_the_prompts_gives_the_solo_ids(
    make_engine: MakeEngine, solo: Solo, dtype: str, budget: int
) -> None:
    core = make_engine(SMOLLM2, dtype, max_num_batched_tokens=budget)
    assert together(core, range(len(PROMPTS)), "cut") == alone(make_engine, solo, dtype)


@pytest.mark.parametrize(
    ("dtype", "ahead", "caching"),
    [("float32", False, True), ("float32", True, False), ("auto", False, False), ("auto", True, True)],
)
def test_preempted_sequences_give_the_solo_ids(
    make_engine: MakeEngine, solo: Solo, dtype: str, ahead: bool, caching: bool
) -> None:
    """FAULTS a18 and a25."""
    core = make_engine(
        SMOLLM2,
        dtype,
        kv_cache_gib=BLOCK_GIB[dtype] * (TINY_BLOCKS + 0.5),
        async_scheduling=ahead,
        prefix_caching=caching,
    )
    assert core.stats().kv_blocks_total == TINY_BLOCKS
    assert together(core, range(len(PROMPTS)), "tight") == alone(make_engine, solo, dtype)
    assert core.stats().preemptions > 0


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("auto", 0.0)])
def test_a_cache_hit_moves_no_logprob(make_engine: MakeEngine, dtype: str, tolerance: float) -> None:
    """FAULTS a22."""
    core, prompt = make_engine(SMOLLM2, dtype), PROMPTS[3]
    cold, warm = (run_one(core, prompt, greedy(6, logprobs=5)) for _ in range(2))
    assert (cold.cached_tokens, warm.cached_tokens) == (0, 32)
    assert_equal_logprobs(cold, warm, tolerance)


def assert_equal_logprobs(one: Answer, other: Answer, tolerance: float) -> None:
    assert one.token_ids == other.token_ids
    for a, b in zip(one.logprobs, other.logprobs, strict=True):
        assert a.logprob == pytest.approx(b.logprob, abs=tolerance)
        assert [p for _, p in a.top] == pytest.approx([p for _, p in b.top], abs=tolerance)


def test_prompt_logprobs_are_equal_on_the_second_call_and_in_chunks(make_engine: MakeEngine) -> None:
    """FAULTS a16."""
    prompt = PROMPTS[3]
    whole, cut = make_engine(), make_engine(max_num_batched_tokens=16)
    answers = [run_one(core, prompt, greedy(1, prompt_logprobs=3)) for core in (whole, whole, cut)]
    first = answers[0].prompt_logprobs
    assert first is not None and first[0] is None and len(first) == len(prompt)
    # Products over other numbers of rows are summed in another order, by a kernel that follows the processor.
    for answer, tolerance in zip(answers, (0.0, 1e-5, 5e-5), strict=True):
        assert answer.cached_tokens == 0 and answer.prompt_logprobs is not None
        for want, got, token in zip(first[1:], answer.prompt_logprobs[1:], prompt[1:], strict=True):
            assert want is not None and got is not None
            assert got.token_id == token
            assert got.logprob == pytest.approx(want.logprob, abs=tolerance)
            assert got.top[0][0] == want.top[0][0]


def test_prompt_logprobs_are_those_of_generation(make_engine: MakeEngine) -> None:
    """Generated tokens, given as a prompt, have the log-probabilities they were drawn with."""
    core, prompt = make_engine(), PROMPTS[1]
    made = run_one(core, prompt, greedy(6, logprobs=0))
    echoed = run_one(core, prompt + made.token_ids, greedy(0, prompt_logprobs=0)).prompt_logprobs
    assert echoed is not None
    for want, got in zip(made.logprobs, echoed[len(prompt) :], strict=True):
        assert got is not None and got.logprob == pytest.approx(want.logprob, abs=1e-4)


@pytest.mark.parametrize(
    ("dtype", "length"), [("auto", 1), ("auto", 15), ("auto", 16), ("float32", 16), ("float32", 17)]
)
def test_choices_share_the_prompt_and_answer_as_alone(
    make_engine: MakeEngine, dtype: str, length: int
) -> None:
    """Also a check of copied blocks: the pool is full of NaN where nothing was written."""
    core, prompt = make_engine(SMOLLM2, dtype, prefix_caching=False), PROMPTS[3][:length]
    answers = run(core, EngineRequest("n", prompt, greedy(4, n=3)))
    assert core.stats().prompt_tokens == length
    want = run_one(core, prompt, greedy(4)).token_ids
    assert [answers["n", i].token_ids for i in range(3)] == [want] * 3


def test_a_mate_with_log_probabilities_or_penalties_changes_nothing(make_engine: MakeEngine) -> None:
    core = make_engine(SMOLLM2, "auto")
    plain = run_batch(core, PROMPTS[:2], greedy(OUTPUT))
    mate = EngineRequest("m", PROMPTS[2], greedy(OUTPUT, logprobs=20, prompt_logprobs=5, frequency_penalty=1))
    mixed = run(core, mate, *(EngineRequest(f"p{i}", PROMPTS[i], greedy(OUTPUT)) for i in range(2)))
    assert [mixed[f"p{i}", 0].token_ids for i in range(2)] == [a.token_ids for a in plain]
