"""What a model builder reads weights from: one interface over all kinds of files."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from footplate.engine.errors import LoadError
from footplate.engine.kernels.cpu.library import load_library
from footplate.engine.kernels.linear.dense import DenseEmbedding, DenseLinear
from footplate.engine.kernels.linear.packed import PackedEmbedding, PackedLinear, PackedMatrix
from footplate.engine.kernels.ops import Embedding, Linear
from footplate.engine.weights.gguf import GgufFile
from footplate.engine.weights.model_config import ModelConfig, config_from_gguf, config_from_json
from footplate.engine.weights.source import ModelSource
from footplate.engine.weights.tensor_names import tensor_shapes
from footplate.engine.weights.tensor_stores import DummyStore, GgufStore, SafetensorsStore, TensorStore


def open_model(
    source: ModelSource, seed: int = 0, device: torch.device | str = "cpu"
) -> tuple[ModelConfig, WeightSource]:
    """Read a source's config and open its weights. `seed` and `device` are for dummy weights.

    Raises:
        LoadError: the files can't be used; names the tensor, key or kind.
    """
    if source.kind == "gguf":
        file = GgufFile(source.path)
        config = config_from_gguf(file)
        return config, WeightSource(config, GgufStore(file, config))
    if source.kind == "hf":
        config = config_from_json(source.path / "config.json")
        return config, WeightSource(config, SafetensorsStore(source.path, config))
    config = config_from_json(source.path)
    return config, WeightSource(config, DummyStore(config, seed, device))


class WeightSource:
    """Weights by the engine's names (see `tensor_names`). Used once, by one builder; `finish` ends it.

    Matrices come out in the type and on the device asked for. A tied head is the embedding's own memory.
    """

    def __init__(self, config: ModelConfig, store: TensorStore) -> None:
        self.config = config
        self._store = store
        self._unused = set(tensor_shapes(config))
        self._embed: dict[tuple[torch.dtype, str], torch.Tensor] = {}
        self._packed_embed: PackedMatrix | None = None

    def tensor(
        self, name: str, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        """One tensor, for norms and tests. The caller may write to it."""
        self._use(name)
        value = self._store.tensor(name)
        return torch.empty(value.shape, dtype=dtype, device=device).copy_(value)

    def linear(
        self,
        names: Sequence[str],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        packed: bool = False,
    ) -> Linear:
        """The named matrices stacked along their rows as one Linear, such as q, k, v of a layer.

        `packed` keeps quantised matrices as integer codes (CPU, float32 rows); a stack with a matrix stored
        in a float type comes out dense. `["head"]` of a tied model is the embedding.
        """
        names = self._resolve(names)
        matrix = self._pack(names) if packed else None
        if matrix is not None:
            return PackedLinear(matrix)
        if names == ["embed"]:
            return DenseLinear(self._dense_embedding(dtype, device))
        for name in names:
            self._use(name)
        rows = sum(tensor_shapes(self.config)[name][0] for name in names)
        weight = torch.empty((rows, tensor_shapes(self.config)[names[0]][1]), dtype=dtype, device=device)
        begin = 0
        for name in names:
            part = self._store.tensor(name)
            weight[begin : begin + part.shape[0]].copy_(part)
            begin += part.shape[0]
        return DenseLinear(weight)

    def embedding(
        self,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        packed: bool = False,
    ) -> Embedding:
        """The token table. `packed` as for `linear`."""
        matrix = self._pack(["embed"]) if packed else None
        return (
            DenseEmbedding(self._dense_embedding(dtype, device))
            if matrix is None
            else PackedEmbedding(matrix)
        )

    def finish(self) -> None:
        """Raise LoadError when a tensor was never used: the model built is not the model stored."""
        if self._unused:
            raise LoadError(
                f"weights: {len(self._unused)} tensors were never used, such as {min(self._unused)!r}"
            )

    def _pack(self, names: list[str]) -> PackedMatrix | None:
        """The named matrices packed; None when one of them is stored in a float type."""
        if names == ["embed"] and self._packed_embed is not None:
            return self._packed_embed
        stored = [self._store.stored_rows(name) for name in names]
        segments = [rows for rows in stored if rows is not None]
        if len(segments) < len(names):
            return None
        for name in names:
            self._use(name)
        matrix = PackedMatrix(load_library(), segments)
        if names == ["embed"]:
            self._packed_embed = matrix
        return matrix

    def _use(self, name: str) -> None:
        if name not in tensor_shapes(self.config):
            raise LoadError(f"weights: this architecture has no tensor {name!r}")
        self._unused.discard(name)

    def _resolve(self, names: Sequence[str]) -> list[str]:
        if list(names) == ["head"] and self.config.tied_embeddings:
            return ["embed"]
        return list(names)

    def _dense_embedding(self, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
        key = (dtype, str(device))
        if key not in self._embed:
            self._embed[key] = self.tensor("embed", dtype, device)
        return self._embed[key]
