"""Draws: the order of edits, the distribution, and that a row never depends on its batch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from footplate.engine.errors import InvalidRequest
from footplate.engine.sampling.edits import RowContext, edit_row
from footplate.engine.sampling.noise import draw_key, gumbel
from footplate.engine.sampling.sampler import Sampler, token_logprobs
from footplate.engine.types import EngineRequest, SamplingParams
from footplate.engine.validation import validate_params
from tests.engine.answers import greedy, run, run_one
from tests.engine.conftest import MakeEngine

V = 12
EOS = (10, 11)


def row(prompt: Sequence[int] = (1,), output: Sequence[int] = (), **params: Any) -> RowContext:
    known = np.array([*prompt, *output], dtype=np.int32)
    return RowContext(SamplingParams(**{"seed": 1} | params), known, len(prompt))


def sampler(vocab_size: int = V) -> Sampler:
    return Sampler(vocab_size, EOS, torch.device("cpu"))


def sample(logits: torch.Tensor, rows: Sequence[RowContext]) -> list[int]:
    drawn: list[int] = sampler(logits.shape[1]).sample(logits.clone(), rows).tolist()
    return drawn


def edited(logits: Sequence[float], context: RowContext) -> list[float]:
    values = torch.tensor(logits)
    edit_row(values, context, EOS)
    out: list[float] = values.tolist()
    return out


def survivors(logits: Sequence[float], params: SamplingParams) -> dict[int, float]:
    """What temperature, min-p, top-k and top-p leave, with the probabilities of the draw: plain Python."""
    scores = [x / params.temperature for x in logits]
    best = max(scores)
    weights = {i: math.exp(s - best) for i, s in enumerate(scores)}
    kept = [i for i in sorted(weights, key=lambda i: -weights[i]) if weights[i] >= params.min_p]
    if params.top_k > 0:
        kept = kept[: params.top_k]
    total, before, out = sum(weights[i] for i in kept), 0.0, {}
    for i in kept:
        if out and before >= params.top_p:
            break
        out[i] = weights[i]
        before += weights[i] / total
    mass = sum(out.values())
    return {i: w / mass for i, w in out.items()}


def reference_draw(logits: torch.Tensor, context: RowContext) -> int:
    params = context.params
    key = torch.tensor([draw_key(params.seed or 0, len(context.token_ids))], dtype=torch.int32)
    noise = gumbel(torch.arange(len(logits), dtype=torch.int32), key)[0]
    kept = survivors(logits.tolist(), params)
    return max(kept, key=lambda i: float(logits[i]) / params.temperature + float(noise[i]))


# --- greedy ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [V, 1000, 49152])
def test_greedy_ties_go_to_the_lowest_id(size: int) -> None:
    logits = torch.zeros(3, size)
    logits[0, [5, size - 1]] = 1.0
    logits[1, [0, 7]] = 1.0
    assert sample(logits, [row(temperature=0.0)] * 3) == [5, 0, 0]


@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1e-45, 1e-9, 1e-5])
def test_next_to_no_temperature_is_greedy(temperature: float) -> None:
    logits = torch.tensor([[1.0, 3.0, 5.0, 4.0] + [0.0] * 8])
    assert sample(logits, [row(temperature=temperature)]) == [2]
    assert sample(logits, [row(temperature=temperature, top_p=0.9, top_k=3)]) == [2]


# --- the distribution -----------------------------------------------------------------------------------

LOGITS = [2.0, 1.5, 1.0, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -9.0]


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 2},
        {"top_k": 5, "temperature": 3.0},
        {"top_p": 0.5},
        {"top_p": 0.85, "temperature": 1.5},
        {"min_p": 0.2},
        {"min_p": 0.05, "top_k": 8, "top_p": 0.8},
    ],
)
def test_draws_follow_the_distribution(params: dict[str, Any]) -> None:
    """Chi-square over 4000 positions of one seed, and over as many seeds at one position."""
    count = 4000
    by_position = [row([1] * (i + 1), seed=3, **params) for i in range(count)]
    by_seed = [row(seed=i, **params) for i in range(count)]
    expected = survivors(LOGITS, by_seed[0].params)
    for rows in (by_position, by_seed):
        drawn = Counter(sample(torch.tensor([LOGITS]).repeat(count, 1), rows))
        assert set(drawn) <= set(expected), "a token that was cut off was drawn"
        cells = [(drawn[i], count * p) for i, p in expected.items() if count * p >= 5]
        cells.append((count - sum(n for n, _ in cells), count - sum(e for _, e in cells)))  # the rare, as one
        chi = sum((n - e) ** 2 / max(e, 1) for n, e in cells)
        freedom = len(cells) - 1
        assert chi < freedom + 4 * math.sqrt(2 * freedom) + 4


def test_noise_is_a_pure_function_of_seed_position_and_token() -> None:
    everyone = torch.arange(5000, dtype=torch.int32)
    keys = torch.tensor([draw_key(7, 3), draw_key(8, 3), draw_key(7, 4)], dtype=torch.int32)
    noise = gumbel(everyone, keys)
    some = torch.tensor([[4999, 0, 17]], dtype=torch.int32)
    assert torch.equal(gumbel(some, keys[:1])[0], noise[0, [4999, 0, 17]])
    assert torch.equal(gumbel(everyone, keys[2:])[0], noise[2])
    for a, b in ((0, 1), (0, 2), (1, 2)):
        correlation = float(torch.corrcoef(noise[[a, b]])[0, 1])
        assert abs(correlation) < 4 / math.sqrt(5000)
    assert noise.isfinite().all()
    assert abs(float(noise.mean()) - 0.5772) < 0.03  # Euler's constant, the mean of a Gumbel


def test_both_halves_of_a_key_enter_the_noise() -> None:
    ids = torch.arange(2000, dtype=torch.int32)
    noise = gumbel(ids, torch.tensor([[1, 1], [1, 2], [2, 1]], dtype=torch.int32))
    correlations = torch.corrcoef(noise) - torch.eye(3)
    assert float(correlations.abs().max()) < 4 / math.sqrt(2000)


def test_keys_of_neighbouring_seeds_and_positions_differ() -> None:
    keys = {draw_key(seed, position) for seed in range(-20, 20) for position in range(200)}
    assert len(keys) == 40 * 200
    assert len({draw_key(seed, 0) for seed in (0, 1, 2**63, 2**64 - 1)}) == 4


def test_a_seed_draws_the_same_whatever_other_tokens_exist() -> None:
    """Cutting tokens that would not win changes nothing: the noise of a token is its own."""
    torch.manual_seed(0)
    logits = torch.randn(1, V)
    for seed in range(20):
        (drawn,) = sample(logits, [row(seed=seed)])
        others = tuple(i for i in range(V) if i % 2 or i == drawn)
        assert sample(logits, [row(seed=seed, allowed_token_ids=others)]) == [drawn]


WIDE = [
    {"top_p": 0.9},
    {"top_k": 300},
    {"top_k": 257, "top_p": 0.95},
    {"top_k": 900, "top_p": 0.4},
    {"min_p": 0.01},
    {"top_k": 5},
    {"top_p": 0.05},
    {"top_k": 2000},
    {"min_p": 0.3, "top_p": 0.99, "top_k": 700},
    {},
]


def test_draws_among_more_than_256_candidates_equal_a_plain_reference() -> None:
    torch.manual_seed(1)
    logits = torch.randn(len(WIDE), 1000) * 0.7
    assert len(survivors(logits[0].tolist(), SamplingParams(**WIDE[0]))) > 256
    for seed in range(30):
        rows = [row(seed=seed, temperature=1.3, **params) for params in WIDE]
        together = sample(logits, rows)
        assert together == [reference_draw(logits[i], context) for i, context in enumerate(rows)]
        assert together == [sample(logits[i : i + 1], [context])[0] for i, context in enumerate(rows)]


# --- rows are alone -------------------------------------------------------------------------------------


def test_rows_of_a_mixed_batch_draw_what_they_draw_alone() -> None:
    """FAULTS a51."""
    torch.manual_seed(2)
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"top_k": 1},
        {"top_k": 3},
        {"top_p": 0.6},
        {"min_p": 0.1},
        {"logit_bias": {3: 5.0}},
        {"presence_penalty": 2.0},
        {"repetition_penalty": 1.5, "temperature": 0.0},
        {"allowed_token_ids": (1, 2)},
        {"seed": None},
    ]
    logits = torch.randn(33, V) * 2
    rows = [row((1, 2, 3), [4] * i, **{"seed": i} | kinds[i % len(kinds)]) for i in range(33)]
    alone = [sample(logits[i : i + 1], [context])[0] for i, context in enumerate(rows)]
    assert sample(logits, rows) == alone
    assert sample(logits.flip(0), rows[::-1]) == alone[::-1]


def test_equal_scores_at_a_cut_are_cut_alike_in_every_batch() -> None:
    """Logits of half-precision models tie often; a mate that asks for many candidates must not matter."""
    torch.manual_seed(3)
    logits = (torch.randn(2, 20000) * 2).round() / 2
    for seed in range(20):
        narrow, wide = row(seed=seed, top_k=40), row(seed=seed, top_k=4000)
        assert sample(logits, [narrow, wide])[0] == sample(logits[:1], [narrow])[0]
    entries = [token_logprobs(logits[:2], torch.tensor([3, 4]), [5, top])[0] for top in (0, 5, 20)]
    assert entries[0] == entries[1] == entries[2]


# --- documented values ----------------------------------------------------------------------------------


@pytest.mark.parametrize("off", [{"top_k": 0}, {"top_k": -1}, {"top_k": V}, {"top_k": V + 1}, {"top_p": 1}])
def test_values_that_mean_off_change_nothing(off: dict[str, Any]) -> None:
    """FAULTS a50."""
    torch.manual_seed(4)
    logits = torch.randn(50, V)
    plain = sample(logits, [row(seed=i) for i in range(50)])
    assert sample(logits, [row(seed=i, **off) for i in range(50)]) == plain
    validate_params(SamplingParams(**off), V)


@pytest.mark.parametrize("one", [{"top_k": 1}, {"top_p": 0}, {"top_p": 1e-9}, {"top_p": 0.0}, {"min_p": 1.0}])
def test_values_that_leave_one_token_are_greedy(one: dict[str, Any]) -> None:
    """FAULTS a50."""
    torch.manual_seed(5)
    logits = torch.randn(50, V)
    validate_params(SamplingParams(**one), V)
    drawn = sample(logits, [row(seed=i, temperature=5.0, **one) for i in range(50)])
    assert drawn == logits.argmax(dim=-1).tolist()


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "wrong",
    [
        *({"temperature": x} for x in (NAN, INF, -0.1, "1", None, 10**400, True)),
        *({"top_p": x} for x in (NAN, -0.1, 1.1, "x")),
        *({"min_p": x} for x in (NAN, -0.1, 1.5)),
        *({"top_k": x} for x in (1.5, NAN, -2, 2**40, "5", True, None)),
        *({"presence_penalty": x} for x in (NAN, 2.1, -2.1)),
        *({"frequency_penalty": x} for x in (NAN, 3)),
        *({"repetition_penalty": x} for x in (NAN, 0, -1, 1e9)),
        *({"n": x} for x in (0, -1, 129, 1.0)),
        *({"seed": x} for x in (1.5, 2**64, -(2**64), "1")),
        *({"max_tokens": x} for x in (-1, 1.5, 10**30)),
        *({"min_tokens": x} for x in (-1, 0.5)),
        {"min_tokens": 5, "max_tokens": 4},
        *({name: x} for name in ("logprobs", "prompt_logprobs") for x in (-1, 21, 1.5)),
        *({"logit_bias": x} for x in ({V: 1.0}, {-1: 1.0}, {1: NAN}, {1: 101}, {"1": 1.0}, None)),
        *({name: x} for name in ("allowed_token_ids", "stop_token_ids") for x in ((V,), (-1,), (1.5,), None)),
        *({"bad_words_ids": x} for x in (((),), ((V,),), (("a",),), (5,))),
    ],
)
def test_wrong_values_are_refused_by_name(wrong: dict[str, Any]) -> None:
    """FAULTS a50 and a52."""
    with pytest.raises(InvalidRequest) as refused:
        validate_params(SamplingParams(**wrong), V)
    assert refused.value.param is not None
    assert refused.value.param.split("_")[0] in "_".join(wrong)


# --- edits ----------------------------------------------------------------------------------------------


def test_presence_and_frequency_count_output_only() -> None:
    """FAULTS a53."""
    prompt_full = row([2] * 9, temperature=0.0, presence_penalty=2.0, frequency_penalty=2.0)
    assert edited([1.0, 0.0, 1.5, *[0.0] * 9], prompt_full) == [1.0, 0.0, 1.5, *[0.0] * 9]
    said = row([2] * 9, [2, 2, 0], presence_penalty=0.5, frequency_penalty=0.25)
    assert edited([1.0] * V, said)[:3] == [1.0 - 0.75, 1.0, 1.0 - 0.5 - 2 * 0.25]


def test_repetition_counts_prompt_and_output_once() -> None:
    context = row([0, 0, 1], [2, 2], repetition_penalty=2.0)
    assert edited([4.0, -4.0, 1.0, 1.0, *[0.0] * 8], context)[:4] == [2.0, -8.0, 0.5, 1.0]


def test_edits_are_made_in_their_order() -> None:
    """Bias comes before the penalties: repetition then scales the biased value, presence comes off last."""
    context = row(
        [0], [1], logit_bias={0: 2.0, 1: -3.0}, repetition_penalty=2.0, presence_penalty=1.0, temperature=0.5
    )
    assert edited([2.0, 1.0, *[0.0] * 10], context)[:2] == [(2 + 2) / 2, (1 - 3) * 2 - 1]
    # Penalties come before temperature, min-p and top-k: token 1 is out of the best two by its penalty.
    logits = torch.tensor([[1.0, 1.1, 0.9, *[0.0] * 9]])
    drawn = {sample(logits, [row([5], [1], seed=s, top_k=2, presence_penalty=1.0)])[0] for s in range(60)}
    assert drawn == {0, 2}


def test_min_p_comes_before_top_k_and_top_k_before_top_p() -> None:
    logits = [math.log(p) for p in (0.4, 0.2, 0.2, 0.1, 0.05, 0.05)]
    # Of the best two (2/3 and 1/3), 0.6 keeps the first only; of all six it would keep two.
    drawn = {sample(torch.tensor([logits]), [row(seed=s, top_k=2, top_p=0.6)])[0] for s in range(80)}
    assert drawn == {0}
    # min-p 0.5 leaves three of mass 0.8, of which the first is just half: 0.5 keeps it alone.
    drawn = {sample(torch.tensor([logits]), [row(seed=s, min_p=0.49, top_p=0.49)])[0] for s in range(80)}
    assert drawn == {0}


def test_bad_words_block_their_last_token_where_the_rest_stands() -> None:
    single, double, triple = (3,), (4, 5), (4, 4, 6)
    words = (single, double, triple)
    for output, blocked in (([], {3}), ([4], {3, 5}), ([4, 4], {3, 5, 6}), ([4, 1], {3}), ([5], {3})):
        values = edited([0.0] * V, row([4, 4], output, bad_words_ids=words))
        assert {i for i, x in enumerate(values) if x == -INF} == blocked
    listed: Any = [[4, 5]]  # callers in this process may write lists
    assert edited([0.0] * V, row([1], [4], bad_words_ids=listed))[5] == -INF


def test_only_allowed_ids_are_drawn() -> None:
    logits = torch.tensor([[9.0] * 6 + [0.0] * 6])
    drawn = {sample(logits, [row(seed=s, allowed_token_ids=(7, 9))])[0] for s in range(40)}
    assert drawn == {7, 9}
    assert sample(logits, [row(temperature=0.0, allowed_token_ids=(9,), bad_words_ids=((9,),))]) == [9]


def test_min_tokens_holds_back_every_end() -> None:
    """FAULTS a56."""
    ends = {*EOS, 3, 4}
    for output, blocked in (([], ends), ([1, 1], ends), ([1, 1, 1], set())):
        values = edited([0.0] * V, row([1], output, min_tokens=3, stop_token_ids=(3, 4)))
        assert {i for i, x in enumerate(values) if x == -INF} == blocked
    ignoring = edited([0.0] * V, row([1], min_tokens=3, stop_token_ids=(3,), ignore_eos=True))
    assert {i for i, x in enumerate(ignoring) if x == -INF} == {3}
    listed: Any = [3]
    assert edited([0.0] * V, row([1], min_tokens=3, stop_token_ids=listed))[3] == -INF


# --- log-probabilities ----------------------------------------------------------------------------------


def test_logprobs_have_rank_and_the_best_ones_first() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0], [5.0, 5.0, 0.0, 0.0]])
    first, second = token_logprobs(logits, torch.tensor([2, 1]), [2, 0])
    norm = math.log(sum(math.exp(x) for x in (0, 3, 1, 2)))
    assert (first.token_id, first.rank) == (2, 3)
    assert first.logprob == pytest.approx(1.0 - norm, abs=1e-6)
    assert [i for i, _ in first.top] == [1, 3]
    assert [p for _, p in first.top] == pytest.approx([3 - norm, 2 - norm], abs=1e-6)
    assert (second.rank, second.top) == (1, ())  # nothing is more likely than it


def test_logprobs_are_of_the_raw_distribution(make_engine: MakeEngine) -> None:
    core = make_engine()
    plain = run_one(core, [40, 41, 42], greedy(1, logprobs=3)).logprobs[0]
    bent = greedy(1, logprobs=3, logit_bias={plain.token_id: -100.0}, repetition_penalty=1.5)
    entry = run_one(core, [40, 41, 42], bent).logprobs[0]
    assert entry.token_id != plain.token_id and entry.rank > 1
    assert entry.top == plain.top
    assert entry.logprob == pytest.approx(dict(plain.top).get(entry.token_id, entry.logprob))


# --- in the engine --------------------------------------------------------------------------------------

PROMPT = [504, 3575, 282, 4649, 314]


def drawn_params(seed: int | None = 7, **params: Any) -> SamplingParams:
    return greedy(10, **{"temperature": 1.2, "seed": seed} | params)


def test_a_seed_draws_the_same_alone_and_among_unseeded_mates(make_engine: MakeEngine) -> None:
    """FAULTS a47."""
    core = make_engine(dtype="auto")
    alone = run_one(core, PROMPT, drawn_params()).token_ids
    assert alone != run_one(core, PROMPT, drawn_params(8)).token_ids
    for size in (2, 5, 16):
        mates = [
            EngineRequest(f"m{size}-{i}", [100 + i, 5], drawn_params(None, top_k=i)) for i in range(size - 1)
        ]
        answers = run(core, *mates, EngineRequest(f"seeded{size}", PROMPT, drawn_params()))
        assert answers[f"seeded{size}", 0].token_ids == alone


def test_choices_of_one_seed_differ_and_come_again(make_engine: MakeEngine) -> None:
    """FAULTS a48."""
    core = make_engine(dtype="auto")
    seen = []
    for name in ("once", "again"):
        answers = run(core, EngineRequest(name, PROMPT, drawn_params(1, n=4)))
        seen.append([tuple(answers[name, i].token_ids) for i in range(4)])
    assert len(set(seen[0])) == 4 and seen[0] == seen[1]
    assert list(seen[0][0]) == run_one(core, PROMPT, drawn_params(1)).token_ids


def test_unseeded_requests_differ(make_engine: MakeEngine) -> None:
    core = make_engine(dtype="auto")
    answers = run(core, *(EngineRequest(f"u{i}", PROMPT, drawn_params(None)) for i in range(3)))
    assert len({tuple(a.token_ids) for a in answers.values()}) == 3


def test_penalties_count_generated_ids_also_after_preemption(make_engine: MakeEngine) -> None:
    """FAULTS a54."""
    params = greedy(20, frequency_penalty=1.0, presence_penalty=0.5, repetition_penalty=1.1)
    prompts = [PROMPT + [600 + i] * 10 for i in range(4)]
    roomy = make_engine(dtype="auto", prefix_caching=False)
    alone = [run_one(roomy, p, params).token_ids for p in prompts]
    tight = make_engine(dtype="auto", kv_cache_gib=0.0021, prefix_caching=False)  # 6 blocks
    answers = run(tight, *(EngineRequest(f"p{i}", p, params) for i, p in enumerate(prompts)))
    assert tight.stats().preemptions > 0
    assert [answers[f"p{i}", 0].token_ids for i in range(4)] == alone


def test_nothing_ends_before_min_tokens(make_engine: MakeEngine) -> None:
    """FAULTS a56."""
    core = make_engine(dtype="auto")
    first = run_one(core, PROMPT, greedy(6)).token_ids
    stops = tuple(set(first))
    early = run_one(core, PROMPT, greedy(20, stop_token_ids=stops))
    assert early.token_ids == first[:1]
    patient = run_one(core, PROMPT, greedy(20, stop_token_ids=stops, min_tokens=5, ignore_eos=False))
    assert len(patient.token_ids) > 5 and not set(patient.token_ids[:5]) & set(stops)
