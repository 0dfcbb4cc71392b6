"""Whether a source can be a model, by its headers: names, shapes and types of all tensors. Knows no torch.

A source that passes may still hold damaged weights; that shows when they are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from footplate.engine.errors import LoadError
from footplate.engine.weights.gguf import GgufFile
from footplate.engine.weights.model_config import ModelConfig, config_from_gguf, config_from_json
from footplate.engine.weights.safetensors import StoredTensor, read_folder
from footplate.engine.weights.source import ModelSource
from footplate.engine.weights.tensor_names import gguf_names, hf_names, tensor_shapes

FLOAT_TYPES = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class SourceFacts:
    """What headers tell. `stored_bytes`: of all tensors as they are stored; 0 where nothing is."""

    config: ModelConfig
    stored_bytes: int


def inspect_source(source: ModelSource) -> SourceFacts:
    """Read a source's headers and hold them against its configuration.

    Raises:
        LoadError: it can't be loaded; the message names the file, the key or the tensor.
    """
    if source.kind == "gguf":
        file = GgufFile(source.path)
        config = config_from_gguf(file)
        names = checked_gguf(file, config)
        return SourceFacts(config, sum(file.raw(name).nbytes for name in names.values()))
    if source.kind == "hf":
        config = config_from_json(source.path / "config.json")
        names, stored = checked_folder(source.path, config)
        return SourceFacts(config, sum(stored[name].num_bytes for name in names.values()))
    return SourceFacts(config_from_json(source.path), 0)


def checked_gguf(file: GgufFile, config: ModelConfig) -> dict[str, str]:
    """The file's name of each tensor, by the engine's. Raises LoadError unless it holds exactly those."""
    names = gguf_names(config)
    found = {name: info.shape for name, info in file.tensors.items() if name != "rope_freqs.weight"}
    check_tensors(file.path, names, tensor_shapes(config), found)
    return names


def checked_folder(folder: Path, config: ModelConfig) -> tuple[dict[str, str], dict[str, StoredTensor]]:
    """The files' name of each tensor by the engine's, and where each one lies.

    Raises:
        LoadError: as `checked_gguf`; also a file that is missing, damaged or outside the folder, and a tensor
            of a type that is no float.
    """
    names, stored = hf_names(config), read_folder(folder)
    shapes = {name: tensor.shape for name, tensor in stored.items()}
    check_tensors(folder, names, tensor_shapes(config), _without_derived(shapes, config))
    for name in names.values():
        if stored[name].dtype not in FLOAT_TYPES:
            raise LoadError(
                f"{stored[name].path}: tensor {name!r} is {stored[name].dtype}; F32, F16 or BF16 is needed"
            )
    return names, stored


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


def _without_derived(found: Mapping[str, tuple[int, ...]], config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Drop what older exports write beside the weights: rotary tables, and the copy of a tied head."""
    derived = {name for name in found if name.endswith("rotary_emb.inv_freq")}
    if config.tied_embeddings:
        derived.add("lm_head.weight")
    return {name: shape for name, shape in found.items() if name not in derived}
