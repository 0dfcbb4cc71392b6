"""Paged attention in Triton: tiles of queries for prompts, splits of keys for decode rows.

Source: FlashAttention-2 (arXiv:2307.08691) for the online softmax over tiles, Flash-Decoding (Dao et al.,
2023) for splits of keys merged by their log-sum-exp, and Hydragen (arXiv:2402.05099) for reading a shared
prefix once for all rows on it. All heads of one KV head stand in one tile, so keys are read once for the
group. Scores are kept in base 2: exp2 is what the hardware has.
"""

import triton
import triton.language as tl

# Starts the running maximum: finite, so that a tile without visible keys makes no NaN from inf - inf.
_LOWEST = tl.constexpr(-1.0e30)
_LOG2_E = tl.constexpr(1.4426950408889634)
# Blocks lie on multiples of 16 bytes; counted in those, an offset fits 32 bits and costs one instruction.
_VECTOR = tl.constexpr(8)


@triton.jit
def _soft_capped(scores, CAP: tl.constexpr):
    """CAP tanh(scores / CAP), by an exponential that can't overflow."""
    ratio = scores / CAP
    small = tl.exp(-2.0 * tl.abs(ratio))
    return tl.where(ratio >= 0, CAP, -CAP) * (1.0 - small) / (1.0 + small)


@triton.jit
def _load_rows(at, column, is_row, MASKED: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Rows of HEAD_DIM elements, padded with zeros to the tile's columns; masked rows are all zeros."""
    PADDED: tl.constexpr = HEAD_DIM != column.shape[0]
    if MASKED and PADDED:
        return tl.load(at, mask=is_row[:, None] & (column < HEAD_DIM)[None, :], other=0.0)
    elif MASKED:
        return tl.load(at, mask=is_row[:, None], other=0.0)
    elif PADDED:
        return tl.load(at, mask=(column < HEAD_DIM)[None, :], other=0.0)
    else:
        return tl.load(at)


@triton.jit
def _store_rows(at, column, rows, is_row, HEAD_DIM: tl.constexpr):
    """What _load_rows reads, in the target's type."""
    inside = is_row[:, None] & (column < HEAD_DIM)[None, :]
    tl.store(at, rows.to(at.dtype.element_ty), mask=inside)


@triton.jit
def _product(a, b, onto, WIDE: tl.constexpr):
    """a b, added to `onto` if there is one; WIDE multiplies in float32."""
    if WIDE:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), onto, input_precision="ieee")
    else:
        return tl.dot(a, b, onto, input_precision="ieee")


@triton.jit
def _hidden(scores, at, position, is_key, MASK: tl.constexpr, WINDOW: tl.constexpr):
    """The scores, minus infinity where the mask says that a row does not see the key."""
    if MASK == 2:
        # A split may end within a tile, before the row's own position.
        visible = is_key[None, :] & (at[None, :] <= position[:, None])
        if WINDOW:
            visible = visible & (at[None, :] > position[:, None] - WINDOW)
        return tl.where(visible, scores, float("-inf"))
    elif MASK == 1:
        return tl.where(is_key[None, :], scores, float("-inf"))
    else:
        return scores


@triton.jit
def _weigh(
    scores, total, peak, scale, at, position, is_key,
    MASK: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax in base 2: (weights, their sum, maximum, factor of what was before)."""
    factor = scale * _LOG2_E
    if SOFT_CAP > 0:
        scores = _soft_capped(scores * scale, SOFT_CAP)
        factor = _LOG2_E
    scores = _hidden(scores, at, position, is_key, MASK, WINDOW)
    higher = tl.maximum(peak, tl.max(scores, axis=1) * factor)
    weights = tl.exp2(scores * factor - higher[:, None])
    fade = tl.exp2(peak - higher)
    return weights, total * fade + tl.sum(weights, axis=1), higher, fade


@triton.jit
def _attend(
    accumulated,
    total,
    peak,
    q,
    position,
    keys,
    values,
    table,
    begin,
    end,
    limit,
    block_stride,
    scale,
    # 0: all of [begin, end) is visible to every row; 1: up to `limit`; 2: causal and the window, too.
    MASK: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Take keys [begin, end) into the running softmax of each row: weighted values, weight sum, maximum.

    `keys` and `values` point to the KV head's first slot, `table` to the sequence's blocks; `begin` is the
    first key of a block. No key at or past `limit` is read. WIDE multiplies in float32.
    """
    column = tl.arange(0, q.shape[1])
    key = tl.arange(0, KEYS)
    # Tiles start where blocks do, so a key's place in its block is the same in all of them.
    within = (key % BLOCK_SIZE)[:, None] * HEAD_DIM + column[None, :]
    k_base = keys + within
    v_base = values + within
    block_vectors = block_stride // _VECTOR
    blocks = table + key // BLOCK_SIZE
    block = tl.load(blocks + begin // BLOCK_SIZE, mask=key < limit - begin, other=0)
    for start in tl.range(begin, end, KEYS):
        at = start + key
        is_key = at < limit
        row = (block * block_vectors).to(tl.int64)[:, None] * _VECTOR
        # The table is read a tile ahead, so that no load of keys waits for it.
        if MASK:
            ahead = start + KEYS
            block = tl.load(blocks + ahead // BLOCK_SIZE, mask=key < limit - ahead, other=0)
        else:
            block = tl.load(blocks + tl.minimum(start + KEYS, end - KEYS) // BLOCK_SIZE)
        k = _load_rows(k_base + row, column, is_key, MASK > 0, HEAD_DIM)
        scores = _product(q, tl.trans(k), None, WIDE)
        weights, total, peak, fade = _weigh(
            scores, total, peak, scale, at, position, is_key, MASK, WINDOW, SOFT_CAP
        )
        accumulated = accumulated * fade[:, None]
        v = _load_rows(v_base + row, column, is_key, MASK > 0, HEAD_DIM)
        accumulated = _product(weights.to(q.dtype), v, accumulated, WIDE)
    return accumulated, total, peak


@triton.jit
def _find_owner(starts, tile, first, count, PER_TILE: tl.constexpr):
    """Which of `count` owners from `first` on has the tile, if each has one tile more than its whole ones.

    starts[i] is where owner i's items begin; the answer's first tile is (starts[i] - starts[first]) //
    PER_TILE + i - first, as far as all before it can reach.
    """
    origin = tl.load(starts + first)
    low = first
    high = first + count
    while high - low > 1:
        middle = (low + high) // 2
        if (tl.load(starts + middle) - origin) // PER_TILE + middle - first <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _visible_ranges(first, last, WINDOW: tl.constexpr, KEYS: tl.constexpr):
    """How far the queries at positions first .. last see, as (begin, plain, diagonal).

    [begin, plain) cuts the window's far edge, [plain, diagonal) is visible to all, the rest is causal.
    """
    begin = 0
    plain = 0
    if WINDOW:
        begin = tl.maximum(first - WINDOW + 1, 0) // KEYS * KEYS
        plain = tl.minimum(tl.cdiv(tl.maximum(last - WINDOW + 1, 0), KEYS) * KEYS, last + 1)
    return begin, plain, tl.maximum((first + 1) // KEYS * KEYS, plain)


@triton.jit
def _empty_softmax(ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """What _attend starts from."""
    accumulated = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    return accumulated, tl.zeros([ROWS], dtype=tl.float32), tl.full([ROWS], _LOWEST, dtype=tl.float32)


@triton.jit(do_not_specialize=["first_sequence", "num_sequences", "table_stride"])
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
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    WIDE: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    QUERIES: tl.constexpr = ROWS // GROUP
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    kv_head = tl.program_id(0)
    # Last tiles first: they see the most keys, and the short ones fill the end of the launch.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    sequence = _find_owner(query_starts, tile, first_sequence, num_sequences, QUERIES)
    token_begin = tl.load(query_starts + sequence)
    num_queries = tl.load(query_starts + sequence + 1) - token_begin
    origin = tl.load(query_starts + first_sequence)
    first_query = (tile - (token_begin - origin) // QUERIES - sequence + first_sequence) * QUERIES
    if first_query >= num_queries:
        return
    row = tl.arange(0, ROWS)
    query = first_query + row // GROUP
    is_row = (row < QUERIES * GROUP) & (query < num_queries)
    at_head = (token_begin + query).to(tl.int64) * (NUM_KV_HEADS * GROUP) + kv_head * GROUP + row % GROUP
    column = tl.arange(0, COLUMNS)
    at_row = at_head[:, None] * HEAD_DIM + column[None, :]
    own_q = _load_rows(q + at_row, column, is_row, True, HEAD_DIM)
    before = tl.load(context_lens + sequence) - num_queries
    last = before + tl.minimum(first_query + QUERIES, num_queries) - 1
    begin, plain, diagonal = _visible_ranges(before + first_query, last, WINDOW, KEYS)
    table = block_tables + sequence.to(tl.int64) * table_stride
    keys += kv_head.to(tl.int64) * (BLOCK_SIZE * HEAD_DIM)
    values += kv_head.to(tl.int64) * (BLOCK_SIZE * HEAD_DIM)
    accumulated, total, peak = _empty_softmax(ROWS, COLUMNS)
    if WINDOW:
        accumulated, total, peak = _attend(
            accumulated, total, peak, own_q, before + query, keys, values, table, begin, plain, last + 1,
            block_stride, scale, 2, WINDOW, SOFT_CAP, HEAD_DIM, BLOCK_SIZE, KEYS, WIDE,
        )  # fmt: skip
    accumulated, total, peak = _attend(
        accumulated, total, peak, own_q, before + query, keys, values, table, plain, diagonal, last + 1,
        block_stride, scale, 0, WINDOW, SOFT_CAP, HEAD_DIM, BLOCK_SIZE, KEYS, WIDE,
    )  # fmt: skip
    accumulated, total, peak = _attend(
        accumulated, total, peak, own_q, before + query, keys, values, table, diagonal, last + 1, last + 1,
        block_stride, scale, 2, WINDOW, SOFT_CAP, HEAD_DIM, BLOCK_SIZE, KEYS, WIDE,
    )  # fmt: skip
    accumulated = accumulated / tl.where(total > 0, total, 1.0)[:, None]
    _store_rows(output + at_row, column, accumulated, is_row, HEAD_DIM)


@triton.jit
def _chunk_len(count, most, UNIT: tl.constexpr):
    """Keys a split takes when `count` are shared by at most `most` splits: a multiple of UNIT, never 0."""
    return tl.maximum(tl.cdiv(tl.cdiv(count, most), UNIT), 1) * UNIT


@triton.jit
def _first_key(
    context, prefix_lens, row, HAS_PREFIX: tl.constexpr, WINDOW: tl.constexpr, BLOCK_SIZE: tl.constexpr
):
    """(first key of the first block that the row's own pass reads, keys of its shared prefix)."""
    begin = 0
    prefix = 0
    if WINDOW:
        begin = tl.maximum(context - WINDOW, 0) // BLOCK_SIZE * BLOCK_SIZE
    if HAS_PREFIX:
        prefix = tl.load(prefix_lens + row)
        begin = tl.maximum(begin, prefix)
    return begin, prefix


@triton.jit
def _store_split(
    output, partials, log_sums, accumulated, total, peak, at_head, column, is_row, is_whole, split, used,
    num_slots, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """The rows' result where one split read all keys, else this split's part of it."""
    result = accumulated / tl.where(total > 0, total, 1.0)[:, None]
    if is_whole:
        at_row = at_head[:, None] * HEAD_DIM + column[None, :]
        _store_rows(output + at_row, column, result, is_row, HEAD_DIM)
    elif split < used:
        at_slot = at_head * num_slots + split
        at_part = partials + at_slot[:, None] * HEAD_DIM + column[None, :]
        _store_rows(at_part, column, result, is_row, HEAD_DIM)
        tl.store(log_sums + at_slot, peak + tl.log2(total), mask=is_row)


@triton.jit
def _merge_heads(
    output, partials, log_sums, first_head, num_slots, is_part, slot, heads, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """All heads of a KV head from their parts, as `merge_kernel` does it for one. Reads past the L1 cache."""
    at_head = first_head + heads
    kept = (heads < GROUP)[:, None] & is_part[None, :]
    at_slot = at_head[:, None] * num_slots + slot[None, :]
    log_sum = tl.load(log_sums + at_slot, mask=kept, other=float("-inf"), cache_modifier=".cg")
    peak = tl.maximum(tl.max(log_sum, axis=1), _LOWEST)  # of padding, too, no NaN
    weights = tl.exp2(log_sum - peak[:, None])
    column = tl.arange(0, COLUMNS)
    inside = kept[:, :, None] & (column < HEAD_DIM)[None, None, :]
    at_part = partials + at_slot[:, :, None] * HEAD_DIM + column[None, None, :]
    parts = tl.load(at_part, mask=inside, other=0.0, cache_modifier=".cg")
    whole = tl.sum(weights, axis=1)
    result = tl.sum(parts * weights[:, :, None], axis=1) / tl.where(whole > 0, whole, 1.0)[:, None]
    at_row = output + at_head[:, None] * HEAD_DIM + column[None, :]
    _store_rows(at_row, column, result, heads < GROUP, HEAD_DIM)


@triton.jit
def _merge_if_last(
    output, partials, log_sums, arrivals, token, kv_head, used, num_slots, NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, HEADS: tl.constexpr,
    SLOTS: tl.constexpr,
):  # fmt: skip
    """What the program does that leaves the last of a row's parts: merge them, in the order of splits.

    `arrivals` counts parts of each row and KV head, and is left at zero for the next launch.
    """
    arrival = arrivals + token * NUM_KV_HEADS + kv_head
    tl.debug_barrier()  # all of the program's part is written before it says so
    if tl.atomic_add(arrival, 1, sem="acq_rel") == used - 1:
        tl.store(arrival, 0)
        slot = tl.arange(0, SLOTS)
        first_head = token * (NUM_KV_HEADS * GROUP) + kv_head * GROUP
        _merge_heads(
            output, partials, log_sums, first_head, num_slots, slot < used, slot, tl.arange(0, HEADS), GROUP,
            HEAD_DIM, COLUMNS,
        )  # fmt: skip


# How many splits there are follows the batch: compiled in, each count would compile anew while serving.
@triton.jit(do_not_specialize=["table_stride", "num_splits", "num_slots"])
def decode_kernel(
    q,
    output,
    partials,
    log_sums,
    keys,
    values,
    context_lens,
    block_tables,
    prefix_lens,
    arrivals,
    table_stride,
    block_stride,
    scale,
    num_splits,
    num_slots,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, HAS_PREFIX: tl.constexpr,
    CHUNK: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WIDE: tl.constexpr,
    MERGE_HEADS: tl.constexpr, MERGE_SLOTS: tl.constexpr,  # 0: `merge_kernel` merges
    USE_PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(1).to(tl.int64)
    kv_head = tl.program_id(0)
    split = tl.program_id(2)
    context = tl.load(context_lens + token)
    begin, prefix = _first_key(context, prefix_lens, token, HAS_PREFIX, WINDOW, BLOCK_SIZE)
    chunk = _chunk_len(context - begin, num_splits, CHUNK)
    used = tl.cdiv(context - begin, chunk)
    # The first split of an empty row goes on, and writes zeros.
    if split >= tl.maximum(used, 1):
        return
    start = begin + split * chunk
    end = tl.minimum(start + chunk, context)
    table = block_tables + token * table_stride
    at_kv_head = kv_head.to(tl.int64) * (BLOCK_SIZE * HEAD_DIM)
    if USE_PDL:
        # Lengths, tables and all keys but this step's were there before the layer's first kernel began.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.arange(0, ROWS)
    is_row = row < GROUP
    column = tl.arange(0, COLUMNS)
    at_head = token * (NUM_KV_HEADS * GROUP) + kv_head * GROUP + row
    at_row = at_head[:, None] * HEAD_DIM + column[None, :]
    own_q = _load_rows(q + at_row, column, is_row, True, HEAD_DIM)
    accumulated, total, peak = _empty_softmax(ROWS, COLUMNS)
    MASK: tl.constexpr = 2 if WINDOW else 1
    position = tl.zeros([ROWS], dtype=tl.int32) + context - 1
    # The mask in all tiles, in one loop: a last tile on its own would wait with nothing else in flight.
    accumulated, total, peak = _attend(
        accumulated, total, peak, own_q, position, keys + at_kv_head, values + at_kv_head,
        table, start, end, end, block_stride, scale,
        MASK, WINDOW, SOFT_CAP, HEAD_DIM, BLOCK_SIZE, KEYS, WIDE,
    )  # fmt: skip
    is_whole = (used <= 1) & (prefix == 0)
    _store_split(
        output, partials, log_sums, accumulated, total, peak, at_head, column, is_row, is_whole, split, used,
        num_slots, HEAD_DIM,
    )  # fmt: skip
    if MERGE_SLOTS:
        if used > 1:
            _merge_if_last(
                output, partials, log_sums, arrivals, token, kv_head, used, num_slots, NUM_KV_HEADS, GROUP,
                HEAD_DIM, COLUMNS, MERGE_HEADS, MERGE_SLOTS,
            )  # fmt: skip


@triton.jit(do_not_specialize=["num_groups", "table_stride", "num_splits", "num_slots", "first_slot"])
def prefix_kernel(
    q,
    partials,
    log_sums,
    keys,
    values,
    block_tables,
    group_rows,
    group_starts,
    group_lens,
    num_groups,
    table_stride,
    block_stride,
    scale,
    num_splits,
    num_slots,
    first_slot,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    WIDE: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    MEMBERS: tl.constexpr = ROWS // GROUP
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    kv_head = tl.program_id(0)
    tile = tl.program_id(1)
    split = tl.program_id(2)
    group = _find_owner(group_starts, tile, 0, num_groups, MEMBERS)
    member_begin = tl.load(group_starts + group)
    num_members = tl.load(group_starts + group + 1) - member_begin
    first_member = (tile - member_begin // MEMBERS - group) * MEMBERS
    prefix = tl.load(group_lens + group)
    chunk = _chunk_len(prefix, num_splits, CHUNK)
    start = split * chunk
    if (first_member >= num_members) | (start >= prefix):
        return
    row = tl.arange(0, ROWS)
    member = first_member + row // GROUP
    is_row = (row < MEMBERS * GROUP) & (member < num_members)
    token = tl.load(group_rows + member_begin + member, mask=is_row, other=0).to(tl.int64)
    at_head = token * (NUM_KV_HEADS * GROUP) + kv_head * GROUP + row % GROUP
    column = tl.arange(0, COLUMNS)
    at_row = at_head[:, None] * HEAD_DIM + column[None, :]
    own_q = _load_rows(q + at_row, column, is_row, True, HEAD_DIM)
    accumulated, total, peak = _empty_softmax(ROWS, COLUMNS)
    end = tl.minimum(start + chunk, prefix)
    at_kv_head = kv_head.to(tl.int64) * (BLOCK_SIZE * HEAD_DIM)
    # Any member's table will do: they name the same blocks here.
    table = block_tables + tl.load(group_rows + member_begin).to(tl.int64) * table_stride
    accumulated, total, peak = _attend(
        accumulated, total, peak, own_q, row, keys + at_kv_head, values + at_kv_head, table,
        start, end, end, block_stride, scale, 1, 0, SOFT_CAP, HEAD_DIM, BLOCK_SIZE, KEYS, WIDE,
    )  # fmt: skip
    result = accumulated / total[:, None]
    at_slot = at_head * num_slots + first_slot + split
    _store_rows(partials + at_slot[:, None] * HEAD_DIM + column[None, :], column, result, is_row, HEAD_DIM)
    tl.store(log_sums + at_slot, peak + tl.log2(total), mask=is_row)


@triton.jit(do_not_specialize=["num_splits", "prefix_splits", "num_slots"])
def merge_kernel(
    output,
    partials,
    log_sums,
    context_lens,
    prefix_lens,
    num_splits,
    prefix_splits,
    num_slots,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_PREFIX: tl.constexpr,
    CHUNK: tl.constexpr,
    PREFIX_CHUNK: tl.constexpr,
    PADDED_SLOTS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Weigh a row's parts by the exponentials of their log-sums; a part alone was written by its split."""
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    context = tl.load(context_lens + token)
    begin, prefix = _first_key(context, prefix_lens, token, HAS_PREFIX, WINDOW, BLOCK_SIZE)
    used = tl.cdiv(context - begin, _chunk_len(context - begin, num_splits, CHUNK))
    if (used <= 1) & (prefix == 0):
        return
    at_head = token * NUM_HEADS + tl.program_id(1)
    slot = tl.arange(0, PADDED_SLOTS)
    is_part = slot < used
    if HAS_PREFIX:
        prefix_used = tl.cdiv(prefix, _chunk_len(prefix, prefix_splits, PREFIX_CHUNK))
        is_part = is_part | ((slot >= num_splits) & (slot < num_splits + prefix_used))
    log_sum = tl.load(log_sums + at_head * num_slots + slot, mask=is_part, other=float("-inf"))
    weights = tl.exp2(log_sum - tl.max(log_sum, axis=0))
    column = tl.arange(0, COLUMNS)
    at_part = (at_head * num_slots + slot)[:, None] * HEAD_DIM + column[None, :]
    parts = _load_rows(partials + at_part, column, is_part, True, HEAD_DIM)
    result = tl.sum(parts * weights[:, None], axis=0) / tl.sum(weights, axis=0)
    at = output + at_head * HEAD_DIM + column
    tl.store(at, result.to(output.dtype.element_ty), mask=column < HEAD_DIM)
