"""Where a model's tensors are read from: a GGUF file, a Hugging Face folder, or a seeded random generator.

A store answers under the engine's names (`tensor_names`) and gives weights as the model multiplies by them:
rotary rows half-split, norm weights with their 1 already added.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from footplate.engine.errors import LoadError
from footplate.engine.weights.gguf import GgufFile
from footplate.engine.weights.gguf_tensors import Bytes, StoredRows, dequantise, half_split_rows, is_quantised
from footplate.engine.weights.model_config import ModelConfig
from footplate.engine.weights.tensor_names import gguf_names, hf_names, tensor_shapes


class TensorStore(Protocol):
    """Opening a store checks names and shapes against the config, so reads fail on damage only."""

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor in the file's float type, float32 when it was quantised. Not to be written to."""
        ...

    def stored_rows(self, name: str) -> StoredRows | None:
        """The quantised rows of a matrix; None when it is stored in a float type."""
        ...


class GgufStore:
    """Tensors of one GGUF file.

    Raises:
        LoadError: a tensor is missing, unknown or has another shape than the config says.
    """

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        self._file = file
        self._config = config
        self._names = gguf_names(config)
        found = {name: info.shape for name, info in file.tensors.items() if name != "rope_freqs.weight"}
        check_tensors(file.path, self._names, tensor_shapes(config), found)

    def tensor(self, name: str) -> torch.Tensor:
        info = self._file.tensor_info(self._names[name])
        rows = dequantise(info.type.name, self._in_order(name, self._file.raw(info.name)))
        return torch.from_numpy(rows.reshape(info.shape))

    def stored_rows(self, name: str) -> StoredRows | None:
        info = self._file.tensor_info(self._names[name])
        if not is_quantised(info.type.name):
            return None
        return StoredRows(info.type.name, self._in_order(name, self._file.raw(info.name)))

    def _in_order(self, name: str, raw: Bytes) -> Bytes:
        part = name.rpartition(".")[2]
        if self._config.architecture != "llama" or part not in ("q", "k"):
            return raw
        return half_split_rows(raw, self._config.num_heads if part == "q" else self._config.num_kv_heads)


class SafetensorsStore:
    """Tensors of a Hugging Face folder: `model.safetensors`, or shards listed in its index file.

    Raises:
        LoadError: as GgufStore; also a shard that is missing, damaged or outside the folder.
    """

    _FLOATS = (torch.float32, torch.float16, torch.bfloat16)

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        self._folder = folder
        self._names = hf_names(config)
        self._norm_offset = 1.0 if config.architecture == "gemma3" else 0.0
        self._shards = {path: _open_shard(path) for path in _shard_paths(folder)}
        self._shard_of: dict[str, Path] = {}
        found: dict[str, tuple[int, ...]] = {}
        for path, shard in self._shards.items():
            for file_name in shard.keys():
                if file_name in found:
                    raise LoadError(f"{folder}: tensor {file_name!r} stands in two shards")
                found[file_name] = tuple(shard.get_slice(file_name).get_shape())
                self._shard_of[file_name] = path
        check_tensors(folder, self._names, tensor_shapes(config), _without_derived(found, config))

    def tensor(self, name: str) -> torch.Tensor:
        file_name = self._names[name]
        path = self._shard_of[file_name]
        try:
            value: torch.Tensor = self._shards[path].get_tensor(file_name)
        except SafetensorError as error:
            raise LoadError(f"{path}: tensor {file_name!r} can't be read ({error})") from None
        if value.dtype not in self._FLOATS:
            raise LoadError(
                f"{path}: tensor {file_name!r} is {value.dtype}; float32, float16 or bfloat16 is needed"
            )
        if self._norm_offset and name.endswith("norm"):
            return value.float() + self._norm_offset
        return value

    def stored_rows(self, name: str) -> StoredRows | None:
        return None


class DummyStore:
    """Random float32 weights of the config's shape, the same for the same seed and name on every machine.

    They are made on `device`, a large model in a second on a GPU; another kind of device draws others. Rows
    of a matrix have standard deviation 1 / sqrt(columns) and norms are 1, so that activations stay near 1.
    """

    def __init__(self, config: ModelConfig, seed: int = 0, device: torch.device | str = "cpu") -> None:
        self._shapes = tensor_shapes(config)
        self._seed = seed
        self._device = device

    def tensor(self, name: str) -> torch.Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape)
        generator = torch.Generator(self._device).manual_seed(
            self._seed * 1_000_003 + zlib.crc32(name.encode())
        )
        spread: float = shape[-1] ** -0.5
        return torch.randn(shape, generator=generator, device=self._device).mul_(spread)

    def stored_rows(self, name: str) -> StoredRows | None:
        return None


def check_tensors(
    path: Path,
    names: Mapping[str, str],
    wanted: Mapping[str, tuple[int, ...]],
    found: Mapping[str, tuple[int, ...]],
) -> None:
    """Raise LoadError unless the file holds exactly the wanted tensors in the wanted shapes."""
    unknown = sorted(set(found) - set(names.values()))
    if unknown:
        raise LoadError(f"{path}: {_listed('tensor', unknown)} not part of this architecture")
    missing = sorted(set(names.values()) - set(found))
    if missing:
        raise LoadError(f"{path}: {_listed('tensor', missing)} missing")
    for name, file_name in names.items():
        if tuple(found[file_name]) != wanted[name]:
            raise LoadError(
                f"{path}: tensor {file_name!r} has shape {list(found[file_name])}, "
                f"the config asks for {list(wanted[name])}"
            )


def _listed(noun: str, names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{noun} {shown}{rest} is" if len(names) == 1 else f"{noun}s {shown}{rest} are"


def _shard_paths(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return [folder / "model.safetensors"]
    try:
        names = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise LoadError(f"{index}: can't be read as a shard index ({error!r})") from None
    if any(not isinstance(name, str) or Path(name).name != name for name in names):
        raise LoadError(f"{index}: names a shard outside its folder")
    return [folder / name for name in sorted(names)]


def _open_shard(path: Path) -> Any:
    # safetensors ships no types for its handle.
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise LoadError(f"{path}: can't be read as safetensors ({error})") from None


def _without_derived(found: Mapping[str, tuple[int, ...]], config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Drop what older exports write beside the weights: rotary tables, and the copy of a tied head."""
    derived = {name for name in found if name.endswith("rotary_emb.inv_freq")}
    if config.tied_embeddings:
        derived.add("lm_head.weight")
    return {name: shape for name, shape in found.items() if name not in derived}
