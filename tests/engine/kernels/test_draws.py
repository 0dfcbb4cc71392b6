"""Draws on the device are those of `Sampler`: the same ids for the same logits, parameters and seeds."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from footplate.engine.kernels.sample.reference import sample as reference
from footplate.engine.kernels.step_cases import DrawTables
from footplate.engine.sampling.edits import RowContext
from footplate.engine.sampling.sampler import Sampler
from footplate.engine.types import SamplingParams

ROWS = 8


def random_params(choose: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=choose.choice([0.0, 0.3, 0.8, 1.0, 1.7]),
        top_k=choose.choice([0, 0, 1, 7, 40, 5000]),
        top_p=choose.choice([1.0, 1.0, 0.95, 0.6, 0.05]),
        min_p=choose.choice([0.0, 0.0, 0.02, 0.3]),
        seed=choose.getrandbits(63),
    )


def tables(params: list[SamplingParams], lengths: list[int]) -> DrawTables:
    return DrawTables(
        tokens=torch.zeros((len(params), 64), dtype=torch.int32),
        lengths=torch.tensor(lengths, dtype=torch.int32),
        temperature=torch.tensor([p.temperature for p in params]),
        top_k=torch.tensor([p.top_k for p in params], dtype=torch.int32),
        top_p=torch.tensor([p.top_p for p in params]),
        min_p=torch.tensor([p.min_p for p in params]),
        seeds=torch.tensor([p.seed or 0 for p in params]),
    )


@pytest.mark.parametrize(("vocab_size", "spread"), [(1500, 4.0), (400, 1.0), (4500, 9.0)])
def test_the_kernel_draws_what_the_sampler_draws(vocab_size: int, spread: float) -> None:
    pytest.importorskip("triton")
    from footplate.engine.kernels.sample.kernel import sample

    choose = random.Random(vocab_size)
    params = [random_params(choose) for _ in range(ROWS)]
    lengths = [choose.randrange(1, 60) for _ in range(ROWS)]
    logits = torch.randn(ROWS, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * spread
    contexts = [RowContext(p, np.zeros(n, dtype=np.int32), 1) for p, n in zip(params, lengths, strict=True)]
    expected = Sampler(vocab_size, (), torch.device("cpu")).sample(logits.clone(), contexts)
    rows = torch.arange(ROWS, dtype=torch.int32)
    assert sample(logits, rows, tables(params, lengths)).tolist() == expected.tolist()


def test_the_reference_draws_what_the_sampler_draws() -> None:
    choose = random.Random(0)
    params = [random_params(choose) for _ in range(200)]
    lengths = [choose.randrange(1, 60) for _ in range(200)]
    logits = torch.randn(200, 900, generator=torch.Generator().manual_seed(0)) * 5
    contexts = [RowContext(p, np.zeros(n, dtype=np.int32), 1) for p, n in zip(params, lengths, strict=True)]
    expected = Sampler(900, (), torch.device("cpu")).sample(logits.clone(), contexts)
    rows = torch.arange(200, dtype=torch.int32)
    assert reference(logits, rows, tables(params, lengths)).tolist() == expected.tolist()


def test_a_row_draws_the_same_alone() -> None:
    pytest.importorskip("triton")
    from footplate.engine.kernels.sample.kernel import sample

    choose = random.Random(3)
    state = tables([random_params(choose) for _ in range(ROWS)], [5] * ROWS)
    logits = torch.randn(ROWS, 600, generator=torch.Generator().manual_seed(3)) * 6
    rows = torch.randperm(ROWS, generator=torch.Generator().manual_seed(4)).int()
    together = sample(logits, rows, state).tolist()
    assert [int(sample(logits[i : i + 1], rows[i : i + 1], state)) for i in range(ROWS)] == together


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5, "top_k": 3}])
def test_what_is_no_number_never_wins_and_no_id_leaves_the_vocabulary(params: dict[str, float]) -> None:
    pytest.importorskip("triton")
    from footplate.engine.kernels.sample.kernel import sample

    settings = SamplingParams(**{"temperature": 0.0} | params, seed=3)  # type: ignore[arg-type]
    logits = torch.full((2, 5000), float("nan"))
    logits[1, 4321] = -7.0
    for draw in (sample, reference):
        ids = draw(logits.clone(), torch.arange(2, dtype=torch.int32), tables([settings] * 2, [4, 4]))
        assert 0 <= int(ids[0]) < 5000 and int(ids[1]) == 4321
