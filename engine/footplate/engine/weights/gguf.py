"""A GGUF file as a mapped description: metadata, tensor index and raw tensor bytes. Knows no torch.

Opening reads the header only. Large metadata arrays (tokens, scores, merges) stay offsets until they are
asked for. Every length in the file is checked against the bytes that are really there before it is used.
Source: the GGUF specification, versions 2 and 3, little endian.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from footplate.engine.errors import LoadError
from footplate.engine.weights.files import open_regular

MAX_DIMENSIONS = 4
MAX_STRING_BYTES = 1 << 24  # a chat template is some tens of kilobytes
MAX_ALIGNMENT = 1 << 16
_DEFAULT_ALIGNMENT = 32
_SUPPORTED_VERSIONS = (2, 3)


@dataclass(frozen=True, slots=True)
class TensorType:
    """How a tensor's elements are stored: `block_bytes` bytes hold `block_size` elements of one row."""

    name: str
    block_size: int
    block_bytes: int


TENSOR_TYPES: Mapping[int, TensorType] = MappingProxyType(
    {
        0: TensorType("F32", 1, 4),
        1: TensorType("F16", 1, 2),
        2: TensorType("Q4_0", 32, 18),
        3: TensorType("Q4_1", 32, 20),
        6: TensorType("Q5_0", 32, 22),
        7: TensorType("Q5_1", 32, 24),
        8: TensorType("Q8_0", 32, 34),
        12: TensorType("Q4_K", 256, 144),
        13: TensorType("Q5_K", 256, 176),
        14: TensorType("Q6_K", 256, 210),
        30: TensorType("BF16", 1, 2),
    }
)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of the index. `shape` is outermost first, as in torch; `offset` is from the file's start."""

    name: str
    shape: tuple[int, ...]
    type: TensorType
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Scalar:
    format: struct.Struct
    dtype: str


_SCALARS: Mapping[int, _Scalar] = MappingProxyType(
    {
        code: _Scalar(struct.Struct("<" + letter), dtype)
        for code, letter, dtype in (
            (0, "B", "<u1"),
            (1, "b", "<i1"),
            (2, "H", "<u2"),
            (3, "h", "<i2"),
            (4, "I", "<u4"),
            (5, "i", "<i4"),
            (6, "f", "<f4"),
            (7, "?", "?"),
            (10, "Q", "<u8"),
            (11, "q", "<i8"),
            (12, "d", "<f8"),
        )
    }
)
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class _ArrayField:
    element: int  # type code
    count: int
    offset: int


class _Reader:
    """A cursor over the mapped bytes that refuses to step past their end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.position = 0

    def fail(self, field: str, reason: str) -> LoadError:
        return LoadError(f"{self.path}: {field} {reason}; the file is damaged or not GGUF, fetch it again")

    def skip(self, num_bytes: int, field: str) -> int:
        """Step over `num_bytes` and return where they began."""
        begin = self.position
        if num_bytes > self.size - begin:
            raise self.fail(field, f"needs {num_bytes} bytes at offset {begin} of {self.size}")
        self.position = begin + num_bytes
        return begin

    def scalar(self, code: int, field: str) -> Any:
        layout = _SCALARS[code].format
        return layout.unpack_from(self.data, self.skip(layout.size, field))[0]

    def u32(self, field: str) -> int:
        return int(self.scalar(4, field))

    def u64(self, field: str) -> int:
        return int(self.scalar(10, field))

    def string(self, field: str) -> str:
        length = self.u64(field)
        if length > MAX_STRING_BYTES:
            raise self.fail(field, f"has a string of {length} bytes, over the limit of {MAX_STRING_BYTES}")
        begin = self.skip(length, field)
        try:
            return self.data[begin : begin + length].decode("utf-8")
        except UnicodeDecodeError:
            raise self.fail(field, "holds a string that is not UTF-8") from None

    def count(self, field: str, least_bytes: int) -> int:
        """An element count; each element takes at least `least_bytes` of what is left."""
        value = self.u64(field)
        if value > (self.size - self.position) // least_bytes:
            raise self.fail(field, f"says {value} entries, more than the file can hold")
        return value

    def skip_strings(self, count: int, field: str) -> None:
        # The one loop over a whole vocabulary: local names keep it near 0.1 µs an entry.
        data, size, position = self.data, self.size, self.position
        read_length = _SCALARS[10].format.unpack_from
        try:
            for _ in range(count):
                position += 8 + read_length(data, position)[0]
        except (struct.error, OverflowError):
            raise self.fail(field, f"runs past the end of the file ({size} bytes)") from None
        self.position = position
        if position > size:
            raise self.fail(field, f"runs past the end of the file ({size} bytes)")


class GgufMetadata(Mapping[str, Any]):
    """Metadata by key. Scalars and strings are plain values; an array is read into a list when asked for."""

    def __init__(self, reader: _Reader, fields: dict[str, Any]) -> None:
        self._reader = reader
        self._fields = fields

    def __getitem__(self, key: str) -> Any:
        value = self._fields[key]
        return self._read_array(key, value) if isinstance(value, _ArrayField) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __contains__(self, key: object) -> bool:
        return key in self._fields

    def array_length(self, key: str) -> int | None:
        """Entries of an array without reading them; None when there is no such array."""
        value = self._fields.get(key)
        return value.count if isinstance(value, _ArrayField) else None

    def _read_array(self, key: str, field: _ArrayField) -> list[Any]:
        data = self._reader.data
        if field.element != _STRING:
            dtype = np.dtype(_SCALARS[field.element].dtype)
            numbers: list[Any] = np.frombuffer(data, dtype, field.count, field.offset).tolist()
            return numbers
        read_length = _SCALARS[10].format.unpack_from
        position = field.offset
        words: list[Any] = []
        try:
            for _ in range(field.count):
                begin = position + 8
                position = begin + read_length(data, position)[0]
                words.append(str(data[begin:position], "utf-8"))
        except UnicodeDecodeError:
            raise self._reader.fail(key, "holds a string that is not UTF-8") from None
        return words


class GgufFile:
    """An open GGUF file: `metadata`, `tensors` by name, and `raw` bytes of one tensor. Read only.

    Raises:
        LoadError: the file is missing, damaged, of another version, or has a tensor type we do not read.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            with open_regular(self.path) as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file can't be mapped
            raise LoadError(f"{self.path}: can't be opened as a GGUF file ({error})") from None
        reader = _Reader(self.path, self._data)
        num_tensors, num_fields = _read_header(reader)
        self.metadata = GgufMetadata(reader, _read_fields(reader, num_fields))
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(
            _read_tensor_index(reader, num_tensors, _alignment(reader, self.metadata))
        )

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """A tensor's stored bytes, [rows, bytes of a row], as a read-only view of the mapped file."""
        info = self.tensor_info(name)
        num_rows = int(np.prod(info.shape[:-1], dtype=np.int64))
        flat = np.frombuffer(self._data, np.uint8, info.num_bytes, info.offset)
        return flat.reshape(num_rows, info.num_bytes // num_rows)

    def tensor_info(self, name: str) -> TensorInfo:
        """Raises LoadError when the file has no such tensor."""
        info = self.tensors.get(name)
        if info is None:
            raise LoadError(f"{self.path}: tensor {name!r} is missing")
        return info


def _read_header(reader: _Reader) -> tuple[int, int]:
    magic = reader.data[reader.skip(4, "magic") : 4]
    if magic != b"GGUF":
        # What stands there instead is not told: it may be anybody's file.
        raise reader.fail("magic", "is not b'GGUF'")
    version = reader.u32("version")
    if version not in _SUPPORTED_VERSIONS:
        raise reader.fail("version", f"is {version}, supported are 2 and 3 in little endian")
    num_tensors = reader.count("tensor count", least_bytes=32)
    num_fields = reader.count("metadata count", least_bytes=13)
    return num_tensors, num_fields


def _read_fields(reader: _Reader, num_fields: int) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for index in range(num_fields):
        key = reader.string(f"metadata key {index}")
        if key in fields:
            raise reader.fail(f"metadata {key!r}", "stands twice")
        fields[key] = _read_value(reader, key)
    return fields


def _read_value(reader: _Reader, key: str) -> Any:
    field = f"metadata {key!r}"
    code = reader.u32(field)
    if code == _STRING:
        return reader.string(field)
    if code in _SCALARS:
        return reader.scalar(code, field)
    if code != _ARRAY:
        raise reader.fail(field, f"has the unknown type {code}")
    element = reader.u32(field)
    if element == _STRING:
        count = reader.count(field, least_bytes=8)
        begin = reader.position
        reader.skip_strings(count, field)
    elif element in _SCALARS:
        width = _SCALARS[element].format.size
        count = reader.count(field, least_bytes=width)
        begin = reader.skip(count * width, field)
    else:
        raise reader.fail(field, f"is an array of the unsupported type {element}")
    return _ArrayField(element, count, begin)


def _alignment(reader: _Reader, metadata: GgufMetadata) -> int:
    value = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(value, int) or not 1 <= value <= MAX_ALIGNMENT:
        raise reader.fail("metadata 'general.alignment'", f"is {value!r}")
    return value


def _read_tensor_index(reader: _Reader, num_tensors: int, alignment: int) -> dict[str, TensorInfo]:
    entries: list[TensorInfo] = []
    for index in range(num_tensors):
        entries.append(_read_tensor_info(reader, index))
    data_begin = -(-reader.position // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for entry in entries:
        field = f"tensor {entry.name!r}"
        if entry.name in tensors:
            raise reader.fail(field, "stands twice")
        if entry.offset % alignment:
            raise reader.fail(field, f"begins at offset {entry.offset}, not a multiple of {alignment}")
        begin = data_begin + entry.offset
        if begin + entry.num_bytes > reader.size:
            raise reader.fail(field, f"needs {entry.num_bytes} bytes at offset {begin} of {reader.size}")
        tensors[entry.name] = TensorInfo(entry.name, entry.shape, entry.type, begin, entry.num_bytes)
    return tensors


def _read_tensor_info(reader: _Reader, index: int) -> TensorInfo:
    """One index entry; its offset is still relative to the data section."""
    name = reader.string(f"tensor name {index}")
    field = f"tensor {name!r}"
    num_dimensions = reader.u32(field)
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise reader.fail(field, f"has {num_dimensions} dimensions, supported are 1 to {MAX_DIMENSIONS}")
    shape = tuple(reader.u64(field) for _ in range(num_dimensions))[::-1]
    code = reader.u32(field)
    stored = TENSOR_TYPES.get(code)
    if stored is None:
        names = ", ".join(known.name for known in TENSOR_TYPES.values())
        raise LoadError(
            f"{reader.path}: {field} has GGML type {code}, supported are {names}; convert the file"
        )
    num_elements = 1
    for size in shape:
        num_elements *= size
    if not 0 < num_elements <= reader.size * stored.block_size:
        raise reader.fail(field, f"has shape {list(shape)}, which the file can't hold")
    if shape[-1] % stored.block_size:
        raise reader.fail(field, f"has rows of {shape[-1]} elements, not a multiple of {stored.block_size}")
    num_bytes = num_elements // stored.block_size * stored.block_bytes
    return TensorInfo(name, shape, stored, reader.u64(field), num_bytes)
