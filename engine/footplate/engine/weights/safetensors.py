"""Where the tensors of a Hugging Face folder lie: headers of safetensors files, and the index of shards.

Opening reads headers only and knows no torch. What a header says is checked against the file before anything
is made of it: sizes, that the tensors' bytes are there, do not overlap and leave nothing out, and that no
name stands twice.
Source: the format's description at https://github.com/huggingface/safetensors (little endian, version 0).
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from footplate.engine.errors import LoadError
from footplate.engine.weights.files import open_regular, read_json_object

# A header takes about 120 bytes a tensor. The format allows more; so much of it is no model but an attack.
MAX_HEADER_BYTES = 16 << 20
MAX_INDEX_BYTES = 64 << 20
MAX_DIMENSIONS = 8

ELEMENT_BYTES: Mapping[str, int] = MappingProxyType(
    {
        "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
        "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class FileState:
    """What tells that a file was not changed or replaced since its header was read."""

    inode: int
    size: int
    modified_ns: int

    @classmethod
    def of(cls, descriptor: int) -> FileState:
        found = os.fstat(descriptor)
        return cls(found.st_ino, found.st_size, found.st_mtime_ns)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file, row-major: `num_bytes` from `begin` on."""

    path: Path
    state: FileState
    dtype: str  # a key of ELEMENT_BYTES
    shape: tuple[int, ...]
    begin: int
    num_bytes: int


def read_folder(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of `model.safetensors`, or of the shards that the folder's index file lists, by name.

    Raises:
        LoadError: a file is missing or damaged, a name stands twice, a shard lies outside the folder, or
            index and shards disagree.
    """
    index_path = folder / "model.safetensors.index.json"
    if not index_path.is_file():
        return read_header(folder / "model.safetensors")
    index = _read_index(index_path)
    found: dict[str, StoredTensor] = {}
    for shard in sorted(set(index.values())):
        for name, stored in read_header(folder / shard).items():
            if name in found:
                raise LoadError(f"{folder}: tensor {name!r} stands in two shards")
            found[name] = stored
    for name, shard in index.items():
        if name not in found or found[name].path.name != shard:
            raise LoadError(f"{index_path}: tensor {name!r} is not in {shard}, where the index has it")
    if left := sorted(set(found) - set(index)):
        raise LoadError(f"{index_path}: tensor {left[0]!r} of {found[left[0]].path.name} is not listed")
    return found


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file, by name.

    Raises:
        LoadError: the file is missing, or its header is no safe description of its bytes.
    """
    try:
        with open_regular(path) as file:
            state = FileState.of(file.fileno())
            start = file.read(8)
            if len(start) < 8:
                raise LoadError(f"{path}: {len(start)} bytes are no safetensors file")
            (header_bytes,) = struct.unpack("<Q", start)
            if header_bytes > min(MAX_HEADER_BYTES, state.size - 8):
                raise LoadError(
                    f"{path}: a header of {header_bytes} bytes is asked for; the file has {state.size}, and "
                    f"{MAX_HEADER_BYTES} are the limit"
                )
            text = file.read(header_bytes)
            if len(text) < header_bytes:
                raise LoadError(f"{path}: its header is cut short")
    except OSError as error:
        raise LoadError(f"{path}: can't be read ({error.strerror})") from None
    entries = _parse(path, text)
    _check_metadata(path, entries.pop("__metadata__", {}))
    data = 8 + header_bytes
    tensors = {name: _tensor(path, state, name, entry, data) for name, entry in entries.items()}
    _check_cover(path, tensors, data, state.size)
    return tensors


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    try:
        if not text.startswith(b"{"):
            raise ValueError("it is no JSON object")
        entries = json.loads(text, object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise LoadError(f"{path}: the header can't be read ({error or type(error).__name__})") from None
    if not isinstance(entries, dict):
        raise LoadError(f"{path}: the header is no JSON object")
    return entries


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{twice[:80]!r} stands twice")
    return made


def _check_metadata(path: Path, metadata: Any) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise LoadError(f"{path}: __metadata__ must map texts to texts")


def _tensor(path: Path, state: FileState, name: str, entry: Any, data: int) -> StoredTensor:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise LoadError(f"{path}: tensor {name!r} needs dtype, shape and data_offsets, and nothing else")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ELEMENT_BYTES:
        raise LoadError(f"{path}: tensor {name!r} has the unknown type {str(dtype)[:40]!r}")
    if not _are_counts(shape) or len(shape) > MAX_DIMENSIONS:
        raise LoadError(f"{path}: tensor {name!r} has no shape of at most {MAX_DIMENSIONS} counts")
    if not _are_counts(offsets) or len(offsets) != 2:
        raise LoadError(f"{path}: tensor {name!r} has no two data_offsets")
    begin, end = offsets
    num_bytes = math.prod(shape) * ELEMENT_BYTES[dtype]
    if end - begin != num_bytes:
        raise LoadError(
            f"{path}: tensor {name!r} of shape {shape} and type {dtype} takes {num_bytes} bytes, "
            f"data_offsets are {begin} to {end}"
        )
    return StoredTensor(path, state, dtype, tuple(shape), data + begin, num_bytes)


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 60 for item in value)


def _check_cover(path: Path, tensors: Mapping[str, StoredTensor], data: int, size: int) -> None:
    """Each byte after the header is one tensor's."""
    reached = data
    for name, stored in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].num_bytes)):
        if stored.begin < reached:
            raise LoadError(f"{path}: tensor {name!r} overlaps another one")
        if stored.begin > reached:
            raise LoadError(f"{path}: {stored.begin - reached} bytes before tensor {name!r} are nobody's")
        reached += stored.num_bytes
        if reached > size:
            raise LoadError(
                f"{path}: tensor {name!r} ends at byte {reached}, the file at {size}; it is cut short"
            )
    if reached < size:
        raise LoadError(f"{path}: {size - reached} bytes after the last tensor are nobody's")


def _read_index(path: Path) -> dict[str, str]:
    shards = read_json_object(path, MAX_INDEX_BYTES, _without_repeats).get("weight_map")
    if not isinstance(shards, dict) or not shards or not _are_names(shards.values()):
        raise LoadError(f"{path}: weight_map is empty, or names a shard outside its folder")
    return shards


def _are_names(names: Iterable[Any]) -> bool:
    """Whether all are names of files in the folder itself."""
    return all(isinstance(n, str) and n not in ("", ".", "..") and Path(n).name == n for n in names)
