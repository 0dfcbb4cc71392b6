"""A model's description is read from either kind of file, and what we don't run is refused by name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from footplate.engine.errors import LoadError
from footplate.engine.weights.gguf import GgufFile
from footplate.engine.weights.model_config import ModelConfig, config_from_gguf, config_from_json
from footplate.engine.weights.rope_config import RopeConfig, rope_from_scaling
from tests.engine.weights.gguf_files import float_tensor, llama_metadata, llama_tensors, write_gguf

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 40,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "eos_token_id": [1, 2],
}
GEMMA = {
    "architectures": ["Gemma3ForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "intermediate_size": 96,
    "vocab_size": 40,
    "max_position_embeddings": 128,
    "query_pre_attn_scalar": 16,
    "sliding_window": 8,
    "rope_theta": 1e6,
    "rope_local_base_freq": 10000.0,
    "hidden_activation": "gelu_pytorch_tanh",
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _hf(tmp_path: Path, base: dict[str, Any], **changes: Any) -> ModelConfig:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(base | changes))
    return config_from_json(path)


def _gguf(tmp_path: Path, extra: Any = (), **changes: Any) -> ModelConfig:
    path = write_gguf(tmp_path / "m.gguf", llama_metadata(**changes), [*llama_tensors(), *extra])
    return config_from_gguf(GgufFile(path))


def test_llama_from_gguf(tmp_path: Path) -> None:
    config = _gguf(tmp_path)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (2, 4, 2, 16)
    assert (config.vocab_size, config.tied_embeddings, config.activation) == (40, True, "silu")
    assert config.rope == RopeConfig(theta=10000.0)
    assert (config.layer_windows, config.eos_token_ids) == ((0, 0), (1,))


def test_llama_3_files_carry_rope_factors_as_a_tensor(tmp_path: Path) -> None:
    """FAULTS a71."""
    factors = np.arange(1.0, 9.0)
    config = _gguf(tmp_path, [float_tensor("rope_freqs.weight", factors)])
    plain = RopeConfig(theta=10000.0).inverse_frequencies(16)
    assert config.rope.inverse_frequencies(16) == pytest.approx(np.array(plain) / factors)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general__architecture": "qwen3"}, "'qwen3' is not supported"),
        ({"llama__block_count": None}, "llama.block_count"),
        ({"llama__block_count": "two"}, "llama.block_count"),
        ({"llama__block_count": 1 << 31}, "num_layers"),
        ({"llama__attention__head_count_kv": 3}, "KV heads"),
        ({"llama__attention__head_count": 0, "llama__rope__dimension_count": None}, "head_count is 0"),
        ({"llama__rope__dimension_count": 8}, "dimension_count"),
        ({"llama__rope__scaling__type": "longrope", "llama__rope__scaling__factor": 2.0}, "longrope"),
        ({"llama__expert_count": 8}, "mixture"),
    ],
)
def test_gguf_models_that_would_be_wrong_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(LoadError, match=message):
        _gguf(tmp_path, **changes)


def test_llama_from_hugging_face(tmp_path: Path) -> None:
    config = _hf(tmp_path, LLAMA, rope_scaling=LLAMA3)
    assert (config.head_dim, config.attention_scale, config.tied_embeddings) == (16, 0.25, False)
    assert (config.rope.kind, config.rope.original_max_position) == ("llama3", 8192)
    assert config.eos_token_ids == (1, 2)


def test_gemma_from_hugging_face(tmp_path: Path) -> None:
    config = _hf(tmp_path, GEMMA)
    assert config.layer_windows == (8, 8, 8, 8, 8, 0, 8)
    assert (config.attention_scale, config.embed_scale) == (0.25, 8.0)
    assert config.rope == RopeConfig(theta=1e6, local_theta=10000.0)
    assert config.qk_norm and config.post_norms and config.tied_embeddings
    listed = _hf(tmp_path, GEMMA, layer_types=["full_attention"] + ["sliding_attention"] * 6)
    assert listed.layer_windows == (0, 8, 8, 8, 8, 8, 8)


def test_rope_parameters_by_layer_kind_are_the_newer_spelling(tmp_path: Path) -> None:
    old = {key: kept for key, kept in GEMMA.items() if not key.startswith("rope")}
    parameters = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
    }
    config = _hf(tmp_path, old, rope_parameters=parameters)
    assert config.rope == RopeConfig(theta=1e6, kind="linear", factor=8.0, local_theta=5000.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM"),
        ({"hidden_act": "relu"}, "'relu'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_size": None}, "hidden_size"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "mscale": 1.0}}, "mscale"),
    ],
)
def test_hugging_face_models_that_would_be_wrong_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(LoadError, match=message):
        _hf(tmp_path, LLAMA, **changes)


def test_a_config_that_is_no_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("{")
    with pytest.raises(LoadError, match=r"config\.json"):
        config_from_json(path)


def test_llama3_keeps_fast_turns_and_slows_slow_ones() -> None:
    """FAULTS a71."""
    rope = rope_from_scaling(LLAMA3, 500000.0, 131072)
    plain, scaled = RopeConfig(theta=500000.0).inverse_frequencies(128), rope.inverse_frequencies(128)
    assert scaled[0] == plain[0]
    assert scaled[-1] == pytest.approx(plain[-1] / 8)
    assert all(low / 8 <= value <= low for low, value in zip(plain, scaled, strict=True))


def test_yarn_warms_attention_and_blends_by_turns() -> None:
    """FAULTS a71."""
    rope = rope_from_scaling(
        {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}, 10000.0, 16384
    )
    plain, scaled = RopeConfig().inverse_frequencies(64), rope.inverse_frequencies(64)
    assert rope.attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    assert (scaled[0], scaled[-1]) == (plain[0], pytest.approx(plain[-1] / 4))


@pytest.mark.parametrize("base", [LLAMA, GEMMA])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(
            (name, value)
            for name in ("hidden_size", "head_dim", "vocab_size")
            for value in (0, -1, 64.5, "64")
        ),
        ("num_attention_heads", 0),
        ("num_key_value_heads", 0),
        ("num_hidden_layers", 2.5),
        ("intermediate_size", math.nan),
        ("max_position_embeddings", 10**400),
        ("rms_norm_eps", math.nan),
        ("rms_norm_eps", 0),
        ("rope_theta", math.inf),
        ("rope_theta", 1),
        ("torch_dtype", "int3"),
        ("eos_token_id", "two"),
        ("eos_token_id", [1, 2.5]),
        ("sliding_window", -1),
        ("rope_scaling", [1]),
        ("rope_parameters", 7),
        ("architectures", 5),
    ],
)
def test_values_that_no_model_has_are_refused_by_file_and_field(
    tmp_path: Path, base: dict[str, Any], field: str, value: Any
) -> None:
    with pytest.raises(LoadError, match=rf"config\.json: {field}"):
        _hf(tmp_path, base, **{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sliding_window_pattern", 0),
        ("layer_types", 3),
        ("layer_types", [[]]),
        ("hidden_activation", []),
        ("query_pre_attn_scalar", 0),
        ("rope_local_base_freq", math.inf),
        ("final_logit_softcapping", -1),
    ],
)
def test_what_only_gemma_has_is_refused_likewise(tmp_path: Path, field: str, value: Any) -> None:
    with pytest.raises(LoadError, match=r"config\.json: "):
        _hf(tmp_path, GEMMA, **{field: value})


@pytest.mark.parametrize(
    ("scaling", "told"),
    [
        (LLAMA3 | {"factor": math.inf}, "factor"),
        (LLAMA3 | {"low_freq_factor": 4.0}, "low_freq_factor"),
        (LLAMA3 | {"original_max_position_embeddings": 0.5}, "original_max_position_embeddings"),
        ({"type": "yarn", "factor": 4, "beta_fast": math.nan}, "beta_fast"),
        ({"type": "yarn", "factor": 4, "attention_factor": "x"}, "attention_factor"),
    ],
)
def test_rope_scaling_of_no_sense_is_refused(tmp_path: Path, scaling: dict[str, Any], told: str) -> None:
    with pytest.raises(LoadError, match=rf"config\.json: rope scaling.* {told}"):
        _hf(tmp_path, LLAMA, rope_scaling=scaling)


@pytest.mark.parametrize(
    "key", ["attention.key_length", "embedding_length", "attention.head_count", "rope.freq_base"]
)
def test_a_gguf_value_of_zero_is_refused_by_its_key(tmp_path: Path, key: str) -> None:
    metadata = llama_metadata()
    path = write_gguf(tmp_path / "m.gguf", metadata | {f"llama.{key}": 0}, llama_tensors())
    with pytest.raises(LoadError, match=rf"llama\.{key} is 0"):
        config_from_gguf(GgufFile(path))
