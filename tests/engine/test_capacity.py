"""The plan's arithmetic against known models, and against what the engine really allocates."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from footplate.deployments.cli.main import application
from footplate.engine.capacity import (
    DEVICES,
    Demand,
    capacity,
    count_parameters,
    fewest_gpus,
    kv_bytes_per_token,
    prefill_flops,
)
from footplate.engine.weights.model_config import ModelConfig, config_from_json, read_config
from footplate.engine.weights.source import resolve_source
from footplate.platform.cli.errors import CommandError
from tests.engine.conftest import GEMMA3, SMOLLM2, MakeEngine

SHAPES = Path(__file__).parents[2] / "engine" / "benchmarks" / "models"
LLAMA_3_70B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA_3_70B))
    return file


@pytest.fixture
def llama(config_file: Path) -> ModelConfig:
    return config_from_json(config_file)


def test_the_known_figures_of_llama_3_70b_on_one_h100(llama: ModelConfig) -> None:
    found = capacity(llama, DEVICES["H100-80GB"], Demand(context_tokens=1))
    assert found.kv_bytes_per_token == 320 * 1024
    assert found.parameters == pytest.approx(70.55e9, rel=1e-3)
    assert found.weight_bytes == pytest.approx(141e9, rel=5e-3)
    assert round(found.decode_tokens_per_s_alone) == 24
    assert (found.kv_budget_bytes_per_gpu, found.kv_tokens, found.fits) == (0, 0, False)


def test_as_few_devices_are_named_as_hold_a_sequence(llama: ModelConfig) -> None:
    h100 = DEVICES["H100-80GB"]
    found = fewest_gpus(llama, h100, Demand())
    assert found is not None and found.num_gpus == 4
    assert not capacity(llama, h100, Demand(), 2).fits
    quarter = fewest_gpus(llama, h100, Demand(weight_type="int4"))
    assert quarter is not None and quarter.num_gpus == 1
    tiny = dataclasses.replace(h100, memory_bytes=2.5e9)
    assert fewest_gpus(llama, tiny, Demand()) is None


def test_more_devices_than_kv_heads_hold_them_more_than_once(llama: ModelConfig) -> None:
    h100 = DEVICES["H100-80GB"]
    eight, sixteen = (capacity(llama, h100, Demand(), count) for count in (8, 16))
    assert sixteen.kv_tokens / eight.kv_tokens == pytest.approx(
        sixteen.kv_budget_bytes_per_gpu / eight.kv_budget_bytes_per_gpu, rel=1e-6
    )


def test_twice_the_prompt_is_more_than_twice_the_work(llama: ModelConfig) -> None:
    short, long = prefill_flops(llama, 4096), prefill_flops(llama, 8192)
    assert 2 < long / short < 2.2
    # Two operations for each weight and token, and a little attention.
    assert short == pytest.approx(2 * 69.5e9 * 4096, rel=0.03)


@pytest.mark.parametrize(
    ("source", "billions"),
    [
        (SMOLLM2, 0.1345),
        (GEMMA3, 0.268),
        # The shapes of the comparison on a GPU are those of the models that it names.
        (f"dummy:{SHAPES}/l8b/config.json", 8.03),
        (f"dummy:{SHAPES}/l1b/config.json", 1.236),
    ],
)
def test_parameters_of_the_packaged_and_the_measured_models(source: str, billions: float) -> None:
    shape = read_config(resolve_source(source))
    assert count_parameters(shape) / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize("dtype", ["float32", "auto"])
def test_the_engine_allocates_what_is_planned(make_engine: MakeEngine, dtype: str) -> None:
    core = make_engine(dtype=dtype, kv_cache_gib=0.05)
    shape = read_config(resolve_source(SMOLLM2))
    itemsize = 4 if dtype == "float32" else 2
    planned = 0.05 * (1 << 30) / (kv_bytes_per_token(shape, itemsize) * 16)
    assert core.scheduler.pool.num_blocks == pytest.approx(planned, rel=0.02)
    held = sum(key.nbytes + value.nbytes for key, value in core.runner.caches)  # type: ignore[attr-defined]
    assert held == pytest.approx(0.05 * (1 << 30), rel=0.02)


def test_the_command_explains_itself_and_refuses_what_it_does_not_know(config_file: Path) -> None:
    runner = CliRunner()
    told = runner.invoke(application, ["plan", f"dummy:{config_file}", "--price", "4"])
    assert told.exit_code == 0
    assert "320 KiB" in told.stdout
    assert "it takes 4" in told.stdout.replace("\n", " ")
    made = runner.invoke(application, ["plan", f"dummy:{config_file}", "--gpus", "1", "--json"])
    told_json = json.loads(made.stdout)
    assert told_json["gpus_needed"] == 4
    assert (told_json["plan"]["fits"], told_json["plan"]["kv_bytes_per_token"]) == (False, 327_680)
    assert runner.invoke(application, ["plan", f"dummy:{config_file}", "--gpu", "H1000"]).exit_code == 1
    assert runner.invoke(application, ["plan", "dummy:/nowhere.json"]).exit_code == 1
    assert runner.invoke(application, ["plan", f"dummy:{config_file}", "--price", "1e400"]).exit_code == 1


@pytest.mark.parametrize("text", ["[" * 100_000, '{"head_dim": 0}', '{"hidden_size": 8192.5}'])
def test_the_command_refuses_a_model_of_no_sense_with_a_sentence(config_file: Path, text: str) -> None:
    content = text if text[0] == "[" else json.dumps(json.loads(config_file.read_text()) | json.loads(text))
    config_file.write_text(content)
    told = CliRunner().invoke(application, ["plan", f"dummy:{config_file}"])
    assert told.exit_code == 1
    assert isinstance(told.exception, CommandError), told.exception
