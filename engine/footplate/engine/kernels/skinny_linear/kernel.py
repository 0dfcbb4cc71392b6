"""Skinny products in Triton: norm, product and what follows it in one launch, weights read once.

Every kernel here is one loop, `_products`, over the columns of some weight rows, and an epilogue. The loop
multiplies raw x by the norm's weight and collects the sum of squares on the way, so that the norm needs no
pass of its own: its factor is the same for a whole row and comes last.

Weights depend on no earlier kernel. Under programmatic dependent launch a program therefore asks for its
first ones while the kernel before it still runs, and touches activations only after the wait.
"""

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from footplate.engine.kernels.ops import AttentionBatch
from footplate.engine.kernels.skinny_linear.reference import QkvLayer
from footplate.engine.kernels.skinny_linear.tiling import Tiling, choose, row_bucket

# How `_products` norms its rows.
_NOT = tl.constexpr(0)
_LAST = tl.constexpr(1)  # multiply, then scale: one pass
_FIRST = tl.constexpr(2)  # scale, then multiply: float16 would overflow otherwise
# Triton's interpreter multiplies the bits of bfloat16; products of 16-bit values are exact in float32.
_WIDENS = tl.constexpr(triton.knobs.runtime.interpret)
_ACTIVATIONS = ("silu", "gelu_tanh")


@triton.jit
def _begin(weight, first, second, N: tl.constexpr, K: tl.constexpr, PREFETCH: tl.constexpr):
    """Let the next kernel come, ask for some weight rows, wait for the kernel before.

    PREFETCH rows go to L2, half of them from row `first` on and half from `second`; rows are contiguous, so
    that a warp needs a single instruction for its share of the bytes.
    """
    tl.extra.cuda.gdc_launch_dependents()
    if PREFETCH > 0:
        HALF: tl.constexpr = PREFETCH // 2
        THREADS: tl.constexpr = tl.extra.cuda.num_threads()
        WIDTH: tl.constexpr = 32 if THREADS > 32 else 16  # threads that share a piece
        PIECES: tl.constexpr = THREADS // 2 // WIDTH
        NUM_BYTES: tl.constexpr = HALF * K * weight.dtype.element_ty.primitive_bitwidth // 8 // PIECES
        thread = tl.arange(0, THREADS)
        row = tl.where(thread < THREADS // 2, tl.minimum(first, N - HALF), tl.minimum(second, N - HALF))
        at = (weight + row.to(tl.int64) * K).to(tl.int64) + thread % (THREADS // 2) // WIDTH * NUM_BYTES
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
            "=r,l,r",
            [at, tl.full((THREADS,), NUM_BYTES, tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    tl.extra.cuda.gdc_wait()


@triton.jit
def _eighths(values, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sums of eight neighbours in each row of [ROWS, COLUMNS]: a thread loads all eight, so it adds alone."""
    return tl.sum(tl.reshape(values, (ROWS, COLUMNS // 8, 8)), axis=2)


@triton.jit
def _inverse_rms(x, row, is_row, eps, K: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr):
    """1 / rms of each row of x [M, K]. [ROWS]."""
    squares = tl.zeros((ROWS, BLOCK_K // 8), dtype=tl.float32)
    for start in tl.range(0, K, BLOCK_K):
        column = start + tl.arange(0, BLOCK_K)
        inside = is_row[:, None] & (column < K)[None, :]
        values = tl.load(x + row[:, None] * K + column[None, :], mask=inside, other=0.0).to(tl.float32)
        squares += _eighths(values * values, ROWS, BLOCK_K)
    return tl.rsqrt(tl.sum(squares, axis=1) / K + eps)


@triton.jit
def _products(
    x,
    norm_weight,
    weight,
    rows,
    num_rows,
    eps,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    NORM: tl.constexpr,
):
    """Some weight rows times all rows of x [M, K], normed or not: float32 [weight rows, ROWS]."""
    offset = tl.arange(0, BLOCK_K)
    row = tl.arange(0, ROWS).to(tl.int64)
    is_row = row < num_rows
    weight_at = weight + rows.to(tl.int64)[:, None] * K + offset[None, :]
    x_at = x + row[:, None] * K + offset[None, :]
    IS_VECTOR: tl.constexpr = ROWS == 1
    factor = tl.full((ROWS,), 1.0, tl.float32)
    if NORM == _FIRST:
        factor = _inverse_rms(x, row, is_row, eps, K, ROWS, BLOCK_K)
    squares = tl.zeros((ROWS, BLOCK_K // 8), dtype=tl.float32)
    if IS_VECTOR:
        total = tl.zeros((BLOCK_N, BLOCK_K // 8), dtype=tl.float32)
    else:
        total = tl.zeros((BLOCK_N, ROWS), dtype=tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        # Where the columns divide evenly these comparisons fold away.
        is_column = (offset < K - start) | (K % BLOCK_K == 0)
        w = tl.load(weight_at + start, mask=is_column[None, :], other=0.0, eviction_policy="evict_first")
        values = tl.load(x_at + start, mask=is_row[:, None] & is_column[None, :], other=0.0)
        if NORM != _NOT:
            gain = tl.load(norm_weight + start + offset, mask=is_column, other=0.0).to(tl.float32)
            wide = values.to(tl.float32)
            if NORM == _LAST:
                squares += _eighths(wide * wide, ROWS, BLOCK_K)
                values = wide * gain[None, :]
            else:
                values = wide * factor[:, None] * gain[None, :]
        if IS_VECTOR:
            total += _eighths(w.to(tl.float32) * values.to(tl.float32), BLOCK_N, BLOCK_K)
        else:
            values = values.to(w.dtype)
            if _WIDENS:
                w, values = w.to(tl.float32), values.to(tl.float32)
            total = tl.dot(w, tl.trans(values), total, input_precision="ieee")
    if IS_VECTOR:
        total = tl.sum(total, axis=1)[:, None]
    if NORM == _LAST:
        total = total * tl.rsqrt(tl.sum(squares, axis=1) / K + eps)[None, :]
    return total


@triton.jit
def _split_pairs(values, PAIRS: tl.constexpr, ROWS: tl.constexpr):
    """[2 PAIRS, ROWS] with the two of a pair side by side, as two of [ROWS, PAIRS]."""
    return tl.split(tl.permute(tl.reshape(values, (PAIRS, 2, ROWS)), (2, 0, 1)))


@triton.jit(do_not_specialize=["num_rows"])
def _linear_kernel(
    x,
    norm_weight,
    weight,
    output,
    num_rows,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
    NORM: tl.constexpr,
    ADDS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    begin = tl.program_id(0) * BLOCK_N
    n = begin + tl.arange(0, BLOCK_N)
    rows = tl.minimum(n, N - 1)
    if USE_PDL:
        _begin(weight, begin, begin + PREFETCH // 2, N, K, PREFETCH)
    row = tl.arange(0, ROWS).to(tl.int64)
    at = output + row[:, None] * N + n[None, :]
    inside = (row < num_rows)[:, None] & (n < N)[None, :]
    if ADDS:  # fetched before the loop, so that it is there when the loop ends
        before = tl.load(at, mask=inside, other=0.0)
    total = _products(x, norm_weight, weight, rows, num_rows, eps, K, ROWS, BLOCK_N, BLOCK_K, STAGES, NORM)
    result = tl.trans(total)
    if ADDS:
        result += before.to(tl.float32)
    tl.store(at, result.to(output.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _gate_up_kernel(
    x,
    norm_weight,
    weight,
    output,
    num_rows,
    eps,
    F: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
    NORM: tl.constexpr,
    IS_GELU: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    PAIRS: tl.constexpr = BLOCK_N // 2
    begin = tl.program_id(0) * PAIRS
    member = tl.arange(0, BLOCK_N)
    rows = tl.minimum(begin + member // 2, F - 1) + (member % 2) * F
    if USE_PDL:
        _begin(weight, begin, F + begin, 2 * F, K, PREFETCH)
    total = _products(x, norm_weight, weight, rows, num_rows, eps, K, ROWS, BLOCK_N, BLOCK_K, STAGES, NORM)
    gate, up = _split_pairs(total, PAIRS, ROWS)
    # x sigmoid(2 z) is x (1 + tanh z) / 2, without the digits that 1 + tanh loses for negative z.
    inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate) if IS_GELU else gate
    result = gate * tl.sigmoid(inner) * up
    row = tl.arange(0, ROWS).to(tl.int64)
    f = begin + tl.arange(0, PAIRS)
    inside = (row < num_rows)[:, None] & (f < F)[None, :]
    tl.store(output + row[:, None] * F + f[None, :], result.to(output.dtype.element_ty), mask=inside)


@triton.jit
def _norm_heads(first, second, gains, pair, is_pair, eps, D: tl.constexpr):
    """The norm over a head of both its halves [ROWS, PAIRS]."""
    squares = tl.where(is_pair[None, :], first * first + second * second, 0.0)
    inverse = tl.rsqrt(tl.sum(squares, axis=1) / D + eps)[:, None]
    low = tl.load(gains + pair, mask=is_pair, other=0.0).to(tl.float32)
    high = tl.load(gains + D // 2 + pair, mask=is_pair, other=0.0).to(tl.float32)
    return first * inverse * low[None, :], second * inverse * high[None, :]


@triton.jit(do_not_specialize=["num_rows"])
def _qkv_kernel(
    x,
    norm_weight,
    weight,
    q_weight,
    k_weight,
    positions,
    slots,
    cos_sin,
    q_output,
    k_cache,
    v_cache,
    num_rows,
    block_stride,
    eps,
    qk_eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
    NORM: tl.constexpr,
    HAS_QK_NORM: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    PAIRS: tl.constexpr = BLOCK_N // 2
    HALF: tl.constexpr = D // 2
    PARTS: tl.constexpr = (HALF + PAIRS - 1) // PAIRS
    head, begin = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS * PAIRS
    member = tl.arange(0, BLOCK_N)
    rows = head * D + tl.minimum(begin + member // 2, HALF - 1) + member % 2 * HALF
    if USE_PDL:
        at_pair = head * D + begin
        _begin(weight, at_pair, at_pair + HALF, (HEADS + 2 * KV_HEADS) * D, K, PREFETCH)
    row = tl.arange(0, ROWS).to(tl.int64)
    pair = begin + tl.arange(0, PAIRS)
    is_row, is_pair = row < num_rows, pair < HALF
    inside = is_row[:, None] & is_pair[None, :]
    # Fetched before the loop, so that they are there when the loop ends. Values turn by no angle.
    slot = tl.load(slots + row, mask=is_row, other=-1).to(tl.int64)
    turn = cos_sin + tl.load(positions + row, mask=is_row, other=0).to(tl.int64)[:, None] * D + pair[None, :]
    cosine = tl.load(turn, mask=inside & (head < HEADS + KV_HEADS), other=1.0)
    sine = tl.load(turn + HALF, mask=inside & (head < HEADS + KV_HEADS), other=0.0)
    total = _products(x, norm_weight, weight, rows, num_rows, eps, K, ROWS, BLOCK_N, BLOCK_K, STAGES, NORM)
    first, second = _split_pairs(total, PAIRS, ROWS)
    if HAS_QK_NORM:
        if head < HEADS + KV_HEADS:
            gains = q_weight if head < HEADS else k_weight
            first, second = _norm_heads(first, second, gains, pair, is_pair, qk_eps, D)
    first, second = first * cosine - second * sine, second * cosine + first * sine
    if head < HEADS:
        at = q_output + (row * HEADS + head)[:, None] * D + pair[None, :]
        tl.store(at, first.to(q_output.dtype.element_ty), mask=inside)
        tl.store(at + HALF, second.to(q_output.dtype.element_ty), mask=inside)
    else:
        is_value = head >= HEADS + KV_HEADS
        kv_head = head - HEADS - tl.where(is_value, KV_HEADS, 0)
        offset = slot // BLOCK_SIZE * block_stride + (kv_head * BLOCK_SIZE + slot % BLOCK_SIZE) * D
        cache = v_cache if is_value else k_cache
        at = cache + offset[:, None] + pair[None, :]
        kept = inside & (slot >= 0)[:, None]
        tl.store(at, first.to(k_cache.dtype.element_ty), mask=kept)
        tl.store(at + HALF, second.to(k_cache.dtype.element_ty), mask=kept)


def _norm_mode(x: torch.Tensor) -> int:
    return int(_FIRST.value if x.dtype is torch.float16 and x.shape[0] > 1 else _LAST.value)


def _check(x: torch.Tensor, weight: torch.Tensor) -> None:
    if not (x.is_contiguous() and weight.is_contiguous()):
        raise ValueError("a skinny product needs contiguous rows and weights")
    if x.dtype is not weight.dtype or x.shape[1] != weight.shape[1]:
        raise ValueError(f"rows {x.dtype} {tuple(x.shape)} don't fit {weight.dtype} {tuple(weight.shape)}")


def _options(
    op: str, x: torch.Tensor, weight: torch.Tensor, tiling: Tiling | None, use_pdl: bool
) -> dict[str, Any]:
    """Keyword arguments that every kernel of this file takes."""
    _check(x, weight)
    num_outputs, num_inputs = weight.shape
    rows = row_bucket(x.shape[0])
    if tiling is None:
        tiling = choose(op, num_outputs, num_inputs, rows)
        if weight.element_size() > 2:  # as many bytes in shared memory as with 16 bits
            stages = max(tiling.num_stages // 2, 1)  # the unit's inputs are kept there beside what comes
            tiling = replace(tiling, block_k=tiling.block_k // 2, num_stages=stages)
    # Each warp asks for an equal piece of whole 16-byte words.
    row_bytes = num_inputs * weight.element_size()
    can_prefetch = row_bytes % (16 * tiling.num_warps) == 0 and tiling.prefetch <= num_outputs
    return {
        "K": num_inputs,
        "ROWS": rows,
        "BLOCK_N": tiling.block_n,
        "BLOCK_K": tiling.block_k,
        "STAGES": tiling.num_stages,
        "PREFETCH": min(tiling.prefetch, tiling.block_n) if can_prefetch else 0,
        "USE_PDL": use_pdl,
        "num_warps": tiling.num_warps,
        **({"launch_pdl": True} if use_pdl else {}),
    }


def norm_linear(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    out_dtype: torch.dtype | None = None,
    *,
    use_pdl: bool = False,
    tiling: Tiling | None = None,
) -> torch.Tensor:
    """rms_norm(x) weightᵀ for x [M, K], M up to 64, and weight [N, K]. [M, N] in x's type or `out_dtype`."""
    options = _options("norm_linear", x, weight, tiling, use_pdl)
    num_outputs = weight.shape[0]
    output = torch.empty((x.shape[0], num_outputs), dtype=out_dtype or x.dtype, device=x.device)
    grid = (triton.cdiv(num_outputs, options["BLOCK_N"]),)
    _linear_kernel[grid](
        x,
        norm_weight,
        weight,
        output,
        x.shape[0],
        eps,
        N=num_outputs,
        NORM=_norm_mode(x),
        ADDS=False,
        **options,
    )
    return output


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    out_dtype: torch.dtype | None = None,
    *,
    use_pdl: bool = False,
    tiling: Tiling | None = None,
) -> torch.Tensor:
    """x weightᵀ for x [M, K], M up to 64, and weight [N, K]. [M, N] in x's type or `out_dtype`."""
    output = torch.empty((x.shape[0], weight.shape[0]), dtype=out_dtype or x.dtype, device=x.device)
    return _plain(x, weight, output, _options("linear", x, weight, tiling, use_pdl), adds=False)


def linear_add(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor,
    *,
    use_pdl: bool = False,
    tiling: Tiling | None = None,
) -> torch.Tensor:
    """residual [M, N] += x weightᵀ in place, rounded once, for x [M, K] and M up to 64. Returns residual."""
    if not residual.is_contiguous() or residual.shape != (x.shape[0], weight.shape[0]):
        raise ValueError(f"linear_add can't add {len(weight)} columns to {tuple(residual.shape)}")
    return _plain(x, weight, residual, _options("linear_add", x, weight, tiling, use_pdl), adds=True)


def _plain(
    x: torch.Tensor, weight: torch.Tensor, output: torch.Tensor, options: dict[str, Any], *, adds: bool
) -> torch.Tensor:
    num_outputs = weight.shape[0]
    grid = (triton.cdiv(num_outputs, options["BLOCK_N"]),)
    _linear_kernel[grid](
        x, None, weight, output, x.shape[0], 0.0, N=num_outputs, NORM=_NOT.value, ADDS=adds, **options
    )
    return output


def norm_gate_up(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    kind: str,
    *,
    use_pdl: bool = False,
    tiling: Tiling | None = None,
) -> torch.Tensor:
    """act(gate) * up of rms_norm(x) weightᵀ for x [M, K], M up to 64, and weight [2 F, K]. [M, F].

    Raises:
        ValueError: kind is neither `silu` nor `gelu_tanh`.
    """
    if kind not in _ACTIVATIONS:
        raise ValueError(f"activation {kind!r} is unknown; it must be silu or gelu_tanh")
    options = _options("norm_gate_up", x, weight, tiling, use_pdl)
    size = weight.shape[0] // 2
    output = torch.empty((x.shape[0], size), dtype=x.dtype, device=x.device)
    _gate_up_kernel[(triton.cdiv(size, options["BLOCK_N"] // 2),)](
        x,
        norm_weight,
        weight,
        output,
        x.shape[0],
        eps,
        F=size,
        NORM=_norm_mode(x),
        IS_GELU=kind == "gelu_tanh",
        **options,
    )
    return output


def norm_qkv_rope_cache(
    x: torch.Tensor,
    layer: QkvLayer,
    batch: AttentionBatch,
    kv: tuple[torch.Tensor, torch.Tensor],
    *,
    use_pdl: bool = False,
    tiling: Tiling | None = None,
) -> torch.Tensor:
    """Norm, product, per-head norm, rotation and KV write for x [M, K], M up to 64. Returns q [M, H, D].

    Row m has position batch.positions[m] and writes to batch.slots[m]; slot -1 writes nothing.
    """
    k_cache, v_cache = kv
    if k_cache.stride() != v_cache.stride() or not k_cache[0].is_contiguous():
        raise ValueError("norm_qkv_rope_cache needs caches of one layout with contiguous blocks")
    spec = layer.spec
    options = _options("norm_qkv_rope_cache", x, layer.weight, tiling, use_pdl)
    half = spec.head_dim // 2
    if layer.qk_norm is not None:  # the norm sums over a head, so one program must hold all of it
        tile = options["BLOCK_N"] * options["BLOCK_K"]
        options["BLOCK_N"] = 2 * triton.next_power_of_2(half)
        options["BLOCK_K"] = max(64, min(tile // options["BLOCK_N"], options["BLOCK_K"]))
    q_weight, k_weight, qk_eps = layer.qk_norm or (None, None, 0.0)
    q = torch.empty((x.shape[0], spec.num_heads, spec.head_dim), dtype=x.dtype, device=x.device)
    num_heads = spec.num_heads + 2 * spec.num_kv_heads
    _qkv_kernel[(num_heads * triton.cdiv(half, options["BLOCK_N"] // 2),)](
        x,
        layer.norm_weight,
        layer.weight,
        q_weight,
        k_weight,
        batch.positions,
        batch.slots,
        layer.cos_sin,
        q,
        k_cache,
        v_cache,
        x.shape[0],
        k_cache.stride(0),
        layer.eps,
        qk_eps,
        HEADS=spec.num_heads,
        KV_HEADS=spec.num_kv_heads,
        D=spec.head_dim,
        BLOCK_SIZE=k_cache.shape[2],
        NORM=_norm_mode(x),
        HAS_QK_NORM=layer.qk_norm is not None,
        **options,
    )
    return q
