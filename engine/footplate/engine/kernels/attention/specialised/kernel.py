"""Prompt attention for Hopper in Gluon: two warps ask for keys and values, others multiply and weigh.

Source: FlashAttention-3 (arXiv:2407.08608), sections 3.1 and 3.2. Two warps that do nothing else fill rings
of tiles in shared memory by TMA, block by block of the paged cache. Two warpgroups of 64 rows each read them
on their own: while one turns scores into weights, the tensor cores multiply for the other. Within a warpgroup
the scores of a tile are queued before the weighted values of the tile before. Barriers that hand the tensor
cores from one warpgroup to the other, as the paper has them, were no faster.

Tiles are taken from the last key backwards: then only the first tile may reach past the context, and tiles
that need no mask follow those that do, in a loop of their own.

What the kernel computes is what `attention/kernel.py: prefill_kernel` does, for heads of 128. With heads of
64, exponentials take as long as products: `hopper/kernel.py` was as fast on long prompts there, and faster
on short ones.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from footplate.engine.kernels.attention.hopper.kernel import hidden, locate, tile_ranges

_LOWEST = gl.constexpr(-1.0e30)
_LOG2_E = gl.constexpr(1.4426950408889634)
_VECTOR = gl.constexpr(8)  # elements that a thread loads at once
_OWN = gl.constexpr(64)  # rows of a warpgroup: the tall side of one product of the tensor cores
_READERS = gl.constexpr(2)  # warpgroups that multiply; a third would have too few registers
HALF = gl.constexpr(64)  # columns that lie together: 128 bytes, the width of a swizzle
LINES = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))


@gluon.jit
def _own_sums(weights):
    """Sums of each row, [ROWS, 4]: what one thread holds, so that no thread waits for another."""
    parts = weights.reshape([weights.shape[0], weights.shape[1] // 8, 4, 2])
    return gl.sum(gl.sum(parts, axis=3), axis=1)


@gluon.jit
def _weigh(
    scores, peak, total, position, start, scale,
    IS_MASKED: gl.constexpr, WINDOW: gl.constexpr, SOFT_CAP: gl.constexpr,
):  # fmt: skip
    """One step of the online softmax in base 2: (weights, maximum, sums, factor of earlier sums)."""
    factor = scale * _LOG2_E
    if SOFT_CAP > 0:
        ratio = scores * (scale / SOFT_CAP)
        small = gl.exp2(gl.abs(ratio) * (-2.0 * _LOG2_E))
        scores = gl.where(ratio >= 0, SOFT_CAP, -SOFT_CAP) * (1.0 - small) / (1.0 + small)
        factor = _LOG2_E
    if IS_MASKED:
        scores = hidden(scores, position, start, WINDOW)
    higher = gl.maximum(peak, gl.max(scores, axis=1) * factor)
    weights = gl.exp2(scores * factor - gl.expand_dims(higher, 1))
    fade = gl.exp2(peak - higher)
    own = gl.convert_layout(fade, gl.SliceLayout(1, total.type.layout), assert_trivial=True)
    return weights, higher, total * gl.expand_dims(own, 1) + _own_sums(weights), fade


@gluon.jit
def _take_tile(
    state, own_q, ring, index, start, position, scale,
    IS_MASKED: gl.constexpr, WINDOW: gl.constexpr, SOFT_CAP: gl.constexpr,
):  # fmt: skip
    """Scores and weights of the ring's tile `index`, and the weighted values of the tile before it."""
    weights, accumulated, peak, total, zeros = state
    keys, values, k_arrived, v_arrived, is_free = ring
    STAGES: gl.constexpr = keys.shape[0]
    slot = index % STAGES
    before = (index - 1) % STAGES
    mbarrier.wait(k_arrived.index(slot), (index // STAGES) & 1)
    s_token = warpgroup_mma(own_q, keys.index(slot).permute((1, 0)), zeros, use_acc=False, is_async=True)
    mbarrier.wait(v_arrived.index(before), ((index - 1) // STAGES) & 1)
    o_token = warpgroup_mma(weights, values.index(before), accumulated, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[s_token])
    wide, peak, total, fade = _weigh(scores, peak, total, position, start, scale, IS_MASKED, WINDOW, SOFT_CAP)
    accumulated = warpgroup_mma_wait(0, deps=[o_token])
    mbarrier.arrive(is_free.index(slot), count=1)
    LAYOUT: gl.constexpr = gl.SliceLayout(1, accumulated.type.layout)
    accumulated = accumulated * gl.expand_dims(gl.convert_layout(fade, LAYOUT), 1)
    return gl.convert_layout(wide.to(keys.dtype), weights.type.layout), accumulated, peak, total, zeros


@gluon.jit
def _clear_rows(values, count):
    """Zeros in the ring's first tile of values from row `count` on: what no token wrote may be NaN."""
    KEYS: gl.constexpr = values.shape[1]
    HALVES: gl.constexpr = values.shape[2] // HALF
    SPREAD: gl.constexpr = gl.BlockedLayout([1, _VECTOR], [4, 8], [gl.num_warps(), 1], [1, 0])
    # In pieces of 16 rows, one for each thread's vector.
    pieces = values.index(0)._reinterpret(values.dtype, [HALVES * KEYS // 16, 16, HALF], LINES)
    row = gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(1, SPREAD)), 1)
    for at in range(count // 16, KEYS // 16):
        for half in gl.static_range(HALVES):
            piece = pieces.index(half * (KEYS // 16) + at)
            piece.store(gl.where(at * 16 + row < count, piece.load(SPREAD), 0.0))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _attend(
    own_q, ring, position, tiles, context, scale, WINDOW: gl.constexpr, SOFT_CAP: gl.constexpr
):  # fmt: skip
    """(Weighted values [ROWS, D], sum of weights) of a warpgroup's queries in shared memory."""
    keys, values, k_arrived, v_arrived, is_free = ring
    low, edge, plain, top = tiles
    STAGES: gl.constexpr = keys.shape[0]
    KEYS: gl.constexpr = keys.shape[1]
    ROWS: gl.constexpr = own_q.shape[0]
    HEAD_DIM: gl.constexpr = own_q.shape[1]
    SCORES: gl.constexpr = position.type.layout.parent
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, HEAD_DIM, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, VALUES, 2)
    peak = gl.full([ROWS], _LOWEST, gl.float32, layout=gl.SliceLayout(1, SCORES))
    zeros = gl.full([ROWS, KEYS], 0.0, gl.float32, layout=SCORES)
    accumulated = gl.full([ROWS, HEAD_DIM], 0.0, gl.float32, layout=VALUES)
    mbarrier.wait(k_arrived.index(0), 0)
    scores = warpgroup_mma(own_q, keys.index(0).permute((1, 0)), zeros, use_acc=False)
    mbarrier.arrive(is_free.index(0), count=1)
    wide, peak, total, _ = _weigh(
        scores, peak, _own_sums(zeros), position, top * KEYS, scale, True, WINDOW, SOFT_CAP
    )
    if (top + 1) * KEYS > context:
        mbarrier.wait(v_arrived.index(0), 0)
        _clear_rows(values, context - top * KEYS)
    state = (gl.convert_layout(wide.to(keys.dtype), WEIGHTS), accumulated, peak, total, zeros)
    inner = gl.maximum(top - gl.maximum(plain, low - 1), 1)
    outer = gl.maximum(top - gl.maximum(edge, low) + 1, inner)
    for index in range(1, inner):
        state = _take_tile(
            state, own_q, ring, index, (top - index) * KEYS, position, scale, True, WINDOW, SOFT_CAP
        )
    for index in range(inner, outer):
        state = _take_tile(
            state, own_q, ring, index, (top - index) * KEYS, position, scale, False, WINDOW, SOFT_CAP
        )
    if WINDOW:
        for index in range(outer, top - low + 1):
            state = _take_tile(
                state, own_q, ring, index, (top - index) * KEYS, position, scale, True, WINDOW, SOFT_CAP
            )
    weights, accumulated, peak, total, zeros = state
    final = (top - low) % STAGES
    mbarrier.wait(v_arrived.index(final), ((top - low) // STAGES) & 1)
    accumulated = warpgroup_mma(weights, values.index(final), accumulated)
    return accumulated, gl.convert_layout(gl.sum(total, axis=1), gl.SliceLayout(1, VALUES))


@gluon.jit
def _consume(
    rows, ring, place, tiles, scale,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, WINDOW: gl.constexpr, SOFT_CAP: gl.constexpr,
    WHICH: gl.constexpr,
):  # fmt: skip
    """One warpgroup's rows of the program's tile, from queries in global memory to their output."""
    q, output, queries = rows
    kv_head, token_begin, num_queries, first_query, context = place
    HEAD_DIM: gl.constexpr = queries.shape[2]
    QUERIES: gl.constexpr = _READERS * _OWN // GROUP
    LANES: gl.constexpr = HEAD_DIM // _VECTOR
    COPY: gl.constexpr = gl.BlockedLayout([1, _VECTOR], [32 // LANES, LANES], [gl.num_warps(), 1], [1, 0])
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, ring[0].shape[1], 16])
    own = queries.index(WHICH)
    row = WHICH * _OWN + gl.arange(0, _OWN, layout=gl.SliceLayout(1, COPY))
    query = first_query + row // GROUP
    is_row = gl.expand_dims((row < QUERIES * GROUP) & (query < num_queries), 1)
    at_head = (token_begin + query).to(gl.int64) * (NUM_KV_HEADS * GROUP) + kv_head * GROUP + row % GROUP
    column = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, COPY))
    at_row = gl.expand_dims(at_head * HEAD_DIM, 1) + gl.expand_dims(column, 0)
    own.store(gl.load(q + at_row, mask=is_row, other=0.0))
    fence_async_shared()
    row = WHICH * _OWN + gl.arange(0, _OWN, layout=gl.SliceLayout(1, SCORES))
    position = context - num_queries + first_query + row // GROUP
    accumulated, total = _attend(own, ring, position, tiles, context, scale, WINDOW, SOFT_CAP)
    # A row that only pads the tile saw every key or none; what it read may have been NaN.
    is_seen = gl.expand_dims(total > 0, 1)
    result = gl.where(is_seen, accumulated / gl.expand_dims(gl.where(total > 0, total, 1.0), 1), 0.0)
    own.store(result.to(own.dtype))
    gl.store(output + at_row, own.load(COPY), mask=is_row)


@gluon.jit
def _ask_tile(cache, rows, slot, tile, arrived):
    """Ask for a tile of keys or values: its blocks lie at these rows of the cache."""
    KEYS: gl.constexpr = tile.shape[1]
    BLOCK_SIZE: gl.constexpr = cache.block_shape[0]
    HALVES: gl.constexpr = tile.shape[2] // HALF
    # Half a row of each key lies together: a tile is its halves, one after the other.
    COUNT: gl.constexpr = HALVES * KEYS // BLOCK_SIZE
    pieces = tile._reinterpret(tile.dtype, [tile.shape[0] * COUNT, BLOCK_SIZE, HALF], LINES)
    mbarrier.expect(arrived.index(slot), KEYS * HALVES * HALF * tile.dtype.primitive_bitwidth // 8)
    for block in gl.static_range(KEYS // BLOCK_SIZE):
        for half in gl.static_range(HALVES):
            tma.async_copy_global_to_shared(
                cache,
                [rows[block], half * HALF],
                arrived.index(slot),
                pieces.index(slot * COUNT + half * (KEYS // BLOCK_SIZE) + block),
            )


@gluon.jit
def _produce(cache, tile, arrived, is_free, blocks, tiles, BEHIND: gl.constexpr):
    """Keep a ring of keys or values full, from tile `top` down to `low`.

    Values are read one step after the keys of the same tile, that is BEHIND.
    """
    table, last_block, head_row, block_rows = blocks
    low, _, _, top = tiles
    STAGES: gl.constexpr = tile.shape[0]
    BLOCKS: gl.constexpr = tile.shape[1] // cache.block_shape[0]
    for index in range(0, top - low + 1):
        rows = ()
        for block in gl.static_range(BLOCKS):
            # The table may end with the context: past it the last block comes again, and is masked.
            at = gl.minimum((top - index) * BLOCKS + block, last_block)
            row = gl.load(table + at) * block_rows + head_row
            rows = rows + (row,)  # type: ignore[assignment]  # noqa: RUF005
        # The step that was the last to read what lies in the slot.
        step = index - STAGES + BEHIND
        if step >= 0:
            mbarrier.wait(is_free.index(step % STAGES), (step // STAGES) & 1)
        _ask_tile(cache, rows, index % STAGES, tile, arrived)


@gluon.jit
def _new_ring(TYPE: gl.constexpr, KEYS: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr):
    """(keys, values, barriers for the arrival of each, barriers for steps that have been done)."""
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, HEAD_DIM], TYPE)
    keys = gl.allocate_shared_memory(TYPE, [STAGES, KEYS, HEAD_DIM], TILE)
    values = gl.allocate_shared_memory(TYPE, [STAGES, KEYS, HEAD_DIM], TILE)
    k_arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    is_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_arrived.index(stage), count=1)
        mbarrier.init(v_arrived.index(stage), count=1)
        mbarrier.init(is_free.index(stage), count=_READERS)
    fence_async_shared()
    return keys, values, k_arrived, v_arrived, is_free


@gluon.jit(do_not_specialize=["first_sequence", "num_sequences", "table_stride", "block_rows"])
def prefill_kernel(
    q,
    output,
    k_cache,
    v_cache,
    query_starts,
    context_lens,
    block_tables,
    first_sequence,
    num_sequences,
    table_stride,
    block_rows,
    scale,
    NUM_KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFT_CAP: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """The caches are descriptors of rows [blocks * KV heads * BLOCK_SIZE, D] in boxes [BLOCK_SIZE, HALF].

    From a block to the next are `block_rows` of these rows.
    """
    QUERIES: gl.constexpr = _READERS * _OWN // GROUP
    TYPE: gl.constexpr = q.dtype.element_ty
    BLOCK_SIZE: gl.constexpr = k_cache.block_shape[0]
    kv_head = gl.program_id(0)
    sequence, token_begin, num_queries, first_query = locate(
        query_starts, first_sequence, num_sequences, QUERIES
    )
    if first_query >= num_queries:
        return
    context = gl.load(context_lens + sequence)
    first_position = context - num_queries + first_query
    # A row that only fills a graph's batch has no context; it reads one block, which its mask hides.
    last = gl.maximum(first_position + gl.minimum(QUERIES, num_queries - first_query) - 1, 0)
    low, edge, plain, top = tile_ranges(first_position, last, WINDOW, KEYS)
    tiles = (gl.to_tensor(low), gl.to_tensor(edge), plain, top)
    queries = gl.allocate_shared_memory(
        TYPE, [_READERS, _OWN, HEAD_DIM], gl.NVMMASharedLayout.get_default_for([_OWN, HEAD_DIM], TYPE)
    )
    ring = _new_ring(TYPE, KEYS, HEAD_DIM, STAGES)
    keys, values, k_arrived, v_arrived, is_free = ring
    place = (kv_head, token_begin, num_queries, first_query, context)
    blocks = (
        block_tables + sequence.to(gl.int64) * table_stride,
        gl.maximum(context - 1, 0) // BLOCK_SIZE,
        kv_head * BLOCK_SIZE,
        block_rows,
    )
    rows = (q, output, queries)
    # fmt: off
    gl.warp_specialize(
        [
            (_consume, (rows, ring, place, tiles, scale, NUM_KV_HEADS, GROUP, WINDOW, SOFT_CAP, 0)),
            (_consume, (rows, ring, place, tiles, scale, NUM_KV_HEADS, GROUP, WINDOW, SOFT_CAP, 1)),
            (_produce, (k_cache, keys, k_arrived, is_free, blocks, tiles, 0)),
            (_produce, (v_cache, values, v_arrived, is_free, blocks, tiles, 1)),
        ],
        [4, 1, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )
    # fmt: on
