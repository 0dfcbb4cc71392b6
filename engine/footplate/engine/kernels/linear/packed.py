"""Weights that stay integer codes: packed from GGUF rows at load, multiplied by native CPU kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from footplate.engine.kernels.cpu.library import MAX_SEGMENTS, Matrix
from footplate.engine.weights.gguf_tensors import GroupedCodes, StoredRows, grouped_codes

PROLOGUE_NONE, PROLOGUE_RMS_NORM = 0, 1
PROLOGUE_ACTIVATIONS = {"silu": 2, "gelu_tanh": 3}
_KINDS = {4: 0, 5: 1, 6: 2, 8: 3}  # by bits of a code; matrix.h
_WIDE_SCALES = ("Q4_K", "Q5_K", "Q6_K")  # products of two factors, which float16 would round
_ROWS_AT_ONCE = 4096  # bounds what a big table needs beside its packed form
_SCRATCH_ROWS = 8  # outputs up to this many rows are reused, larger ones are new


class PackedMatrix:
    """One or several quantised matrices [N_i, K] stacked along rows, in the layout of cpu/matrix.h.

    Weights are exactly those of the file: codes are integers, and scales are float16 where the file's are and
    float32 otherwise.
    """

    def __init__(self, library: ctypes.CDLL, segments: Sequence[StoredRows]) -> None:
        if not 1 <= len(segments) <= MAX_SEGMENTS:
            raise ValueError(f"{len(segments)} segments given, 1 to {MAX_SEGMENTS} can be stacked")
        self.library = library
        self.struct = Matrix()
        self.pointer = ctypes.pointer(self.struct)
        self._memory: list[npt.NDArray[np.uint8]] = []
        for index, stored in enumerate(segments):
            self._pack(index, stored)
        self.struct.num_segments = len(segments)
        self.in_features = int(self.struct.in_features)
        self.out_features = int(self.struct.out_features)

    @property
    def num_bytes(self) -> int:
        return sum(memory.nbytes for memory in self._memory)

    def _pack(self, index: int, stored: StoredRows) -> None:
        num_rows = stored.raw.shape[0]
        first = grouped_codes(stored.type_name, stored.raw[:1])
        num_columns, kind = first.codes.shape[1], _KINDS[first.bits]
        if index and num_columns != self.struct.in_features:
            raise ValueError(f"rows of {num_columns} can't be stacked on rows of {self.struct.in_features}")
        tile_rows = int(self.library.fp_tile_rows())
        is_wide = stored.type_name in _WIDE_SCALES
        num_tiles = -(-num_rows // tile_rows)
        padded = num_tiles * tile_rows
        code_width = num_columns // (2 if first.bits == 4 else 1)
        scale_width = num_columns // first.group * (4 if is_wide else 2)
        codes = self._allocate(padded * code_width)
        scales = self._allocate(padded * scale_width)
        minimums = self._allocate(padded * scale_width) if first.minimums is not None else None
        for begin in range(0, num_rows, _ROWS_AT_ONCE):
            part = grouped_codes(stored.type_name, stored.raw[begin : begin + _ROWS_AT_ONCE])
            self._pack_codes(part, kind, codes.ctypes.data + begin * code_width)
            self._pack_scales(part.scales, is_wide, scales.ctypes.data + begin * scale_width)
            if minimums is not None and part.minimums is not None:
                self._pack_scales(part.minimums, is_wide, minimums.ctypes.data + begin * scale_width)
        segment = self.struct.segments[index]
        segment.codes, segment.scales = codes.ctypes.data, scales.ctypes.data
        segment.minimums = None if minimums is None else minimums.ctypes.data
        segment.num_rows, segment.num_tiles = num_rows, num_tiles
        segment.kind, segment.has_wide_scales = kind, int(is_wide)
        self.struct.in_features = num_columns
        self.struct.out_features += num_rows
        self.struct.num_tiles += num_tiles

    def _allocate(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Memory on a cache line's start."""
        memory = np.empty(num_bytes + 64, np.uint8)
        skip = -memory.ctypes.data % 64
        self._memory.append(memory[skip : skip + num_bytes])
        return self._memory[-1]

    def _pack_codes(self, part: GroupedCodes, kind: int, address: int) -> None:
        codes = np.ascontiguousarray(part.codes)
        self.library.fp_pack_codes(codes.ctypes.data, *codes.shape, kind, address)

    def _pack_scales(self, values: npt.NDArray[np.float32], is_wide: bool, address: int) -> None:
        values = np.ascontiguousarray(values)
        self.library.fp_pack_scales(values.ctypes.data, *values.shape, int(is_wide), address)


class PackedLinear:
    """A packed matrix that multiplies rows, which are rounded to int8 per row and group of 32 on the way in.

    A row's result depends on that row alone: the same bits in any batch and with any number of threads.
    Outputs of up to 8 rows are scratch, valid until this object's next call.
    """

    def __init__(self, matrix: PackedMatrix) -> None:
        self.matrix = matrix
        self.out_features, self.in_features = matrix.out_features, matrix.in_features
        self._multiply = matrix.library.fp_linear
        self._pointer = matrix.pointer
        self._scratch: dict[int, torch.Tensor] = {}

    def __call__(self, x: torch.Tensor, add_to: torch.Tensor | None = None) -> torch.Tensor:
        """[T, K] -> [T, N], or added in place to `add_to`. Tensors are contiguous float32."""
        return self._run(x, self.in_features, PROLOGUE_NONE, 0, 0.0, add_to)

    def normed(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """The product of rms_norm(x): one call for a norm and the matrix behind it."""
        return self._run(x, self.in_features, PROLOGUE_RMS_NORM, weight.data_ptr(), eps, None)

    def gated(self, gate_up: torch.Tensor, kind: str, add_to: torch.Tensor | None = None) -> torch.Tensor:
        """The product of act(gate) * up for gate_up [T, 2 K]: a gate and the matrix behind it in one call."""
        return self._run(gate_up, 2 * self.in_features, PROLOGUE_ACTIVATIONS[kind], 0, 0.0, add_to)

    def _run(
        self, x: torch.Tensor, width: int, prologue: int, norm: int, eps: float, add_to: torch.Tensor | None
    ) -> torch.Tensor:
        num_rows, columns = x.shape
        assert columns == width and x.is_contiguous() and x.dtype is torch.float32
        out = self._output(num_rows) if add_to is None else add_to
        status = self._multiply(
            self._pointer, x.data_ptr(), num_rows, prologue, norm, eps, out.data_ptr(), add_to is not None
        )
        if status:
            raise MemoryError(f"packed linear: no memory for {num_rows} rows (status {status})")
        return out

    def _output(self, num_rows: int) -> torch.Tensor:
        if num_rows > _SCRATCH_ROWS:
            return torch.empty((num_rows, self.out_features))
        out = self._scratch.get(num_rows)
        if out is None:
            out = self._scratch[num_rows] = torch.empty((num_rows, self.out_features))
        return out


class PackedEmbedding:
    """A packed token table; only rows asked for become float32. May share its matrix with a tied head."""

    def __init__(self, matrix: PackedMatrix) -> None:
        self.matrix = matrix

    def __call__(self, token_ids: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        """Rows of the table times `factor`, [T] integer -> [T, K] float32.

        Raises:
            IndexError: an id is outside the table.
        """
        ids = token_ids.to(torch.int64).contiguous()
        out = torch.empty((ids.shape[0], self.matrix.in_features))
        status = self.matrix.library.fp_embed(
            self.matrix.pointer, ids.data_ptr(), ids.shape[0], factor, out.data_ptr()
        )
        if status:
            raise IndexError(f"a token id is outside the table of {self.matrix.out_features} rows")
        return out
