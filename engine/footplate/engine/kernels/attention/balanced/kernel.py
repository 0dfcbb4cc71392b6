"""Decode attention as one stream of key tiles: every program takes an equal run of them, over rows and heads.

A program for each row and KV head leaves multiprocessors idle when the last ones end, and each starts with
nothing on its way. Here programs are as many as the device holds at once. All tiles of a step, row by row
and head by head, are one sequence, of which program p takes `share` in a row (as in Lean Attention,
arXiv:2405.10480); the loop runs over the seams, so the next row's keys are asked for while the last row's
are multiplied. A program ends at most two runs that others share: its first and its last. `merge_kernel`
puts those together.
"""

import triton
import triton.language as tl

from footplate.engine.kernels.attention.kernel import (
    _VECTOR,
    _empty_softmax,
    _load_rows,
    _product,
    _store_rows,
    _weigh,
)


@triton.jit
def _first_tile(context, WINDOW: tl.constexpr, KEYS: tl.constexpr):
    """The tile with the first key that a row of this length sees."""
    if WINDOW:
        return tl.maximum(context - WINDOW, 0) // KEYS
    else:
        return context * 0


@triton.jit
def _num_tiles(context, WINDOW: tl.constexpr, KEYS: tl.constexpr):
    """Tiles a row reads; one, with nothing in it, where the context is empty: it writes zeros."""
    return tl.maximum(tl.cdiv(context, KEYS) - _first_tile(context, WINDOW, KEYS), 1)


@triton.jit
def _shares(context_lens, num_rows, NUM_KV_HEADS: tl.constexpr, WINDOW: tl.constexpr, KEYS: tl.constexpr,
            MOST_ROWS: tl.constexpr, NUM_PROGRAMS: tl.constexpr):  # fmt: skip
    """(tiles up to and with each row, of one head [MOST_ROWS]; tiles of a program)."""
    row = tl.arange(0, MOST_ROWS)
    contexts = tl.load(context_lens + row, mask=row < num_rows, other=0)
    tiles = tl.where(row < num_rows, _num_tiles(contexts, WINDOW, KEYS), 0)
    ends = tl.cumsum(tiles, axis=0)
    return ends, tl.cdiv(tl.sum(tiles, axis=0) * NUM_KV_HEADS, NUM_PROGRAMS)


@triton.jit
def _find(ends, unit, num_rows, NUM_KV_HEADS: tl.constexpr, MOST_ROWS: tl.constexpr):
    """(row, tiles of one head before it) of a unit of the sequence; the last row for units past the end."""
    row = tl.minimum(tl.sum((ends * NUM_KV_HEADS <= unit).to(tl.int32), axis=0), num_rows - 1)
    return row, tl.sum(tl.where(tl.arange(0, MOST_ROWS) == row - 1, ends, 0), axis=0)


@triton.jit
def _place(ends, unit, context_lens, num_rows, NUM_KV_HEADS: tl.constexpr, WINDOW: tl.constexpr,
           KEYS: tl.constexpr, MOST_ROWS: tl.constexpr):  # fmt: skip
    """(row, KV head, tile, context of the row) of a unit of the sequence."""
    row, before = _find(ends, unit, num_rows, NUM_KV_HEADS, MOST_ROWS)
    context = tl.load(context_lens + row)
    tiles = _num_tiles(context, WINDOW, KEYS)
    kv_head = tl.minimum((unit - before * NUM_KV_HEADS) // tiles, NUM_KV_HEADS - 1)
    return row, kv_head, unit - before * NUM_KV_HEADS - kv_head * tiles, context


@triton.jit
def _advance(row, kv_head, tile, turns, num_rows, NUM_KV_HEADS: tl.constexpr):
    """(row, KV head, tile) behind these; the last row stays the last. `turns`: the run's tiles end here."""
    kv_head = tl.where(turns, kv_head + 1, kv_head)
    wraps = kv_head == NUM_KV_HEADS
    row = tl.minimum(tl.where(wraps, row + 1, row), num_rows - 1)
    return row, tl.where(wraps, 0, kv_head), tl.where(turns, 0, tile + 1)


@triton.jit
def _blocks_of(table, at_key, context, BLOCK_SIZE: tl.constexpr):
    """The block that each key lies in; 0 past the context."""
    return tl.load(table + at_key // BLOCK_SIZE, mask=at_key < context, other=0)


@triton.jit
def _store_run(
    output, partials, log_sums, accumulated, total, peak, at_head, slot, column, is_row, is_whole,
    HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """The result of a run that one program read whole, else this program's part of it for the merge."""
    result = accumulated / tl.where(total > 0, total, 1.0)[:, None]
    if is_whole:
        _store_rows(output + at_head[:, None] * HEAD_DIM + column[None, :], column, result, is_row, HEAD_DIM)
    else:
        _store_rows(partials + slot[:, None] * HEAD_DIM + column[None, :], column, result, is_row, HEAD_DIM)
        tl.store(log_sums + slot, peak + tl.log2(total), mask=is_row)


@triton.jit(do_not_specialize=["num_rows", "table_stride"])
def balanced_kernel(
    q, output, partials, log_sums, keys, values, context_lens, block_tables,
    num_rows, table_stride, block_stride, scale,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, WIDE: tl.constexpr, MOST_ROWS: tl.constexpr, NUM_PROGRAMS: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """partials [2 NUM_PROGRAMS, ROWS, HEAD_DIM] and log_sums [2 NUM_PROGRAMS, ROWS], both float32."""
    program = tl.program_id(0)
    # Lengths and tables were there before the layer's first kernel began.
    ends, share = _shares(context_lens, num_rows, NUM_KV_HEADS, WINDOW, KEYS, MOST_ROWS, NUM_PROGRAMS)
    total_units = tl.max(ends, axis=0) * NUM_KV_HEADS
    begin = program * share
    end = tl.minimum(begin + share, total_units)
    row, kv_head, tile, context = _place(
        ends, begin, context_lens, num_rows, NUM_KV_HEADS, WINDOW, KEYS, MOST_ROWS
    )
    tiles = _num_tiles(context, WINDOW, KEYS)
    key = tl.arange(0, KEYS)
    column = tl.arange(0, COLUMNS)
    lane = tl.arange(0, ROWS)
    is_row = lane < GROUP
    within = (key % BLOCK_SIZE)[:, None] * HEAD_DIM + column[None, :]
    block_vectors = block_stride // _VECTOR
    at_key = (_first_tile(context, WINDOW, KEYS) + tile) * KEYS + key
    block = _blocks_of(block_tables + row * table_stride, at_key, context, BLOCK_SIZE)
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    accumulated, total, peak = _empty_softmax(ROWS, COLUMNS)
    is_first = program >= 0
    run_begin = tile == 0
    for unit in tl.range(begin, end):
        # Where the next tile is, and its blocks: a tile ahead, so that no load of keys waits for the table.
        turns = tile + 1 == tiles
        next_row, next_head, next_tile = _advance(row, kv_head, tile, turns, num_rows, NUM_KV_HEADS)
        next_context = tl.load(context_lens + next_row)
        next_key = (_first_tile(next_context, WINDOW, KEYS) + next_tile) * KEYS + key
        next_block = _blocks_of(block_tables + next_row * table_stride, next_key, next_context, BLOCK_SIZE)
        at_head = row.to(tl.int64) * (NUM_KV_HEADS * GROUP) + kv_head * GROUP + lane
        own_q = _load_rows(q + at_head[:, None] * HEAD_DIM + column[None, :], column, is_row, True, HEAD_DIM)
        is_key = at_key < context
        at = (block * block_vectors).to(tl.int64)[:, None] * _VECTOR + within
        at += kv_head * (BLOCK_SIZE * HEAD_DIM)
        k = _load_rows(keys + at, column, is_key, True, HEAD_DIM)
        scores = _product(own_q, tl.trans(k), None, WIDE)
        position = tl.zeros([ROWS], dtype=tl.int32) + context - 1
        weights, total, peak, fade = _weigh(
            scores, total, peak, scale, at_key, position, is_key, 2 if WINDOW else 1, WINDOW, SOFT_CAP
        )
        v = _load_rows(values + at, column, is_key, True, HEAD_DIM)
        accumulated = _product(weights.to(own_q.dtype), v, accumulated * fade[:, None], WIDE)
        if turns | (unit + 1 == end):
            slot = (program * 2 + tl.where(is_first, 0, 1)) * ROWS + lane
            _store_run(
                output, partials, log_sums, accumulated, total, peak, at_head, slot, column, is_row,
                turns & run_begin, HEAD_DIM,
            )  # fmt: skip
            accumulated, total, peak = _empty_softmax(ROWS, COLUMNS)
        is_first = is_first & (turns == 0)
        run_begin = run_begin | turns
        row, kv_head, tile, at_key = next_row, next_head, next_tile, next_key
        context, block, tiles = next_context, next_block, _num_tiles(next_context, WINDOW, KEYS)


@triton.jit(do_not_specialize=["num_rows"])
def balanced_merge_kernel(
    output, partials, log_sums, context_lens, num_rows,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr,
    WINDOW: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, MOST_ROWS: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr, MOST_PARTS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Put runs together that begin in one program and end in others: a program here for a seam and head."""
    seam = tl.program_id(0) + 1  # between programs seam - 1 and seam
    lane = tl.program_id(1)
    ends, share = _shares(context_lens, num_rows, NUM_KV_HEADS, WINDOW, KEYS, MOST_ROWS, NUM_PROGRAMS)
    unit = seam * share
    row, kv_head, tile, context = _place(
        ends, unit, context_lens, num_rows, NUM_KV_HEADS, WINDOW, KEYS, MOST_ROWS
    )
    tiles = _num_tiles(context, WINDOW, KEYS)
    begin = unit - tile
    first = begin // share
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    # The first seam within a run merges all of it.
    if (unit >= tl.max(ends, axis=0) * NUM_KV_HEADS) | (begin == unit) | (first != seam - 1):
        return
    last = (begin + tiles - 1) // share
    part = tl.arange(0, MOST_PARTS)
    is_part = part <= last - first
    # In all programs but its first a run is what they begin with, and there too if it begins where they do.
    is_later = (part == 0) & (begin != first * share)
    slot = ((first + part) * 2 + is_later.to(tl.int32)) * ROWS + lane
    log_sum = tl.load(log_sums + slot, mask=is_part, other=float("-inf"))
    weights = tl.exp2(log_sum - tl.max(log_sum, axis=0))
    column = tl.arange(0, COLUMNS)
    parts = _load_rows(partials + slot[:, None] * HEAD_DIM + column[None, :], column, is_part, True, HEAD_DIM)
    result = tl.sum(parts * weights[:, None], axis=0) / tl.sum(weights, axis=0)
    at = output + (row.to(tl.int64) * (NUM_KV_HEADS * GROUP) + kv_head * GROUP + lane) * HEAD_DIM + column
    tl.store(at, result.to(output.dtype.element_ty), mask=column < HEAD_DIM)
