"""Prompt attention for Hopper in Gluon: softmax of one tile of keys beside the products of its neighbours.

Source: FlashAttention-3 (arXiv:2407.08608), section 3.2: while a tile's scores turn into weights, the tensor
cores multiply the weights of the tile before by its values. Triton itself waits for both products before each
softmax, so its schedule leaves the tensor cores idle meanwhile. Tiles are taken from the last key backwards:
then only the first tile may reach past the context, and tiles that need no mask follow those that do.

What the kernel computes is what `attention/kernel.py: prefill_kernel` does, with the same arguments.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

_LOWEST = gl.constexpr(-1.0e30)
_LOG2_E = gl.constexpr(1.4426950408889634)
# Blocks lie on multiples of 16 bytes; counted in those, an offset fits 32 bits and costs one instruction.
_VECTOR = gl.constexpr(8)


@gluon.jit
def locate(query_starts, first, count, QUERIES: gl.constexpr):
    """(sequence, its first token, its queries, the program's first query among them); see `_find_owner`."""
    # Last tiles first: they see the most keys, and the short ones fill the end of the launch.
    tile = gl.num_programs(1) - 1 - gl.program_id(1)
    origin = gl.load(query_starts + first)
    low = first
    high = first + count
    while high - low > 1:
        middle = (low + high) // 2
        if (gl.load(query_starts + middle) - origin) // QUERIES + middle - first <= tile:
            low = middle
        else:
            high = middle
    begin = gl.load(query_starts + low)
    num_queries = gl.load(query_starts + low + 1) - begin
    return low, begin, num_queries, (tile - (begin - origin) // QUERIES - low + first) * QUERIES


@gluon.jit
def tile_ranges(first, last, WINDOW: gl.constexpr, KEYS: gl.constexpr):
    """Key tiles that the queries at positions first .. last need, as (low, edge, plain, top).

    Tiles top .. plain + 1 cross the diagonal, plain .. edge are visible to all, edge - 1 .. low to some.
    """
    low = 0
    edge = 0
    top = last // KEYS
    plain = gl.minimum((first + 1) // KEYS - 1, top - 1)
    if WINDOW:
        low = gl.maximum(first - WINDOW + 1, 0) // KEYS
        edge = gl.minimum((gl.maximum(last - WINDOW + 1, 0) + KEYS - 1) // KEYS, plain + 1)
    return low, edge, plain, top


@gluon.jit
def _copy_tile(target, base, vector):
    """Start copying rows of keys or values to shared memory. base [KEYS, D] points into block 0."""
    async_copy.async_copy_global_to_shared(target, base + gl.expand_dims(vector.to(gl.int64) * _VECTOR, 1))


@gluon.jit
def hidden(scores, position, start, WINDOW: gl.constexpr):
    """The scores, minus infinity where a row does not see the key. `start` is the tile's first key."""
    KEYS: gl.constexpr = scores.shape[1]
    at = gl.expand_dims(start + gl.arange(0, KEYS, layout=gl.SliceLayout(0, scores.type.layout)), 0)
    visible = at <= gl.expand_dims(position, 1)
    if WINDOW:
        visible = visible & (at > gl.expand_dims(position, 1) - WINDOW)
    return gl.where(visible, scores, float("-inf"))


@gluon.jit
def _weigh(
    scores, peak, total, position, start, is_masked, scale, WINDOW: gl.constexpr, SOFT_CAP: gl.constexpr
):
    """One step of the online softmax in base 2: (weights, maximum, sum, factor of what was summed before)."""
    factor = scale * _LOG2_E
    if SOFT_CAP > 0:
        ratio = scores * (scale / SOFT_CAP)
        small = gl.exp2(gl.abs(ratio) * (-2.0 * _LOG2_E))
        scores = gl.where(ratio >= 0, SOFT_CAP, -SOFT_CAP) * (1.0 - small) / (1.0 + small)
        factor = _LOG2_E
    if is_masked:
        scores = hidden(scores, position, start, WINDOW)
    higher = gl.maximum(peak, gl.max(scores, axis=1) * factor)
    weights = gl.exp2(scores * factor - gl.expand_dims(higher, 1))
    fade = gl.exp2(peak - higher)
    return weights, higher, total * fade + gl.sum(weights, axis=1), fade


@gluon.jit
def _attend(
    own_q, keys, values, table, first_position, position, last, block_stride, scale,
    HEAD_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr, WINDOW: gl.constexpr, SOFT_CAP: gl.constexpr,
    KEYS: gl.constexpr, COPY: gl.constexpr, SCORES: gl.constexpr, VALUES: gl.constexpr,
):  # fmt: skip
    """(Weighted values in layout VALUES, sum of weights) of a tile of queries in shared memory."""
    TYPE: gl.constexpr = keys.dtype.element_ty
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, VALUES, 2)
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, HEAD_DIM], TYPE)
    low, edge, plain, top = tile_ranges(first_position, last, WINDOW, KEYS)
    key = gl.arange(0, KEYS, layout=gl.SliceLayout(1, COPY))
    column = gl.expand_dims(gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, COPY)), 0)
    k_shared = gl.allocate_shared_memory(TYPE, [2, KEYS, HEAD_DIM], SHARED)
    v_shared = gl.allocate_shared_memory(TYPE, [2, KEYS, HEAD_DIM], SHARED)
    block_vectors = block_stride // _VECTOR

    # Rows past the context are copies of its last row: they get no weight, but must not be NaN.
    at = gl.minimum(top * KEYS + key, last)
    within = gl.expand_dims((at % BLOCK_SIZE) * HEAD_DIM, 1) + column
    vector = gl.load(table + at // BLOCK_SIZE) * block_vectors
    _copy_tile(k_shared.index(0), keys + within, vector)
    async_copy.commit_group()
    _copy_tile(v_shared.index(0), values + within, vector)
    blocks = table + key // BLOCK_SIZE
    within = gl.expand_dims((key % BLOCK_SIZE) * HEAD_DIM, 1) + column
    # With a single tile the ones ahead are the same again, and its table may end within it.
    at = gl.minimum(gl.maximum(top - 1, low) * KEYS + key, last)
    vector = gl.load(table + at // BLOCK_SIZE) * block_vectors
    _copy_tile(k_shared.index(1), keys + within, vector)
    async_copy.commit_group()
    block = gl.load(table + gl.minimum(gl.maximum(top - 2, low) * KEYS + key, last) // BLOCK_SIZE)

    peak = gl.full([own_q.shape[0]], _LOWEST, gl.float32, layout=gl.SliceLayout(1, SCORES))
    total = gl.full([own_q.shape[0]], 0.0, gl.float32, layout=gl.SliceLayout(1, SCORES))
    accumulated = gl.full([own_q.shape[0], HEAD_DIM], 0.0, gl.float32, layout=VALUES)
    zeros = gl.full([own_q.shape[0], KEYS], 0.0, gl.float32, layout=SCORES)
    async_copy.wait_group(1)
    scores = warpgroup_mma(own_q, k_shared.index(0).permute((1, 0)), zeros, use_acc=False)
    weights, peak, total, fade = _weigh(
        scores, peak, total, position, top * KEYS, True, scale, WINDOW, SOFT_CAP
    )
    p = gl.convert_layout(weights.to(TYPE), WEIGHTS)
    for index in range(1, top - low + 1):
        current = top - index
        side = index % 2
        async_copy.wait_group(0)
        k_tile = k_shared.index(side).permute((1, 0))
        s_token = warpgroup_mma(own_q, k_tile, zeros, use_acc=False, is_async=True)
        o_token = warpgroup_mma(p, v_shared.index(1 - side), accumulated, is_async=True)
        # This tile's values and the next one's keys, whose blocks are known a tile ahead.
        _copy_tile(v_shared.index(side), values + within, vector)
        vector = block * block_vectors
        _copy_tile(k_shared.index(1 - side), keys + within, vector)
        async_copy.commit_group()
        block = gl.load(blocks + gl.maximum(current - 2, low) * (KEYS // BLOCK_SIZE))
        scores = warpgroup_mma_wait(1, deps=[s_token])
        is_masked = (current > plain) | (current < edge)
        weights, peak, total, fade = _weigh(
            scores, peak, total, position, current * KEYS, is_masked, scale, WINDOW, SOFT_CAP
        )
        accumulated = warpgroup_mma_wait(0, deps=[o_token])
        accumulated = accumulated * gl.expand_dims(gl.convert_layout(fade, gl.SliceLayout(1, VALUES)), 1)
        p = gl.convert_layout(weights.to(TYPE), WEIGHTS)
    async_copy.wait_group(0)
    return warpgroup_mma(p, v_shared.index((top - low) % 2), accumulated), total


@gluon.jit(do_not_specialize=["first_sequence", "num_sequences", "table_stride"])
def prefill_kernel(
    q,
    output,
    keys,
    values,
    query_starts,
    context_lens,
    block_tables,
    first_sequence,
    num_sequences,
    table_stride,
    block_stride,
    scale,
    NUM_KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFT_CAP: gl.constexpr,
    ROWS: gl.constexpr,
    KEYS: gl.constexpr,
):
    QUERIES: gl.constexpr = ROWS // GROUP
    WARPS: gl.constexpr = gl.num_warps()
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, KEYS, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, HEAD_DIM, 16])
    LANES: gl.constexpr = HEAD_DIM // _VECTOR
    COPY: gl.constexpr = gl.BlockedLayout([1, _VECTOR], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    TYPE: gl.constexpr = q.dtype.element_ty
    kv_head = gl.program_id(0)
    sequence, token_begin, num_queries, first_query = locate(
        query_starts, first_sequence, num_sequences, QUERIES
    )
    if first_query >= num_queries:
        return
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, COPY))
    query = first_query + row // GROUP
    is_row = gl.expand_dims((row < QUERIES * GROUP) & (query < num_queries), 1)
    at_head = (token_begin + query).to(gl.int64) * (NUM_KV_HEADS * GROUP) + kv_head * GROUP + row % GROUP
    column = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, COPY))
    at_row = gl.expand_dims(at_head * HEAD_DIM, 1) + gl.expand_dims(column, 0)
    own_q = gl.allocate_shared_memory(
        TYPE, [ROWS, HEAD_DIM], gl.NVMMASharedLayout.get_default_for([ROWS, HEAD_DIM], TYPE)
    )
    own_q.store(gl.load(q + at_row, mask=is_row, other=0.0))
    fence_async_shared()
    first_position = gl.load(context_lens + sequence) - num_queries + first_query
    # A row that only fills a graph's batch has no context; it reads one key, which its mask hides.
    last = gl.maximum(first_position + gl.minimum(QUERIES, num_queries - first_query) - 1, 0)
    position = first_position + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES)) // GROUP
    table = block_tables + sequence.to(gl.int64) * table_stride
    head_begin = kv_head.to(gl.int64) * (BLOCK_SIZE * HEAD_DIM)
    accumulated, total = _attend(
        own_q, keys + head_begin, values + head_begin, table, first_position, position, last, block_stride,
        scale, HEAD_DIM, BLOCK_SIZE, WINDOW, SOFT_CAP, KEYS, COPY, SCORES, VALUES,
    )  # fmt: skip
    total = gl.convert_layout(total, gl.SliceLayout(1, VALUES))
    # A row that only pads the tile saw every key or none; what it read may have been NaN.
    is_seen = gl.expand_dims(total > 0, 1)
    result = gl.where(is_seen, accumulated / gl.expand_dims(gl.where(total > 0, total, 1.0), 1), 0.0)
    gl.store(output + at_row, gl.convert_layout(result.to(TYPE), COPY), mask=is_row)
