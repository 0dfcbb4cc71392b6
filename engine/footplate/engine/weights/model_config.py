"""What a model is, in numbers: one frozen value from GGUF or Hugging Face metadata. Knows no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from footplate.engine.errors import LoadError
from footplate.engine.weights.config_values import checked_ids, checked_integer, checked_number
from footplate.engine.weights.files import read_json_object
from footplate.engine.weights.gguf import GgufFile
from footplate.engine.weights.rope_config import RopeConfig, rope_from_scaling, yarn_attention_factor
from footplate.engine.weights.source import ModelSource

_MAX_LAYERS = 1024  # checked before anything is made for each layer
_STORED_DTYPES = ("float32", "bfloat16", "float16")
_GEMMA3_GLOBAL_EVERY = 6  # five sliding layers, then a global one
_GEMMA3_LOCAL_THETA = 10000.0
_GEMMA3_27B_LAYERS = 62  # the one Gemma 3 whose attention scale is not from the head size


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder's shape. Windows are per layer, in tokens; 0 means a layer sees everything before it.

    More fields than the usual budget: they are one flat description that every model reads a part of.
    """

    architecture: str  # llama or gemma3
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position: int  # tokens
    norm_eps: float
    rope: RopeConfig
    layer_windows: tuple[int, ...]
    tied_embeddings: bool
    activation: str  # silu or gelu_tanh
    attention_scale: float
    qk_norm: bool = False
    post_norms: bool = False  # norms on the outputs of attention and MLP, before the residual is added
    embed_scale: float = 1.0
    attention_soft_cap: float = 0.0  # 0: none
    final_soft_cap: float = 0.0
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    stored_dtype: str = "float32"  # what the file says it was trained in

    def __post_init__(self) -> None:
        for name in (
            "hidden_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "intermediate_size",
        ):
            _check_range(name, getattr(self, name))
        _check_range("vocab_size", self.vocab_size)
        _check_range("max_position", self.max_position, 1 << 40)
        if self.num_heads % self.num_kv_heads:
            raise LoadError(
                f"model config: {self.num_heads} heads do not divide by {self.num_kv_heads} KV heads"
            )
        if self.head_dim % 2:
            raise LoadError(f"model config: head size {self.head_dim} is odd, rotary positions need pairs")
        if len(self.layer_windows) != self.num_layers:
            raise LoadError(
                f"model config: {len(self.layer_windows)} layer kinds for {self.num_layers} layers"
            )

    def is_global(self, layer: int) -> bool:
        """Whether the layer sees its whole context (and takes the global rope angles)."""
        return self.layer_windows[layer] == 0

    @property
    def queries_per_kv_head(self) -> int:
        return self.num_heads // self.num_kv_heads


def _check_range(name: str, value: int, limit: int = 1 << 24) -> None:
    if not 0 < value <= limit:
        raise LoadError(f"model config: {name} is {value}; it must be from 1 to {limit}")


def _layer_count(value: int) -> int:
    _check_range("num_layers", value, _MAX_LAYERS)
    return value


def config_from_gguf(file: GgufFile) -> ModelConfig:
    """Read the description out of a GGUF file's metadata.

    Raises:
        LoadError: an architecture, rope kind or activation we do not run, or a missing or senseless key.
    """
    architecture = file.metadata.get("general.architecture")
    if architecture == "llama":
        return _llama_from_gguf(_GgufKeys(file, "llama"))
    if architecture == "gemma3":
        return _gemma3_from_gguf(_GgufKeys(file, "gemma3"))
    raise LoadError(
        f"{file.path}: architecture {architecture!r} is not supported; supported are llama, gemma3"
    )


class _GgufKeys:
    """Typed reads of one architecture's keys, with errors that name the key."""

    def __init__(self, file: GgufFile, prefix: str) -> None:
        self.file = file
        self.prefix = prefix

    def number(self, key: str, default: float | None = None, *, zero: bool = False) -> float:
        return checked_number(*self._value(key, default), zero=zero)

    def integer(self, key: str, default: int | None = None, *, zero: bool = False) -> int:
        return checked_integer(*self._value(key, default), zero=zero)

    def _value(self, key: str, default: float | None) -> tuple[Any, str]:
        name = f"{self.prefix}.{key}"
        return self.file.metadata.get(name, default), f"{self.file.path}: metadata {name}"

    def has(self, key: str) -> bool:
        return f"{self.prefix}.{key}" in self.file.metadata

    def shape(self) -> dict[str, Any]:
        """The fields both architectures share."""
        metadata = self.file.metadata
        hidden_size, num_heads = self.integer("embedding_length"), self.integer("attention.head_count")
        head_dim = self.integer("attention.key_length", hidden_size // num_heads)
        if self.integer("attention.value_length", head_dim) != head_dim:
            raise LoadError(f"{self.file.path}: keys and values of different head sizes are not supported")
        if self.integer("rope.dimension_count", head_dim) != head_dim:
            raise LoadError(
                f"{self.file.path}: {self.prefix}.rope.dimension_count below the head size is not supported"
            )
        if self.integer("expert_count", 0, zero=True):
            raise LoadError(f"{self.file.path}: mixture-of-experts models are not supported")
        eos = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
        bos = metadata.get("tokenizer.ggml.bos_token_id")
        return {
            "architecture": self.prefix,
            "hidden_size": hidden_size,
            "num_layers": _layer_count(self.integer("block_count")),
            "num_heads": num_heads,
            "num_kv_heads": self.integer("attention.head_count_kv", num_heads),
            "head_dim": head_dim,
            "intermediate_size": self.integer("feed_forward_length"),
            "vocab_size": self.file.tensor_info("token_embd.weight").shape[0],
            "max_position": self.integer("context_length"),
            "norm_eps": float(self.number("attention.layer_norm_rms_epsilon")),
            "tied_embeddings": "output.weight" not in self.file.tensors,
            "eos_token_ids": tuple(dict.fromkeys(token for token in eos if isinstance(token, int))),
            "bos_token_id": bos if isinstance(bos, int) else None,
        }

    def rope(self, default_theta: float, local_theta: float | None = None) -> RopeConfig:
        theta = float(self.number("rope.freq_base", default_theta))
        if theta <= 1:
            raise LoadError(f"{self.file.path}: metadata {self.prefix}.rope.freq_base must be above 1")
        kind = str(self.file.metadata.get(f"{self.prefix}.rope.scaling.type", "none"))
        if "rope_freqs.weight" in self.file.tensors:
            if kind != "none":
                raise LoadError(
                    f"{self.file.path}: both rope_freqs.weight and rope scaling {kind!r} are given"
                )
            return RopeConfig(
                theta=theta, kind="factors", factors=self._rope_factors(), local_theta=local_theta
            )
        if kind == "none":
            return RopeConfig(theta=theta, local_theta=local_theta)
        factor = float(self.number("rope.scaling.factor"))
        if kind == "linear":
            return RopeConfig(theta=theta, kind="linear", factor=factor, local_theta=local_theta)
        if kind != "yarn":
            raise LoadError(
                f"{self.file.path}: rope scaling {kind!r} is not supported; supported are none, linear, yarn"
            )
        return RopeConfig(
            theta=theta,
            kind="yarn",
            factor=factor,
            original_max_position=self.integer("rope.scaling.original_context_length"),
            attention_factor=yarn_attention_factor(factor)
            * float(self.number("rope.scaling.attn_factor", 1.0)),
            local_theta=local_theta,
        )

    def _rope_factors(self) -> tuple[float, ...]:
        info = self.file.tensor_info("rope_freqs.weight")
        if info.type.name != "F32":
            raise LoadError(
                f"{self.file.path}: tensor 'rope_freqs.weight' is {info.type.name}, F32 is needed"
            )
        factors = np.frombuffer(self.file.raw("rope_freqs.weight").tobytes(), "<f4")
        if not (np.isfinite(factors).all() and (factors > 0).all()):
            raise LoadError(f"{self.file.path}: tensor 'rope_freqs.weight' holds no factors above 0")
        return tuple(float(value) for value in factors)


def _llama_from_gguf(keys: _GgufKeys) -> ModelConfig:
    shape = keys.shape()
    return ModelConfig(
        **shape,
        rope=keys.rope(default_theta=10000.0),
        layer_windows=(keys.integer("attention.sliding_window", 0, zero=True),) * shape["num_layers"],
        activation="silu",
        attention_scale=keys.number("attention.scale", 0.0, zero=True) or shape["head_dim"] ** -0.5,
    )


def _gemma3_from_gguf(keys: _GgufKeys) -> ModelConfig:
    shape = keys.shape()
    num_layers = shape["num_layers"]
    window = keys.integer("attention.sliding_window", zero=True)
    scale_of = shape["head_dim"]
    if num_layers == _GEMMA3_27B_LAYERS:
        scale_of = shape["hidden_size"] / shape["num_heads"]
    pattern = _GEMMA3_GLOBAL_EVERY
    if keys.has("attention.sliding_window_pattern"):
        pattern = keys.integer("attention.sliding_window_pattern")
    return ModelConfig(
        **shape,
        rope=keys.rope(1e6, float(keys.number("rope.freq_base_swa", _GEMMA3_LOCAL_THETA))),
        layer_windows=_windows(num_layers, window, pattern),
        activation="gelu_tanh",
        attention_scale=scale_of**-0.5,
        qk_norm=True,
        post_norms=True,
        embed_scale=shape["hidden_size"] ** 0.5,
        final_soft_cap=float(keys.number("final_logit_softcapping", 0.0, zero=True)),
        stored_dtype="bfloat16",
    )


def _windows(num_layers: int, window: int, global_every: int) -> tuple[int, ...]:
    return tuple(0 if (layer + 1) % global_every == 0 else window for layer in range(num_layers))


def read_config(source: ModelSource) -> ModelConfig:
    """The description of a resolved source, without its weights. Raises LoadError as the readers do."""
    if source.kind == "gguf":
        return config_from_gguf(GgufFile(source.path))
    return config_from_json(source.path / "config.json" if source.kind == "hf" else source.path)


def config_from_json(path: Path) -> ModelConfig:
    """Read a Hugging Face `config.json`.

    Raises:
        LoadError: the file can't be read, or describes something we do not run; the message names the key.
    """
    content = read_json_object(path)
    keys = _HfKeys(path, content)
    architectures = content.get("architectures") or []
    if not isinstance(architectures, list):
        raise LoadError(f"{path}: architectures is no list")
    if "LlamaForCausalLM" in architectures or (not architectures and content.get("model_type") == "llama"):
        return _llama_from_hf(keys)
    if "Gemma3ForCausalLM" in architectures or content.get("model_type") == "gemma3_text":
        return _gemma3_from_hf(keys)
    named = architectures or [content.get("model_type")]
    raise LoadError(
        f"{path}: architecture {named} is not supported; supported are LlamaForCausalLM, Gemma3ForCausalLM"
    )


class _HfKeys:
    """Typed reads of a config.json, with errors that name the key."""

    def __init__(self, path: Path, content: Mapping[str, Any]) -> None:
        self.path = path
        self.content = content

    def number(self, key: str, default: float | None = None, *, zero: bool = False) -> float:
        return checked_number(*self._value(key, default), zero=zero)

    def integer(self, key: str, default: int | None = None, *, zero: bool = False) -> int:
        return checked_integer(*self._value(key, default), zero=zero)

    def _value(self, key: str, default: float | None) -> tuple[Any, str]:
        value = self.content.get(key)
        return default if value is None else value, f"{self.path}: {key}"

    def rope_group(self, kind: str) -> Mapping[str, Any]:
        """`rope_parameters` of one layer kind, flat or nested by kind; the newer spelling of rope_scaling."""
        parameters = self.mapping("rope_parameters")
        group = parameters.get(kind, parameters)
        return group if isinstance(group, dict) else {}

    def mapping(self, key: str) -> Mapping[str, Any]:
        value = self.content.get(key) or {}
        if not isinstance(value, dict):
            raise LoadError(f"{self.path}: {key} is no object of names and values")
        return value

    def theta(self, group: Mapping[str, Any], key: str, default: float) -> float:
        """A base of rotary angles, of a group or beside it. At 1 all angles would be the same."""
        value = group.get("rope_theta")
        theta = float(
            self.number(key, default) if value is None else checked_number(value, f"{self.path}: rope_theta")
        )
        if theta <= 1:
            raise LoadError(f"{self.path}: {key} is {theta:g}; it must be above 1")
        return theta

    def shape(self) -> dict[str, Any]:
        for bias in ("attention_bias", "mlp_bias"):
            if self.content.get(bias):
                raise LoadError(f"{self.path}: {bias} is set, biases are not supported")
        if self.number("partial_rotary_factor", 1.0) != 1.0:
            raise LoadError(f"{self.path}: partial_rotary_factor below 1 is not supported")
        hidden_size, num_heads = self.integer("hidden_size"), self.integer("num_attention_heads")
        bos = self.content.get("bos_token_id")
        dtype = self.content.get("dtype") or self.content.get("torch_dtype") or "float32"
        if dtype not in _STORED_DTYPES:
            raise LoadError(
                f"{self.path}: torch_dtype is {str(dtype)[:40]!r}; "
                f"it must be one of {', '.join(_STORED_DTYPES)}"
            )
        return {
            "hidden_size": hidden_size,
            "num_layers": _layer_count(self.integer("num_hidden_layers")),
            "num_heads": num_heads,
            "num_kv_heads": self.integer("num_key_value_heads", num_heads),
            "head_dim": self.integer("head_dim", hidden_size // num_heads),
            "intermediate_size": self.integer("intermediate_size"),
            "vocab_size": self.integer("vocab_size"),
            "max_position": self.integer("max_position_embeddings"),
            "norm_eps": float(self.number("rms_norm_eps", 1e-6)),
            "eos_token_ids": checked_ids(self.content.get("eos_token_id"), f"{self.path}: eos_token_id"),
            "bos_token_id": bos if isinstance(bos, int) else None,
            "stored_dtype": str(dtype),
        }

    def activation(self, key: str) -> str:
        name = self.content.get(key)
        known = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
        if not isinstance(name, str) or name not in known:
            raise LoadError(f"{self.path}: {key} {name!r} is not supported; supported are {', '.join(known)}")
        return known[name]


def _llama_from_hf(keys: _HfKeys) -> ModelConfig:
    shape = keys.shape()
    group = keys.rope_group("full_attention")
    scaling = keys.mapping("rope_scaling") or group
    theta = keys.theta(group, "rope_theta", 10000.0)
    return ModelConfig(
        **shape,
        architecture="llama",
        rope=rope_from_scaling(scaling, theta, shape["max_position"], where=str(keys.path)),
        layer_windows=(keys.integer("sliding_window", 0, zero=True),) * shape["num_layers"],
        tied_embeddings=bool(keys.content.get("tie_word_embeddings", False)),
        activation=keys.activation("hidden_act"),
        attention_scale=shape["head_dim"] ** -0.5,
    )


def _gemma3_from_hf(keys: _HfKeys) -> ModelConfig:
    shape = keys.shape()
    full, local = keys.rope_group("full_attention"), keys.rope_group("sliding_attention")
    theta = keys.theta(full, "rope_theta", 1e6)
    # A flat rope_parameters mapping is the global layers' own; only a nested one speaks of local layers.
    nested_local = {} if local is full else local
    local_theta = keys.theta(nested_local, "rope_local_base_freq", _GEMMA3_LOCAL_THETA)
    return ModelConfig(
        **shape,
        architecture="gemma3",
        rope=rope_from_scaling(
            keys.mapping("rope_scaling") or full,
            theta,
            shape["max_position"],
            local_theta,
            where=str(keys.path),
        ),
        layer_windows=_hf_windows(keys, shape["num_layers"]),
        tied_embeddings=bool(keys.content.get("tie_word_embeddings", True)),
        activation=keys.activation("hidden_activation"),
        attention_scale=keys.number("query_pre_attn_scalar", shape["head_dim"]) ** -0.5,
        qk_norm=True,
        post_norms=True,
        embed_scale=shape["hidden_size"] ** 0.5,
        attention_soft_cap=float(keys.number("attn_logit_softcapping", 0.0, zero=True)),
        final_soft_cap=float(keys.number("final_logit_softcapping", 0.0, zero=True)),
    )


def _hf_windows(keys: _HfKeys, num_layers: int) -> tuple[int, ...]:
    window = keys.integer("sliding_window", 0, zero=True)
    layer_types = keys.content.get("layer_types")
    if layer_types is None:
        newer = keys.integer("_sliding_window_pattern", _GEMMA3_GLOBAL_EVERY)
        return _windows(num_layers, window, keys.integer("sliding_window_pattern", newer))
    known = {"full_attention": 0, "sliding_attention": window}
    if not isinstance(layer_types, list):
        raise LoadError(f"{keys.path}: layer_types is no list")
    for name in layer_types:
        if not isinstance(name, str) or name not in known:
            raise LoadError(f"{keys.path}: layer type {name!r} is not supported")
    return tuple(known[name] for name in layer_types)
