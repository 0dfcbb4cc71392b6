"""The numbers inside a GGUF tensor: integer codes with scales per group, or plain floats. numpy only.

A quantised weight is `scale * (code - zero) + minimum`, where scale and minimum belong to a group of 16 or 32
neighbours of a row. Every type here is that formula, so one repacker and one dequantiser serve all of them.
Source: the block layouts of ggml.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from footplate.engine.errors import LoadError
from footplate.engine.weights.gguf import GgufFile

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
_LOW, _FOUR = np.uint8(0x0F), np.uint8(4)


@dataclass(frozen=True, slots=True)
class GroupedCodes:
    """Rows of a quantised matrix: weight = scale * (code - zero) + minimum, the last two of group k // group.

    Codes are unsigned below 2 ** bits, or int8 with bits == 8. Arithmetic is float32 in the written order.
    """

    codes: npt.NDArray[Any]  # uint8 or int8 [rows, columns]
    scales: Floats  # [rows, columns / group]
    minimums: Floats | None  # as scales
    zero: int
    bits: int
    group: int

    def dequantise(self) -> Floats:
        rows, columns = self.codes.shape
        codes = self.codes.reshape(rows, columns // self.group, self.group).astype(np.float32)
        if self.zero:
            codes -= np.float32(self.zero)
        codes *= self.scales[:, :, None]
        if self.minimums is not None:
            codes += self.minimums[:, :, None]
        return codes.reshape(rows, columns)


@dataclass(frozen=True, slots=True)
class StoredRows:
    """A quantised matrix as its file holds it: rows of blocks of one GGUF type."""

    type_name: str
    raw: Bytes  # [rows, bytes of a row]


def grouped_codes(type_name: str, raw: Bytes) -> GroupedCodes:
    """Split stored rows [rows, bytes of a row] of a quantised type into codes and scales.

    Raises:
        LoadError: the type is a float type or unknown.
    """
    split = _SPLITS.get(type_name)
    if split is None:
        raise LoadError(f"tensor type {type_name} holds no integer codes")
    block_bytes, function = split
    return function(raw.reshape(raw.shape[0], -1, block_bytes))


def is_quantised(type_name: str) -> bool:
    """Whether `grouped_codes` reads this type."""
    return type_name in _SPLITS


def dequantise(type_name: str, raw: Bytes) -> Floats:
    """Stored rows as float32 [rows, columns]."""
    if type_name == "F32":
        return raw.view("<f4").astype(np.float32)
    if type_name == "F16":
        return raw.view("<f2").astype(np.float32)
    if type_name == "BF16":
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    return grouped_codes(type_name, raw).dequantise()


def read_tensor(file: GgufFile, name: str) -> Floats:
    """A tensor of the file as float32 in its own shape."""
    info = file.tensor_info(name)
    return dequantise(info.type.name, file.raw(name)).reshape(info.shape)


def half_split_rows(rows: npt.NDArray[Any], num_heads: int) -> npt.NDArray[Any]:
    """Undo the row order of `llama` GGUF files, which interleave rotary pairs (rows 2i, 2i + 1 of a head).

    The engine rotates halves (row i and i + D/2), as Hugging Face does. Works on dequantised and on stored
    rows alike, since only whole rows move.
    """
    num_rows, width = rows.shape
    pairs = rows.reshape(num_heads, num_rows // num_heads // 2, 2, width)
    return np.ascontiguousarray(pairs.transpose(0, 2, 1, 3)).reshape(num_rows, width)


def _halves(blocks: Bytes, begin: int) -> Floats:
    """One float16 of each block, [rows, blocks]."""
    return np.ascontiguousarray(blocks[:, :, begin : begin + 2]).view("<f2")[:, :, 0].astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """Low nibbles, then high ones, along the last axis."""
    return np.concatenate([packed & _LOW, packed >> _FOUR], axis=-1)


def _fifth_bits(packed: Bytes) -> Bytes:
    """32 bits of each block as 0 or 16."""
    return np.unpackbits(packed, axis=-1, bitorder="little") << _FOUR


def _rows(codes: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return codes.reshape(codes.shape[0], -1)


def _q4_0(blocks: Bytes) -> GroupedCodes:
    return GroupedCodes(_rows(_nibbles(blocks[:, :, 2:])), _halves(blocks, 0), None, 8, 4, 32)


def _q4_1(blocks: Bytes) -> GroupedCodes:
    return GroupedCodes(_rows(_nibbles(blocks[:, :, 4:])), _halves(blocks, 0), _halves(blocks, 2), 0, 4, 32)


def _q5_0(blocks: Bytes) -> GroupedCodes:
    codes = _nibbles(blocks[:, :, 6:]) | _fifth_bits(blocks[:, :, 2:6])
    return GroupedCodes(_rows(codes), _halves(blocks, 0), None, 16, 5, 32)


def _q5_1(blocks: Bytes) -> GroupedCodes:
    codes = _nibbles(blocks[:, :, 8:]) | _fifth_bits(blocks[:, :, 4:8])
    return GroupedCodes(_rows(codes), _halves(blocks, 0), _halves(blocks, 2), 0, 5, 32)


def _q8_0(blocks: Bytes) -> GroupedCodes:
    codes = np.ascontiguousarray(blocks[:, :, 2:]).view(np.int8)
    return GroupedCodes(_rows(codes), _halves(blocks, 0), None, 0, 8, 32)


def _k_scales(blocks: Bytes) -> tuple[Floats, Floats]:
    """Scales and minimums of the 8 groups of Q4_K and Q5_K blocks, [rows, groups]: 6 bits each."""
    packed = blocks[:, :, 4:16]
    low, middle, high = packed[:, :, 0:4], packed[:, :, 4:8], packed[:, :, 8:12]
    scales = np.concatenate([low & 63, (high & 0xF) | ((low >> 6) << 4)], axis=-1)
    minimums = np.concatenate([middle & 63, (high >> 4) | ((middle >> 6) << 4)], axis=-1)
    wide_scales = _halves(blocks, 0)[:, :, None] * scales.astype(np.float32)
    wide_minimums = -(_halves(blocks, 2)[:, :, None] * minimums.astype(np.float32))
    return _rows(wide_scales), _rows(wide_minimums)


def _k_nibbles(packed: Bytes) -> Bytes:
    """128 bytes as 8 groups of 32 codes: each 32 bytes hold one group low and the next high."""
    rows, blocks, _ = packed.shape
    quarters = packed.reshape(rows, blocks, 4, 1, 32)
    return np.concatenate([quarters & 0xF, quarters >> 4], axis=3).reshape(rows, blocks, 8, 32)


def _q4_k(blocks: Bytes) -> GroupedCodes:
    scales, minimums = _k_scales(blocks)
    return GroupedCodes(_rows(_k_nibbles(blocks[:, :, 16:])), scales, minimums, 0, 4, 32)


def _q5_k(blocks: Bytes) -> GroupedCodes:
    scales, minimums = _k_scales(blocks)
    # Bit g of byte j is the fifth bit of code j in group g.
    high = blocks[:, :, None, 16:48] >> np.arange(8, dtype=np.uint8)[None, None, :, None]
    codes = _k_nibbles(blocks[:, :, 48:]) | ((high & 1) << 4)
    return GroupedCodes(_rows(codes), scales, minimums, 0, 5, 32)


def _q6_k(blocks: Bytes) -> GroupedCodes:
    rows, count, _ = blocks.shape
    # Two halves of 128 codes; in each, 64 bytes of nibbles (low ones first) and 32 bytes of four bit pairs.
    low = blocks[:, :, :128].reshape(rows, count, 2, 1, 64)
    low = np.concatenate([low & 0xF, low >> 4], axis=3).reshape(rows, count, 2, 4, 32)
    pairs = blocks[:, :, 128:192].reshape(rows, count, 2, 1, 32)
    high = (pairs >> np.arange(0, 8, 2, dtype=np.uint8)[None, None, None, :, None]) & 3
    small = np.ascontiguousarray(blocks[:, :, 192:208]).view(np.int8).astype(np.float32)
    scales = _rows(_halves(blocks, 208)[:, :, None] * small)
    return GroupedCodes(_rows(low | (high << 4)), scales, None, 32, 6, 16)


_SPLITS: Mapping[str, tuple[int, Callable[[Bytes], GroupedCodes]]] = MappingProxyType(
    {
        "Q4_0": (18, _q4_0),
        "Q4_1": (20, _q4_1),
        "Q5_0": (22, _q5_0),
        "Q5_1": (24, _q5_1),
        "Q8_0": (34, _q8_0),
        "Q4_K": (144, _q4_k),
        "Q5_K": (176, _q5_k),
        "Q6_K": (210, _q6_k),
    }
)
