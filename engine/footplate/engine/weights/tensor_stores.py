"""Where a model's tensors are read from: a GGUF file, a Hugging Face folder, or a seeded random generator.

A store answers under the engine's names (`tensor_names`) and gives weights as the model multiplies by them:
rotary rows half-split, norm weights with their 1 already added.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

from footplate.engine.errors import LoadError
from footplate.engine.weights.gguf import GgufFile, TensorInfo
from footplate.engine.weights.gguf_tensors import Bytes, StoredRows, dequantise, half_split_rows, is_quantised
from footplate.engine.weights.inspection import checked_folder, checked_gguf
from footplate.engine.weights.model_config import ModelConfig
from footplate.engine.weights.streaming import Placement, stream
from footplate.engine.weights.tensor_names import tensor_shapes


class TensorStore(Protocol):
    """Opening a store checks names and shapes against the config, so reads fail on damage only."""

    num_bytes: int  # of the tensors as they are stored; 0 where nothing is

    def place(self, name: str, target: torch.Tensor, rounded_to: torch.dtype | None = None) -> None:
        """Have the tensor's values written to `target`, rounded to a type on the way if one is given.

        `target` is contiguous and of the tensor's shape, in any float type, on any device. It need not be
        filled before `complete` returns.
        """
        ...

    def complete(self) -> None:
        """Return when every target is filled. Raises LoadError when one can't be."""
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
        self._names = checked_gguf(file, config)
        self.num_bytes = sum(file.raw(name).nbytes for name in self._names.values())

    def place(self, name: str, target: torch.Tensor, rounded_to: torch.dtype | None = None) -> None:
        fill(target, self._tensor(name), rounded_to)

    def complete(self) -> None:
        pass

    def _tensor(self, name: str) -> torch.Tensor:
        info = self._file.tensor_info(self._names[name])
        rows = dequantise(info.type.name, self._in_order(name, self._checked(info)))
        return torch.from_numpy(rows.reshape(info.shape))

    def stored_rows(self, name: str) -> StoredRows | None:
        info = self._file.tensor_info(self._names[name])
        if not is_quantised(info.type.name):
            return None
        return StoredRows(info.type.name, self._in_order(name, self._checked(info)))

    def _checked(self, info: TensorInfo) -> Bytes:
        raw = self._file.raw(info.name)
        if len(info.shape) > 1 and is_zero(
            len(raw), lambda begin, end: bool(dequantise(info.type.name, raw[begin:end]).any())
        ):
            raise _zeros(self._file.path, info.name)
        return raw

    def _in_order(self, name: str, raw: Bytes) -> Bytes:
        part = name.rpartition(".")[2]
        if self._config.architecture != "llama" or part not in ("q", "k"):
            return raw
        return half_split_rows(raw, self._config.num_heads if part == "q" else self._config.num_kv_heads)


class SafetensorsStore:
    """Tensors of a Hugging Face folder: `model.safetensors`, or shards listed in its index file.

    They are read all together by `complete`, straight to where they are used.

    Raises:
        LoadError: see `checked_folder`.
    """

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        self._norm_offset = 1.0 if config.architecture == "gemma3" else 0.0
        self._placements: list[Placement] = []
        self._names, self._stored = checked_folder(folder, config)
        self.num_bytes = sum(self._stored[file_name].num_bytes for file_name in self._names.values())

    def place(self, name: str, target: torch.Tensor, rounded_to: torch.dtype | None = None) -> None:
        added = self._norm_offset if name.endswith("norm") else 0.0
        self._placements.append(Placement(self._stored[self._names[name]], target, rounded_to, added))

    def complete(self) -> None:
        placements, self._placements = self._placements, []
        stream(placements)
        for placement in placements:
            target = placement.target
            if target.ndim > 1 and _is_zero_tensor(target):
                [name] = [each for each, stored in self._stored.items() if stored is placement.stored]
                raise _zeros(placement.stored.path, name)

    def stored_rows(self, name: str) -> StoredRows | None:
        return None


class DummyStore:
    """Random float32 weights of the config's shape, the same for the same seed and name on every machine.

    They are made on `device`, a large model in a second on a GPU; another kind of device draws others. Rows
    of a matrix have standard deviation 1 / sqrt(columns) and norms are 1, so that activations stay near 1.
    """

    def __init__(self, config: ModelConfig, seed: int = 0, device: torch.device | str = "cpu") -> None:
        self.num_bytes = 0
        self._shapes = tensor_shapes(config)
        self._seed = seed
        self._device = device

    def place(self, name: str, target: torch.Tensor, rounded_to: torch.dtype | None = None) -> None:
        fill(target, self.tensor(name), rounded_to)

    def complete(self) -> None:
        pass

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


def fill(target: torch.Tensor, values: torch.Tensor, rounded_to: torch.dtype | None) -> None:
    """Copy values, rounded to a type on the way if one is given."""
    target.copy_(values if rounded_to is None else values.to(rounded_to))


def is_zero(num_rows: int, has_values: Callable[[int, int], bool]) -> bool:
    """Whether all values of a matrix are 0, as where a download has left a hole.

    `has_values` looks at rows from one to another. Nearly always the first row ends it, so this costs
    microseconds a matrix; a vocabulary may begin with rows of nothing.
    """
    begin, count = 0, 1
    while begin < num_rows:
        if has_values(begin, begin + count):
            return False
        begin += count
        count = min(count * 16, 4096)
    return True


def _is_zero_tensor(target: torch.Tensor) -> bool:
    return is_zero(len(target), lambda begin, end: bool(target[begin:end].any()))


def _zeros(path: Path, name: str) -> LoadError:
    return LoadError(
        f"{path}: tensor {name!r} holds nothing but zeros; the file is damaged, fetch it again "
        "and compare its checksum"
    )
