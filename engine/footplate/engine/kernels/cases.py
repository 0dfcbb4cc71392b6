"""Inputs on which every backend's kernels must agree with the references: shapes that kernels get wrong.

Each op's list holds one token, sizes that are no power of two, one past a block or tile edge, and empty
tails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, takewhile
from typing import Any

import numpy as np
import torch

from footplate.engine.kernels.ops import AttentionBatch, AttentionSpec, PrefixGroups
from footplate.engine.weights.gguf_tensors import StoredRows

BLOCK_SIZE = 16
# Rows of this size have a mean square of 1e-6: a norm is then as much its eps as its rows.
TINY = 1e-3
_NAN = float("nan")
# Bytes of a block, its elements, and where its float16 factors stand; random bytes do for the rest.
_BLOCK_LAYOUTS = {
    "Q4_0": (18, 32, (0,)),
    "Q4_1": (20, 32, (0, 2)),
    "Q5_0": (22, 32, (0,)),
    "Q5_1": (24, 32, (0, 2)),
    "Q8_0": (34, 32, (0,)),
    "Q4_K": (144, 256, (0, 2)),
    "Q5_K": (176, 256, (0, 2)),
    "Q6_K": (210, 256, (208,)),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One set of arguments; `build` makes them anew each time, the same for the same case."""

    id: str
    build: Callable[[], tuple[Any, ...]]


def _rows(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def in_type(cases: Sequence[Case], dtype: torch.dtype, arguments: Sequence[int]) -> list[Case]:
    """The cases with these arguments, tensors or pairs of them, in another type."""

    def build(case: Case) -> tuple[Any, ...]:
        built = list(case.build())
        for index in arguments:
            value = built[index]
            built[index] = tuple(t.to(dtype) for t in value) if isinstance(value, tuple) else value.to(dtype)
        return tuple(built)

    return [Case(f"{case.id}-{str(dtype).removeprefix('torch.')}", partial(build, case)) for case in cases]


def in_16_bits(cases: Sequence[Case], arguments: Sequence[int]) -> list[Case]:
    """The cases in bfloat16, then some of them in float16, which shares all but its conversions."""
    return [
        *in_type(cases, torch.bfloat16, arguments),
        *in_type(cases[2:6], torch.float16, arguments),
    ]


def rms_norm() -> Sequence[Case]:
    def build(rows: int, size: int, scale: float) -> tuple[Any, ...]:
        return _rows(1, rows, size) * scale, _rows(2, size), 1e-6

    return [
        *(
            Case(f"{rows}x{size}", partial(build, rows, size, 1.0))
            for rows, size in ((1, 576), (1, 7), (3, 33), (17, 640), (130, 96), (0, 64))
        ),
        Case("5x200-tiny", partial(build, 5, 200, TINY)),
    ]


def add_rms_norm() -> Sequence[Case]:
    """For the norm of a sum, and for the sum with a norm."""

    def build(rows: int, size: int, scale: float) -> tuple[Any, ...]:
        return _rows(1, rows, size) * scale, _rows(3, rows, size) * scale, _rows(2, size), 1e-6

    return [
        *(
            Case(f"{rows}x{size}", partial(build, rows, size, 1.0))
            for rows, size in ((1, 576), (5, 33), (65, 640), (0, 64))
        ),
        Case("5x200-tiny", partial(build, 5, 200, TINY)),
    ]


def gated_activation() -> Sequence[Case]:
    def build(rows: int, size: int, kind: str) -> tuple[Any, ...]:
        gate_up = _rows(4, rows, 2 * size) * 4
        if rows > 1:
            gate_up[-1, :2] = torch.tensor([200.0, -200.0])  # past the exponential's range
        return gate_up, kind

    return [
        Case(f"{kind}-{rows}x{size}", partial(build, rows, size, kind))
        for kind in ("silu", "gelu_tanh")
        for rows, size in ((1, 1536), (3, 31), (20, 2048), (0, 32))
    ]


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """A step's sequences as (new tokens, context after them), and one layer's heads."""

    sequences: tuple[tuple[int, int], ...]
    heads: tuple[int, int] = (6, 2)  # query, key/value
    head_dim: int = 64
    window: int = 0
    soft_cap: float = 0.0
    kv_dtype: torch.dtype = torch.float32
    block_size: int = BLOCK_SIZE


def attention_batch(shape: AttentionShape) -> AttentionBatch:
    """Positions, slots and tables for a shape; blocks are dealt in a scrambled order, one is left unused."""
    counts = [new for new, _ in shape.sequences]
    contexts = [context for _, context in shape.sequences]
    blocks_of = [-(-context // shape.block_size) for context in contexts]
    order = torch.randperm(sum(blocks_of) + 1, generator=torch.Generator().manual_seed(7))
    tables = torch.zeros((len(counts), max([*blocks_of, 1])), dtype=torch.int32)
    slots, positions, dealt = [], [], 0
    for index, (new, context) in enumerate(shape.sequences):
        tables[index, : blocks_of[index]] = order[dealt : dealt + blocks_of[index]].int()
        dealt += blocks_of[index]
        at = torch.arange(context - new, context)
        positions.append(at)
        slots.append(tables[index, at // shape.block_size].long() * shape.block_size + at % shape.block_size)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return AttentionBatch(
        positions=torch.cat(positions).int(),
        slots=torch.cat(slots),
        query_starts=torch.from_numpy(starts),
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        block_tables=tables,
        max_query_len=max(counts),
        max_context_len=max(contexts),
        num_decodes=len(list(takewhile(lambda new: new == 1, counts))),
    )


def attention_spec(shape: AttentionShape) -> AttentionSpec:
    return AttentionSpec(*shape.heads, shape.head_dim, shape.head_dim**-0.5, shape.window, shape.soft_cap)


def empty_cache(shape: AttentionShape) -> tuple[torch.Tensor, torch.Tensor]:
    """A pool big enough for the shape, all NaN: what was never written must never matter."""
    blocks = sum(-(-context // shape.block_size) for _, context in shape.sequences) + 1
    size = (blocks, shape.heads[1], shape.block_size, shape.head_dim)
    keys, values = (torch.full(size, _NAN, dtype=shape.kv_dtype) for _ in range(2))
    return keys, values


def filled_cache(shape: AttentionShape, batch: AttentionBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """As empty_cache, with random keys and values at every position of each context."""
    cache = empty_cache(shape)
    for seed, tensor in enumerate(cache):
        for index, (_, context) in enumerate(shape.sequences):
            at = torch.arange(context)
            block = batch.block_tables[index, at // shape.block_size].long()
            rows = _rows(10 * index + seed, context, shape.heads[1], shape.head_dim)
            tensor[block, :, at % shape.block_size] = rows.to(shape.kv_dtype)
    return cache


_MIXED = ((1, 1), (1, 17), (5, 33), (1, 300), (40, 40))
ATTENTION_SHAPES: dict[str, AttentionShape] = {
    "one-token": AttentionShape(((1, 1),)),
    "one-past-a-block": AttentionShape(((1, BLOCK_SIZE + 1),)),
    "mixed": AttentionShape(_MIXED),
    "mixed-bf16": AttentionShape(_MIXED, kv_dtype=torch.bfloat16),
    "no-new-tokens": AttentionShape(((3, 5), (0, 20), (2, 130))),
    "heads-1": AttentionShape(_MIXED, heads=(3, 3), head_dim=80),
    "heads-4": AttentionShape(_MIXED, heads=(4, 1), head_dim=256),
    "heads-8": AttentionShape(_MIXED, heads=(16, 2), head_dim=128),
    "size-96": AttentionShape(_MIXED, head_dim=96, kv_dtype=torch.bfloat16),
    "window": AttentionShape(((70, 70), (1, 200), (9, 150)), window=37),
    "window-one": AttentionShape(((3, 20),), window=1),
    "soft-cap": AttentionShape(_MIXED, soft_cap=5.0),
    "odd-blocks": AttentionShape(((1, 257), (60, 131)), block_size=5, window=100),
    "chunk-edges": AttentionShape(((1, 128), (1, 129), (130, 256), (2, 257))),
    "window-decodes": AttentionShape(((1, 300), (1, 20), (1, 21), (1, 257), (3, 90)), (7, 1), 64, window=20),
}


def attention(block_size: int | None = None) -> Sequence[Case]:
    """All attention shapes, or those with blocks of one size."""

    def build(shape: AttentionShape) -> tuple[Any, ...]:
        batch = attention_batch(shape)
        q = _rows(5, batch.positions.shape[0], shape.heads[0], shape.head_dim)
        return q, attention_spec(shape), batch, filled_cache(shape, batch)

    return [
        Case(name, partial(build, shape))
        for name, shape in ATTENTION_SHAPES.items()
        if block_size in (None, shape.block_size)
    ]


def decodes() -> Sequence[Case]:
    """Attention of rows with one token each; some rows only fill a graph's batch."""

    def build(shape: AttentionShape) -> tuple[Any, ...]:
        batch = attention_batch(shape)
        kv = filled_cache(shape, batch)
        batch.context_lens[3:5] = 0
        return (
            _rows(5, len(shape.sequences), shape.heads[0], shape.head_dim),
            attention_spec(shape),
            batch,
            kv,
        )

    one_after_another = tuple((1, 1 + 37 * index) for index in range(9))
    shapes = {
        "one-token": AttentionShape(((1, 1),)),
        "long": AttentionShape(((1, 700),), (8, 1), 128),
        "edges": AttentionShape(((1, 31), (1, 32), (1, 33)), (4, 1), 32),
        "many": AttentionShape(one_after_another, (6, 3), 80),
        "window": AttentionShape(one_after_another, (6, 2), 96, window=50),
        "soft-cap": AttentionShape(((1, 77), (1, 256)), (14, 2), 64, soft_cap=5.0),
        "size-256": AttentionShape(((1, 65), (1, 2)), (2, 1), 256),
    }
    return [Case(name, partial(build, shape)) for name, shape in shapes.items()]


def shared_prefix() -> Sequence[Case]:
    """Attention whose decode rows are in groups on the same first blocks: (members, shared tokens) each."""

    def build(shape: AttentionShape, groups: Sequence[tuple[Sequence[int], int]]) -> tuple[Any, ...]:
        batch = attention_batch(shape)
        kv = filled_cache(shape, batch)
        row_lens = torch.zeros(batch.num_decodes, dtype=torch.int32)
        for members, shared in groups:
            for member in members:
                row_lens[member] = shared
                blocks = shared // shape.block_size
                batch.block_tables[member, :blocks] = batch.block_tables[members[0], :blocks]
        starts = np.cumsum([0, *(len(members) for members, _ in groups)]).astype(np.int32)
        batch.prefix_groups = PrefixGroups(
            rows=torch.tensor([m for members, _ in groups for m in members], dtype=torch.int32),
            starts=torch.from_numpy(starts),
            lens=torch.tensor([shared for _, shared in groups], dtype=torch.int32),
            row_lens=row_lens,
        )
        q = _rows(5, batch.positions.shape[0], shape.heads[0], shape.head_dim)
        return q, attention_spec(shape), batch, kv

    lens = (60, 33, 130, 49, 17, 200, 64, 300, 90)
    rows = tuple((1, context) for context in lens)
    pairs = (((0, 1, 3), 32), ((5, 7), 192))
    whole = ((tuple(range(8, -1, -1)), 16),)
    return [
        Case("groups", partial(build, AttentionShape(rows), pairs)),
        Case("one-group", partial(build, AttentionShape((*rows, (5, 40)), heads=(7, 1)), whole)),
        Case("soft-cap", partial(build, AttentionShape(rows, (4, 4), 80, soft_cap=5.0), pairs)),
        Case("window", partial(build, AttentionShape(rows, window=50), pairs)),
    ]


def padded_rows() -> Sequence[Case]:
    """rope_and_cache with rows that only fill a graph's batch: slot -1, position 0."""

    def build(case: Case) -> tuple[Any, ...]:
        built = case.build()
        batch: AttentionBatch = built[2]
        for tensor, value in ((batch.slots, -1), (batch.positions, 0)):
            tensor[-3:] = value
        return built

    return [Case(f"{case.id}-padded", partial(build, case)) for case in rope_and_cache()[2:6]]


def embedding() -> Sequence[Case]:
    def build(tokens: int, size: int, scale: float, dtype: torch.dtype) -> tuple[Any, ...]:
        ids = torch.randint(0, 50, (tokens,), generator=torch.Generator().manual_seed(3), dtype=torch.int32)
        return ids, _rows(4, 50, size).to(dtype), scale

    return [
        Case(f"{tokens}x{size}x{scale}-{dtype}", partial(build, tokens, size, scale, dtype))
        for tokens, size, scale, dtype in (
            (1, 64, 1.0, torch.float32),
            (5, 1031, 33.941, torch.float32),
            (9, 640, 25.298, torch.bfloat16),
            (3, 96, 1.0, torch.float16),
            (0, 32, 1.0, torch.float32),
        )
    ]


def block_copy() -> Sequence[Case]:
    def build(
        copies: Sequence[tuple[int, int]], heads: int, size: int, dtype: torch.dtype
    ) -> tuple[Any, ...]:
        caches = [_rows(seed, 9, heads, BLOCK_SIZE, size).to(dtype) for seed in range(6)]
        for cache in caches:
            cache[4] = _NAN
        return caches, torch.tensor(copies, dtype=torch.int64).reshape(-1, 2)

    return [
        Case("one", partial(build, [(2, 7)], 1, 64, torch.float32)),
        Case("some", partial(build, [(0, 8), (0, 3), (5, 1)], 3, 80, torch.bfloat16)),
        Case("unwritten", partial(build, [(4, 2), (8, 6)], 2, 256, torch.float16)),
        Case("none", partial(build, [], 2, 32, torch.float32)),
    ]


def rope_and_cache() -> Sequence[Case]:
    def build(shape: AttentionShape, has_norm: bool, scale: float = 1.0) -> tuple[Any, ...]:
        batch = attention_batch(shape)
        width = (shape.heads[0] + 2 * shape.heads[1]) * shape.head_dim
        angles = _rows(8, batch.max_context_len, shape.head_dim // 2)
        cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1)
        norm = (_rows(6, shape.head_dim), _rows(7, shape.head_dim), 1e-6) if has_norm else None
        qkv = _rows(5, batch.positions.shape[0], width) * scale
        return qkv, attention_spec(shape), batch, cos_sin, empty_cache(shape), norm

    plain = [
        Case(f"{name}{'-norm' * norm}", partial(build, shape, norm))
        for name, shape in ATTENTION_SHAPES.items()
        for norm in (False, True)
        if name
        in ("one-token", "mixed", "mixed-bf16", "heads-1", "heads-4", "heads-8", "size-96", "odd-blocks")
    ]
    # Second, to be among those that are tried in every type.
    return [plain[0], Case("tiny-norm", partial(build, ATTENTION_SHAPES["mixed"], True, TINY)), *plain[1:]]


def stored_rows(type_name: str, num_rows: int, num_columns: int, seed: int = 0) -> StoredRows:
    """Random rows of a quantised type with factors below 0.01."""
    block_bytes, block_size, factors = _BLOCK_LAYOUTS[type_name]
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (num_rows, num_columns // block_size, block_bytes), dtype=np.uint8)
    for at in factors:
        values = (random.random((*blocks.shape[:2], 1)) * 0.01).astype(np.float16)
        blocks[:, :, at : at + 2] = values.view(np.uint8)
    return StoredRows(type_name, blocks.reshape(num_rows, -1))


QUANTISED_TYPES = tuple(_BLOCK_LAYOUTS)


def linear() -> Sequence[Case]:
    def build(
        types: Sequence[str], rows: Sequence[int], num_columns: int, num_tokens: int
    ) -> tuple[Any, ...]:
        segments = [
            stored_rows(name, count, num_columns, at)
            for at, (name, count) in enumerate(zip(types, rows, strict=True))
        ]
        x = _rows(9, num_tokens, num_columns)
        if num_tokens > 2:
            x[1] = 0  # a row without a scale
            x[2, :32] *= 1e-30
        return x, segments

    single = [((name,), (40,), 512, tokens) for name in QUANTISED_TYPES for tokens in (1, 7)]
    odd_rows = [((name,), (21,), 256, 3) for name in QUANTISED_TYPES]
    stacks = [
        (("Q5_0", "Q5_0", "Q8_0"), (64, 16, 16), 640, 5),
        (("Q4_1", "Q4_1", "Q4_1"), (13, 3, 8), 96, 2),
        (("Q4_1",), (96,), 576, 70),
        (("Q6_K", "Q4_K"), (24, 24), 2048, 4),
        (("Q8_0",), (24,), 32, 0),
    ]
    return [
        Case(
            f"{'+'.join(types)}-{'+'.join(map(str, rows))}x{columns}-{tokens}",
            partial(build, types, rows, columns, tokens),
        )
        for types, rows, columns, tokens in [*single, *odd_rows, *stacks]
    ]


def cuts(length: int, at: Sequence[int]) -> list[tuple[int, int]]:
    """The pieces of `length` cut at the given places."""
    return list(pairwise([0, *at, length]))
