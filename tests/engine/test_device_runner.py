"""The runner for queues gives what the plain runner gives: the same code as on a GPU, without graphs."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from footplate.engine import loader
from footplate.engine.core import EngineCore
from footplate.engine.runner.batch import StepPlan
from footplate.engine.runner.decode_graphs import graph_sizes
from footplate.engine.runner.device_runner import DeviceRunner
from footplate.engine.runner.prefix_groups import GroupFinder, find_groups
from footplate.engine.runner.staging import Staging
from footplate.engine.types import EngineRequest, SamplingParams
from tests.engine.answers import Answer, greedy, run, run_one
from tests.engine.conftest import SMOLLM2, MakeEngine, golden_cases

OUTPUT = 18
TINY_GIB = 8.5 * 16 * 46080 / 2**30


@pytest.fixture
def make_device_engine(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> MakeEngine:
    def build(**options: Any) -> EngineCore:
        monkeypatch.setattr(loader, "_on_cpu", loader._on_device)
        core = make_engine(SMOLLM2, "float32", **{"async_scheduling": True} | options)
        monkeypatch.undo()
        assert isinstance(core.runner, DeviceRunner)
        return core

    return build


@pytest.fixture(scope="module")
def plain() -> dict[Any, Answer]:
    """What the plain runner answers; filled by the first test that asks."""
    return {}


def requests() -> list[EngineRequest]:
    """Every kind of draw side by side: greedy, drawn, truncated, edited, forked, with log-probabilities."""
    prompts = [c["prompt_ids"] for c in golden_cases("smollm2-135m")[:7]]
    settings = [
        greedy(OUTPUT),
        greedy(OUTPUT, temperature=0.9, seed=3),
        greedy(OUTPUT, temperature=0.8, seed=-5, top_p=0.9, top_k=40, min_p=0.01),
        greedy(OUTPUT, repetition_penalty=1.3, frequency_penalty=0.5),
        greedy(OUTPUT, temperature=0.7, seed=2**64 - 1, n=3),
        greedy(OUTPUT, logprobs=4, prompt_logprobs=2),
        greedy(OUTPUT, logit_bias={5: -50.0}, min_tokens=4, logprobs=0),
    ]
    pairs = zip(prompts, settings, strict=True)
    return [EngineRequest(f"r{i}", prompt, params) for i, (prompt, params) in enumerate(pairs)]


def assert_equal(one: dict[tuple[str, int], Answer], other: dict[tuple[str, int], Answer]) -> None:
    assert one.keys() == other.keys()
    for key, want in one.items():
        got = other[key]
        assert got.token_ids == want.token_ids, key
        assert [e.logprob for e in got.logprobs] == pytest.approx(
            [e.logprob for e in want.logprobs], abs=1e-4
        )
        assert (got.prompt_logprobs is None) == (want.prompt_logprobs is None)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"async_scheduling": False},
        {"max_num_batched_tokens": 16},
        {"kv_cache_gib": TINY_GIB, "prefix_caching": False},
    ],
    ids=["ahead", "not ahead", "in chunks", "preempted"],
)
def test_every_kind_of_request_answers_as_on_the_plain_runner(
    make_engine: MakeEngine, make_device_engine: MakeEngine, plain: dict[Any, Answer], options: dict[str, Any]
) -> None:
    """FAULTS a26."""
    if not plain:
        plain.update(run(make_engine(), *requests()))
    core = make_device_engine(**options)
    assert_equal(plain, run(core, *requests()))
    if "kv_cache_gib" in options:
        assert core.stats().preemptions > 0


def test_a_row_used_again_keeps_nothing_of_the_one_before(make_device_engine: MakeEngine) -> None:
    core = make_device_engine(max_num_seqs=1, prefix_caching=False)
    prompt = golden_cases("smollm2-135m")[0]["prompt_ids"]
    first = run_one(core, prompt, greedy(OUTPUT))
    run_one(core, prompt * 3, greedy(OUTPUT, temperature=1.0, seed=9, top_k=3))
    assert run_one(core, prompt, greedy(OUTPUT)).token_ids == first.token_ids


def test_an_abort_while_a_step_is_queued_leaves_the_next_owner_of_the_row_alone(
    make_device_engine: MakeEngine,
) -> None:
    """FAULTS a40."""
    core = make_device_engine(max_num_seqs=1, prefix_caching=False)
    prompt = golden_cases("smollm2-135m")[1]["prompt_ids"]
    want = run_one(core, prompt, greedy(OUTPUT)).token_ids
    for steps in range(1, 5):
        core.add(EngineRequest(f"gone-{steps}", prompt[::-1], greedy(50)))
        for _ in range(steps):
            core.step()
        core.abort(f"gone-{steps}")
        core.scheduler.check()
        assert run_one(core, prompt, greedy(OUTPUT)).token_ids == want


def test_padding_rows_write_nowhere(make_device_engine: MakeEngine) -> None:
    """Five rows run in a graph of six: the pool, full of NaN, must be touched in five places a step only."""
    # FAULTS a80
    core = make_device_engine(prefix_caching=False)
    prompts = [c["prompt_ids"][:8] for c in golden_cases("smollm2-135m")[:5]]
    keys = core.runner.caches[0][0]  # type: ignore[attr-defined]
    run(core, *(EngineRequest(f"p{i}", p, greedy(4)) for i, p in enumerate(prompts)))
    written = int((~keys.isnan()).all(dim=-1).all(dim=1).sum())
    assert written == sum(len(p) + 3 for p in prompts)


def test_padded_sizes_hold_every_count_and_end_at_the_limit() -> None:
    for limit in (1, 5, 32, 300, 4096):
        sizes = graph_sizes(limit)
        assert sizes == sorted(set(sizes)) and sizes[-1] == min(limit, 512)
        for size, smaller in zip(sizes[1:], sizes, strict=False):
            assert size - smaller <= max(4, size // 4)


def groups(tables: list[list[int]], contexts: list[int]) -> Any:
    width = max(map(len, tables))
    padded = np.array([t + [0] * (width - len(t)) for t in tables], dtype=np.int32)
    return find_groups(padded, np.array(contexts, dtype=np.int32), 16)


SHARED = list(range(100, 120))


@pytest.mark.parametrize(
    ("tables", "contexts", "lens"),
    [
        ([[*SHARED, 1], [*SHARED, 2], [*SHARED, 3]], [325, 330, 336], [320]),
        ([[*SHARED], [*SHARED, 2]], [320, 330], [304]),  # one row has no block past the shared ones
        ([[1, *SHARED], [2, *SHARED]], [330, 330], None),
        ([[*SHARED, 1]], [330], None),
        ([[*SHARED[:8], 1], [*SHARED[:8], 2]], [140, 140], None),  # too short to be worth it
    ],
    ids=["three", "ends in the prefix", "different first blocks", "alone", "short"],
)
def test_rows_on_the_same_blocks_are_found(
    tables: list[list[int]], contexts: list[int], lens: list[int] | None
) -> None:
    found = groups(tables, contexts)
    assert (None if found is None else found[2].tolist()) == lens
    if found is not None:
        rows, starts, _, row_lens = found
        assert sorted(rows.tolist()) == list(range(len(tables))) and starts.tolist() == [0, len(tables)]
        assert row_lens.tolist() == [lens[0] if lens else 0] * len(tables)


def test_groups_are_told_apart_and_rows_outside_are_in_none() -> None:
    other = [t + 500 for t in SHARED]
    tables = [[*SHARED, 1], [*other, 2], [7, 8, 9], [*SHARED, 3], [*other, 4]]
    found = groups(tables, [330, 330, 40, 330, 330])
    rows, starts, lens, row_lens = (array.tolist() for array in found)
    members = [sorted(rows[a:b]) for a, b in pairwise(starts)]
    assert sorted(members) == [[0, 3], [1, 4]] and lens == [320, 320]
    assert row_lens == [320, 320, 0, 320, 320]


def plan_of(tables: list[list[int]], contexts: list[int]) -> StepPlan:
    padded = np.array(tables, dtype=np.int32)
    nothing = np.empty(0, dtype=np.int32)
    lens = np.array(contexts, dtype=np.int32)
    return StepPlan(nothing, nothing, nothing, nothing, lens, padded, 1, max(contexts))


@pytest.mark.parametrize(
    ("tables", "contexts", "lens"),
    [
        ([[*SHARED, 1], [*SHARED, 2]], [334, 332], [320]),  # the same rows, a token later
        ([[*SHARED[:17], 8, 9, 10, 11], [*SHARED, 2]], [334, 332], [272]),  # a new row parts ways earlier
        ([[*SHARED, 1], [*SHARED[:19], 0, 0]], [334, 300], [288]),  # a new row ends earlier
        ([[*SHARED[:9], *range(12)], [*SHARED, 2]], [334, 332], None),
    ],
    ids=["later", "parts earlier", "ends earlier", "no more"],
)
def test_groups_found_before_are_kept_only_while_they_hold(
    tables: list[list[int]], contexts: list[int], lens: list[int] | None
) -> None:
    finder, staging = GroupFinder(16), Staging(torch.device("cpu"))
    first = finder.find(plan_of([[*SHARED, 1], [*SHARED, 2]], [333, 331]), 2, staging)
    assert first is not None and first.lens.tolist() == [320]
    found = finder.find(plan_of(tables, contexts), 2, staging)
    assert (None if found is None else found.lens.tolist()) == lens
    assert (found is first) == (lens == [320])


def test_steps_are_read_in_order_however_late(make_device_engine: MakeEngine) -> None:
    """The host may ask for a later step first: those before it are read with it."""
    core = make_device_engine(prefix_caching=False)
    core.add(EngineRequest("a", [5, 6, 7], SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)))
    first = core.scheduler.schedule()
    assert first is not None
    pending = [core.runner.launch(first)]  # type: ignore[attr-defined]
    second = core.scheduler.schedule()
    assert second is not None
    pending.append(core.runner.launch(second))  # type: ignore[attr-defined]
    late, early = pending[1].result(), pending[0].result()
    told = [*core.scheduler.update(early), *core.scheduler.update(late)]
    ids = [token for delta in told for token in delta.token_ids]
    again = core.runner  # type: ignore[attr-defined]
    assert ids == again._batch.tokens[first.rows[0].row, 3:5].tolist()
    assert ids == run_one(make_device_engine(prefix_caching=False), [5, 6, 7], greedy(2)).token_ids
