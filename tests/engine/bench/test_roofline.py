"""What a step must move and compute, against sums done by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from footplate.engine.bench.roofline import StepCost, StepCounter, StoredSizes
from footplate.engine.plan import NewRow, ScheduledRow, SchedulerOutput
from footplate.engine.types import SamplingParams
from footplate.engine.weights.model_config import ModelConfig, config_from_json

SIZES = StoredSizes(layer_matrices=10_000, head=700, embedding_row=16, kv_element=2, block_size=4)
KV_POSITION = 2 * 2 * 8 * 2  # keys and values, two heads of eight elements of two bytes, in one layer
HEAD_WEIGHTS, LAYER_WEIGHTS = 50 * 16, 2 * (16 * (32 + 16 + 16) + 32 * 16 + 3 * 16 * 24)


@pytest.fixture
def shape(tmp_path: Path) -> ModelConfig:
    path = tmp_path / "config.json"
    path.write_text(
        '{"architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "hidden_size": 16,'
        '"intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,'
        '"num_hidden_layers": 2, "max_position_embeddings": 99, "vocab_size": 50}'
    )
    return config_from_json(path)


def enters(row: int, num_tokens: int, table: tuple[int, ...]) -> NewRow:
    return NewRow(row, (1,) * num_tokens, num_tokens, SamplingParams(), table)


def test_a_prompt_step_reads_weights_once_and_its_own_keys(shape: ModelConfig) -> None:
    prompt = SchedulerOutput(0, (ScheduledRow(0, 0, 0, 6, samples=True),), (enters(0, 6, (3, 5)),))
    cost = StepCounter(shape, SIZES).count(prompt)
    kv = 2 * KV_POSITION * (6 + 6)  # two layers, six positions written and read
    assert cost.num_bytes == 10_000 + 700 + 6 * 16 + kv
    pairs = 1 + 2 + 3 + 4 + 5 + 6
    assert cost.num_flops == 2 * LAYER_WEIGHTS * 6 + 2 * HEAD_WEIGHTS + 2 * 4 * 4 * 8 * pairs


def test_a_chunk_that_draws_nothing_needs_no_head(shape: ModelConfig) -> None:
    chunk = SchedulerOutput(0, (ScheduledRow(0, 0, 0, 3, samples=False),), (enters(0, 6, (3, 5)),))
    cost = StepCounter(shape, SIZES).count(chunk)
    assert cost.num_bytes == 10_000 + 3 * 16 + 2 * KV_POSITION * (3 + 3)
    assert cost.num_flops == 2 * LAYER_WEIGHTS * 3 + 2 * 4 * 4 * 8 * (1 + 2 + 3)


def test_blocks_that_rows_share_are_read_once(shape: ModelConfig) -> None:
    """Two rows on blocks 0 and 1, each with a block of its own that holds two positions after this step."""
    rows = tuple(ScheduledRow(r, r, 9, 1, samples=True) for r in range(2))
    step = SchedulerOutput(0, rows, (enters(0, 10, (0, 1, 2)), enters(1, 10, (0, 1, 3))))
    cost = StepCounter(shape, SIZES).count(step)
    assert cost.num_bytes == 10_000 + 700 + 2 * 16 + 2 * KV_POSITION * (2 + 8 + 2 + 2)


def test_tables_grow_by_what_later_steps_add(shape: ModelConfig) -> None:
    counter = StepCounter(shape, SIZES)
    counter.count(SchedulerOutput(0, (ScheduledRow(0, 0, 0, 4, samples=True),), (enters(0, 4, (9,)),)))
    cost = counter.count(SchedulerOutput(1, (ScheduledRow(0, 0, 4, 1, samples=True, new_blocks=(7,)),)))
    assert cost.num_bytes == 10_000 + 700 + 16 + 2 * KV_POSITION * (1 + 5)


def test_a_window_bounds_what_its_layers_read_and_compute(shape: ModelConfig) -> None:
    windowed = replace(shape, layer_windows=(0, 5))
    step = SchedulerOutput(0, (ScheduledRow(0, 0, 17, 2, samples=True),), (enters(0, 19, tuple(range(5))),))
    cost = StepCounter(windowed, SIZES).count(step)
    # from position 13 on, which lies in block 3: positions 12 to 18
    assert cost.num_bytes == 10_000 + 700 + 2 * 16 + KV_POSITION * (2 * 2 + 19 + 7)
    assert cost.num_flops == 2 * LAYER_WEIGHTS * 2 + 2 * HEAD_WEIGHTS + 4 * 4 * 8 * (18 + 19 + 5 + 5)


def test_the_first_tokens_of_a_window_see_fewer_keys(shape: ModelConfig) -> None:
    windowed = replace(shape, layer_windows=(3, 3))
    step = SchedulerOutput(0, (ScheduledRow(0, 0, 0, 5, samples=False),), (enters(0, 9, (0, 1, 2)),))
    flops = StepCounter(windowed, SIZES).count(step).num_flops
    assert flops == 2 * LAYER_WEIGHTS * 5 + 2 * 4 * 4 * 8 * (1 + 2 + 3 + 3 + 3)


def test_the_longer_of_moving_and_computing_is_the_floor() -> None:
    assert StepCost(100, 10).least_s(bytes_s=50.0, flops_s=100.0) == 2.0
    assert StepCost(100, 1000).least_s(bytes_s=50.0, flops_s=100.0) == 10.0
