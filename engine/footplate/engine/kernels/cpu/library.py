"""The compiled CPU kernels as Python functions. Addresses and sizes go in; nothing here checks shapes."""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, c_float, c_int, c_int32, c_void_p
from pathlib import Path
from typing import Any

from footplate.engine.errors import LoadError
from footplate.engine.kernels.cpu.build import build_library

MAX_SEGMENTS = 8


class Segment(ctypes.Structure):
    """`fp_segment` of matrix.h."""

    _fields_ = (
        ("codes", c_void_p),
        ("scales", c_void_p),
        ("minimums", c_void_p),
        ("num_rows", c_int32),
        ("kind", c_int32),
        ("has_wide_scales", c_int32),
        ("num_tiles", c_int32),
    )


class Matrix(ctypes.Structure):
    """`fp_matrix` of matrix.h."""

    _fields_ = (
        ("in_features", c_int32),
        ("out_features", c_int32),
        ("num_segments", c_int32),
        ("num_tiles", c_int32),
        ("segments", Segment * MAX_SEGMENTS),
    )


class Sequences(ctypes.Structure):
    """`fp_sequences` of attention.h: where a step's tokens stand, and one layer's cache and constants."""

    _fields_ = (
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("query_starts", c_void_p),
        ("context_lens", c_void_p),
        ("block_tables", c_void_p),
        ("num_tokens", c_int32),
        ("num_sequences", c_int32),
        ("table_width", c_int32),
        ("max_query_len", c_int32),
    )


class CacheLayer(ctypes.Structure):
    """`fp_layer` of attention.h."""

    _fields_ = (
        ("keys", c_void_p),
        ("values", c_void_p),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("block_size", c_int32),
        ("is_bf16", c_int32),
        ("window", c_int32),
        ("scale", c_float),
        ("soft_cap", c_float),
    )


class DecoderLayer(ctypes.Structure):
    """`fp_decoder_layer` of decoder.c."""

    _fields_ = (
        ("qkv", POINTER(Matrix)),
        ("o", POINTER(Matrix)),
        ("gate_up", POINTER(Matrix)),
        ("down", POINTER(Matrix)),
        ("attn_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("post_attn_norm", c_void_p),
        ("post_mlp_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("cos_sin", c_void_p),
        ("cache", CacheLayer),
        ("eps", c_float),
        ("prologue", c_int32),
    )


_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "fp_set_threads": (None, (c_int,)),
    "fp_num_threads": (c_int, ()),
    "fp_tile_rows": (c_int, ()),
    "fp_pack_codes": (None, (c_void_p, c_int, c_int, c_int, c_void_p)),
    "fp_pack_scales": (None, (c_void_p, c_int, c_int, c_int, c_void_p)),
    "fp_embed": (c_int, (POINTER(Matrix), c_void_p, c_int, c_float, c_void_p)),
    "fp_linear": (c_int, (POINTER(Matrix), c_void_p, c_int, c_int, c_void_p, c_float, c_void_p, c_int)),
    "fp_rms_norm": (None, (c_void_p, c_void_p, c_void_p, c_int, c_int, c_float, c_void_p)),
    "fp_norm_add": (None, (c_void_p, c_void_p, c_void_p, c_int, c_int, c_float)),
    "fp_gated_activation": (None, (c_void_p, c_int, c_int, c_int, c_void_p)),
    "fp_rope_and_cache": (
        c_int,
        (
            c_void_p,
            POINTER(CacheLayer),
            POINTER(Sequences),
            c_void_p,
            c_void_p,
            c_void_p,
            c_float,
            c_void_p,
        ),
    ),
    "fp_decoder_scratch": (c_int, (POINTER(DecoderLayer), c_int)),
    "fp_run_layers": (
        c_int,
        (POINTER(DecoderLayer), c_int, c_void_p, POINTER(Sequences), POINTER(Sequences), c_void_p),
    ),
    "fp_attention": (c_int, (c_void_p, POINTER(CacheLayer), POINTER(Sequences), c_void_p)),
}


def load_library(
    cache_dir: str | Path | None = None, num_threads: int | None = None, defines: tuple[str, ...] = ()
) -> ctypes.CDLL:
    """Build if need be, load, and set the thread count (default: the processors this process may use).

    Calls release the interpreter lock. The thread count is the process's, not the caller's.

    Raises:
        LoadError: the library can't be built or loaded.
    """
    path = build_library(cache_dir, defines)
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise LoadError(f"CPU kernels: {path} can't be loaded ({error}); delete it to build anew") from None
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    library.fp_set_threads(num_threads or len(os.sched_getaffinity(0)))
    return library
