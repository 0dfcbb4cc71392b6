"""Weights that were damaged on their way are found before a model serves."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from footplate.engine.config import EngineConfig
from footplate.engine.errors import LoadError
from footplate.engine.loader import load_engine
from footplate.engine.weights.model_config import config_from_json
from footplate.engine.weights.tensor_names import hf_names, tensor_shapes
from tests.engine.weights.test_model_config import LLAMA

FILE = "model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small Llama of random weights in a folder of Hugging Face's form."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    config = config_from_json(tmp_path / "config.json")
    torch.manual_seed(3)
    names, shapes = hf_names(config), tensor_shapes(config)
    tensors = {
        names[name]: torch.randn(shape) / math.sqrt(shape[-1]) if len(shape) > 1 else torch.ones(shape)
        for name, shape in shapes.items()
    }
    save_file(tensors, tmp_path / FILE)
    return tmp_path


def load(folder: Path, **options: int) -> None:
    config = EngineConfig(kv_cache_gib=0.001, max_num_seqs=2, **options)
    load_engine(f"hf:{folder}", config).core.shutdown()


@pytest.mark.parametrize("options", [{}, {"max_model_len": 1}, {"block_size": 8, "max_model_len": 3}])
def test_whole_weights_load(folder: Path, options: dict[str, int]) -> None:
    load(folder, **options)


def one_nan(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.1.mlp.down_proj.weight"][7, 5] = math.nan


def one_flipped_exponent(tensors: dict[str, torch.Tensor]) -> None:
    """The highest bit of a value's exponent: 0.1 becomes 3e37, and its square is infinite."""
    weight = tensors["model.layers.0.self_attn.v_proj.weight"]
    weight.view(torch.int32)[3, 2] ^= 1 << 30


def zeros_from_the_middle_on(tensors: dict[str, torch.Tensor]) -> None:
    """As a download leaves a file whose room was taken beforehand."""
    for name in sorted(tensors)[1:]:
        tensors[name].zero_()


def a_last_norm_of_zeros(tensors: dict[str, torch.Tensor]) -> None:
    """Every token gets the same chance. Gains may be zeros elsewhere, so the file is not refused for them."""
    tensors["model.norm.weight"].zero_()


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (one_nan, "give no numbers"),
        (one_flipped_exponent, "a weight file is damaged"),
        (a_last_norm_of_zeros, "the same chance"),
        (zeros_from_the_middle_on, "holds nothing but zeros"),
    ],
)
def test_damaged_weights_are_refused(
    folder: Path, damage: Callable[[dict[str, torch.Tensor]], None], told: str
) -> None:
    tensors = load_file(folder / FILE)
    damage(tensors)
    save_file(tensors, folder / FILE)
    with pytest.raises(LoadError, match=told):
        load(folder)
