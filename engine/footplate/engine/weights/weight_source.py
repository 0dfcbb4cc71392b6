"""What a model builder reads weights from: one interface over all kinds of files."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

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

logger = logging.getLogger(__name__)


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


@dataclass(frozen=True, slots=True)
class LoadTime:
    """How long weights took from the opening of their files to the last byte in its place."""

    num_bytes: int  # as they are stored
    seconds: float

    @property
    def gb_s(self) -> float:
        return self.num_bytes / self.seconds / 1e9


class WeightSource:
    """Weights by the engine's names (see `tensor_names`). Used once, by one builder; `finish` ends it.

    Matrices come out in the type and on the device asked for. A tied head is the embedding's own memory.
    Dense tensors come out as memory that is filled by `complete`, which `finish` calls: nothing of them may
    be read or copied before.
    """

    def __init__(self, config: ModelConfig, store: TensorStore) -> None:
        self.config = config
        self.load_time: LoadTime | None = None  # after `finish`; None where nothing was read
        self._start = time.perf_counter()
        self._store = store
        self._shapes = tensor_shapes(config)
        self._unused = set(self._shapes)
        self._embed: dict[tuple[torch.dtype, str], torch.Tensor] = {}
        self._packed_embed: PackedMatrix | None = None

    def tensor(
        self, name: str, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        """One tensor, for norms and tests. The caller may write to it once it is filled."""
        self._use(name)
        target = torch.empty(self._shapes[name], dtype=dtype, device=device)
        self._store.place(name, target)
        return target

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
        for name in names:
            self._use(name)
        if names == ["embed"]:
            shared = self._dense_embedding(dtype, device)
            made = DenseLinear(shared)
            if made.weight is shared:
                return made
        else:
            rows = sum(self._shapes[name][0] for name in names)
            made = DenseLinear(torch.empty((rows, self._shapes[names[0]][1]), dtype=dtype, device=device))
        self._fill(names, made)
        return made

    def _fill(self, names: Sequence[str], made: DenseLinear) -> None:
        """Have the stacked matrices written to the memory that is multiplied with.

        Where a type is emulated that is another one, whose values are rounded to the type.
        """
        held, begin = made.weight, 0
        rounded_to = made.dtype if held.dtype is not made.dtype else None
        for name in names:
            num_rows = self._shapes[name][0]
            self._store.place(name, held[begin : begin + num_rows], rounded_to)
            begin += num_rows

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

    def complete(self) -> None:
        """Fill all memory that was handed out.

        Raises:
            LoadError: a file is damaged, or was changed meanwhile.
        """
        self._store.complete()

    def finish(self) -> None:
        """Fill all memory that was handed out, and end.

        Raises:
            LoadError: as `complete`; or a tensor was never used: the model built is not the model stored.
        """
        if self._unused:
            raise LoadError(
                f"weights: {len(self._unused)} tensors were never used, such as {min(self._unused)!r}"
            )
        self.complete()
        seconds = time.perf_counter() - self._start
        if not self._store.num_bytes:
            return
        self.load_time = LoadTime(self._store.num_bytes, seconds)
        size_gb = self.load_time.num_bytes / 1e9
        logger.info("weights of %.2f GB in %.2f s: %.2f GB/s", size_gb, seconds, self.load_time.gb_s)

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
        if name not in self._shapes:
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
