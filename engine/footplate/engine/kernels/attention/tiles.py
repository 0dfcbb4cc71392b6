"""How the attention kernels cut their work: one small table, and how many splits a decode step takes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

MAX_SPLITS = 64
DOUBLED_BELOW = 8


@dataclass(frozen=True, slots=True)
class Tile:
    """A program's share and how it is compiled. `rows` are queries times heads of one KV head.

    An overlapped tile asks for the prompt kernel of `hopper`, on such a GPU and for its types and sizes.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    is_overlapped: bool = False


@dataclass(frozen=True, slots=True)
class AttentionTiles:
    """Tiles of the three passes; a tile with fewer rows than a KV head has query heads is widened to them."""

    prefill: Tile
    decode: Tile
    prefix: Tile


# By (bytes of an element, largest padded head size).
_HOPPER = {
    (2, 64): AttentionTiles(Tile(128, 64, 8, 2, True), Tile(16, 128, 4, 3), Tile(64, 64, 4, 3)),
    (2, 128): AttentionTiles(Tile(128, 128, 8, 2, True), Tile(16, 64, 4, 3), Tile(64, 64, 4, 3)),
    (2, 256): AttentionTiles(Tile(128, 64, 8, 2), Tile(16, 32, 4, 3), Tile(64, 32, 4, 2)),
    # float32 is multiplied without tensor cores, for parity: speed is no aim.
    (4, 128): AttentionTiles(Tile(32, 32, 4, 1), Tile(16, 32, 4, 1), Tile(32, 32, 4, 1)),
    (4, 256): AttentionTiles(Tile(16, 32, 8, 1), Tile(16, 32, 8, 1), Tile(16, 32, 8, 1)),
}
# Ampere and Ada: less shared memory, no asynchronous tensor cores.
_OLDER = {
    (2, 64): AttentionTiles(Tile(128, 64, 4, 2), Tile(16, 64, 4, 2), Tile(64, 64, 4, 2)),
    (2, 128): AttentionTiles(Tile(128, 32, 4, 2), Tile(16, 32, 4, 2), Tile(64, 32, 4, 2)),
    (2, 256): AttentionTiles(Tile(64, 32, 4, 1), Tile(16, 32, 4, 1), Tile(64, 32, 4, 1)),
    (4, 256): AttentionTiles(Tile(16, 32, 8, 1), Tile(16, 32, 8, 1), Tile(16, 32, 8, 1)),
}
# Small, so that tests meet many edges.
_INTERPRETED = AttentionTiles(Tile(32, 32, 1, 1), Tile(16, 32, 1, 1), Tile(32, 32, 1, 1))


def attention_tiles(head_dim: int, dtype: torch.dtype, capability: tuple[int, int] | None) -> AttentionTiles:
    """The table's entry; `capability` is the device's compute capability, None for the interpreter.

    Raises:
        ValueError: head sizes above 256.
    """
    if capability is None:
        return _INTERPRETED
    table = _HOPPER if capability[0] >= 9 else _OLDER
    for (size, largest), tiles in table.items():
        if size == dtype.itemsize and head_dim <= largest:
            return tiles
    raise ValueError(f"head size {head_dim} in {dtype} has no attention kernel; sizes up to 256 have")


@dataclass(frozen=True, slots=True)
class Splits:
    """A row's keys are shared by up to `most` programs, each of which takes a multiple of `chunk` keys."""

    most: int
    chunk: int


def decode_splits(num_rows: int, num_kv_heads: int, num_sms: int) -> Splits:
    """Enough splits to fill the device; a power of two.

    Where rows alone give each multiprocessor a program, parts cost more than they gain: on an H200, 32 rows
    of about 640 tokens take 27.8 µs unsplit and 35.3 µs in two parts. Where they don't, twice as many
    programs as multiprocessors are better than one for each, up to 8 parts: a step of 8 rows of Llama-3.1-8B
    takes 4.37 ms with 4 parts and 4.45 with 2; one row 4.11 with 16 and 4.12 with 32.

    The count depends on the number of rows only, never on their lengths: a CUDA graph's grid holds for all.
    """
    wanted = num_sms // max(num_rows * num_kv_heads, 1)
    most = 1
    while most * 2 <= min(wanted, MAX_SPLITS):
        most *= 2
    return Splits(2 * most if 1 < most < DOUBLED_BELOW else most, 64)
