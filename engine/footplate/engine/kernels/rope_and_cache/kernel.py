"""Splitting qkv, per-head norm, rotary positions and the KV write in one Triton launch."""

import torch
import triton
import triton.language as tl

from footplate.engine.kernels.ops import AttentionBatch, AttentionSpec
from footplate.engine.kernels.streamed_linear.kernel import load_sums
from footplate.engine.kernels.streamed_linear.parts import MOST_CHUNKS, Parts, readable

HALF_ELEMENTS = 1024  # of a program's heads: one 16-byte load a lane and half, for a 16-bit type
NUM_WARPS = 4


@triton.jit
def _head_weight(q_weight, k_weight, is_q, column, is_column):
    """Each head's norm weights at some columns, float32: those of q or of k. [heads, columns]."""
    of_q = tl.load(q_weight + column, mask=is_column, other=0.0).to(tl.float32)
    of_k = tl.load(k_weight + column, mask=is_column, other=0.0).to(tl.float32)
    return tl.where(is_q, of_q, of_k)


@triton.jit
def _norm_heads(first, second, low, high, eps, HEAD_DIM: tl.constexpr):
    """The norm over each head [heads, columns], given as halves, with its weights."""
    wide_first, wide_second = first.to(tl.float32), second.to(tl.float32)
    square = wide_first * wide_first + wide_second * wide_second
    inverse = tl.rsqrt(tl.sum(square, axis=1) / HEAD_DIM + eps)[:, None]
    return (wide_first * inverse * low).to(first.dtype), (wide_second * inverse * high).to(first.dtype)


@triton.jit
def _inverse_rms(squares, size, eps, COUNT: tl.constexpr, MOST: tl.constexpr):
    """1 / rms of a row of `size` elements whose squares were summed in COUNT chunks."""
    chunk = tl.arange(0, MOST)
    total = tl.sum(tl.load(squares + chunk, mask=chunk < COUNT, other=0.0), axis=0)
    return tl.rsqrt(total / size + eps)


@triton.jit
def _store_halves(at, first, second, kept, HEAD_DIM: tl.constexpr):
    """Both halves of heads, in the target's type."""
    tl.store(at, first.to(at.dtype.element_ty), mask=kept)
    tl.store(at + HEAD_DIM // 2, second.to(at.dtype.element_ty), mask=kept)


@triton.jit(do_not_specialize=["num_tokens"])
def _rope_and_cache_kernel(
    qkv,
    q_weight,
    k_weight,
    positions,
    slots,
    cos_sin,
    q_output,
    k_cache,
    v_cache,
    squares,
    num_tokens,
    qkv_stride,
    block_stride,
    eps,
    row_size,
    row_eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_NORM: tl.constexpr, NUM_SQUARES: tl.constexpr, MOST_SQUARES: tl.constexpr,
    HEADS: tl.constexpr, HALF: tl.constexpr,
    MOST: tl.constexpr, TILE: tl.constexpr, STEPS: tl.constexpr, SHARE: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    half = tl.arange(0, HALF)
    is_column = (half < HEAD_DIM // 2)[None, :]
    is_q = head < NUM_HEADS
    HEADS_AND_KEYS: tl.constexpr = NUM_HEADS + NUM_KV_HEADS
    is_v = head >= HEADS_AND_KEYS
    inside = is_column & (head < HEADS_AND_KEYS + NUM_KV_HEADS)
    column = head * HEAD_DIM + half[None, :]
    TYPE: tl.constexpr = q_output.dtype.element_ty
    # These come from no kernel of this layer.
    turn = cos_sin + tl.load(positions + token).to(tl.int64) * HEAD_DIM + half[None, :]
    cosine = tl.load(turn, mask=is_column, other=0.0)
    sine = tl.load(turn + HEAD_DIM // 2, mask=is_column, other=0.0)
    slot = tl.load(slots + token).to(tl.int64)
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    wide_first = load_sums(qkv, token, column, inside, qkv_stride, num_tokens, MOST, TILE, STEPS, SHARE)
    column += HEAD_DIM // 2
    wide_second = load_sums(qkv, token, column, inside, qkv_stride, num_tokens, MOST, TILE, STEPS, SHARE)
    if NUM_SQUARES > 0:
        inverse = _inverse_rms(squares + token * NUM_SQUARES, row_size, row_eps, NUM_SQUARES, MOST_SQUARES)
        wide_first, wide_second = wide_first * inverse, wide_second * inverse
    first, second = wide_first.to(TYPE), wide_second.to(TYPE)
    normed_first, normed_second = first, second
    if HAS_NORM:
        low = _head_weight(q_weight, k_weight, is_q, half[None, :], is_column)
        high = _head_weight(q_weight, k_weight, is_q, half[None, :] + HEAD_DIM // 2, is_column)
        normed_first, normed_second = _norm_heads(first, second, low, high, eps, HEAD_DIM)
    wide_first, wide_second = normed_first.to(tl.float32), normed_second.to(tl.float32)
    # Through qkv's type, as the definition rounds before the cache's type rounds again.
    turned_first = (wide_first * cosine - wide_second * sine).to(first.dtype)
    turned_second = (wide_second * cosine + wide_first * sine).to(first.dtype)
    q_at = q_output + (token * NUM_HEADS + head) * HEAD_DIM + half[None, :]
    _store_halves(q_at, turned_first, turned_second, inside & is_q, HEAD_DIM)
    kv_head = tl.where(is_v, head - NUM_KV_HEADS, head) - NUM_HEADS
    at = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * HEAD_DIM + kv_head * (BLOCK_SIZE * HEAD_DIM)
    # A padding row of a graph has slot -1 and leaves the cache alone.
    kept = inside & (head >= NUM_HEADS) & (slot >= 0)
    _store_halves(
        k_cache + at + half[None, :], turned_first, turned_second, kept & (head < HEADS_AND_KEYS), HEAD_DIM
    )
    _store_halves(v_cache + at + half[None, :], first, second, kept & is_v, HEAD_DIM)


def rope_and_cache(
    qkv: torch.Tensor | Parts,
    spec: AttentionSpec,
    batch: AttentionBatch,
    cos_sin: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    qk_norm: tuple[torch.Tensor, torch.Tensor, float] | None,
    *,
    use_pdl: bool = False,
) -> torch.Tensor:
    """The contract of `Ops.rope_and_cache`: writes k and v to their slots, returns q [T, H, D].

    A token whose slot is -1 writes nothing to the cache. Each block of a cache is contiguous.
    """
    k_cache, v_cache = kv
    block_size = k_cache.shape[2]
    first, stride, constants = readable(qkv, applies_norm=True)
    norm = qkv.norm if isinstance(qkv, Parts) else None
    if first.stride(-1) != 1 or not cos_sin.is_contiguous():
        raise ValueError("rope_and_cache needs rows and angles whose elements lie side by side")
    if k_cache.stride() != v_cache.stride() or not k_cache[0].is_contiguous():
        raise ValueError("rope_and_cache needs caches of one layout with contiguous blocks")
    q_weight, k_weight, eps = qk_norm or (None, None, 0.0)
    num_tokens, num_heads = qkv.shape[0], spec.num_heads + 2 * spec.num_kv_heads
    q = torch.empty((num_tokens, spec.num_heads, spec.head_dim), dtype=qkv.dtype, device=qkv.device)
    half = triton.next_power_of_2(spec.head_dim // 2)
    heads = max(1, min(HALF_ELEMENTS // half, triton.next_power_of_2(num_heads)))
    if num_tokens:
        _rope_and_cache_kernel[(num_tokens, triton.cdiv(num_heads, heads))](
            first,
            q_weight,
            k_weight,
            batch.positions,
            batch.slots,
            cos_sin,
            q,
            k_cache,
            v_cache,
            None if norm is None else norm.squares,
            num_tokens,
            stride,
            k_cache.stride(0),
            eps,
            1 if norm is None else norm.size,
            0.0 if norm is None else norm.eps,
            NUM_HEADS=spec.num_heads,
            NUM_KV_HEADS=spec.num_kv_heads,
            HEAD_DIM=spec.head_dim,
            BLOCK_SIZE=block_size,
            HAS_NORM=qk_norm is not None,
            NUM_SQUARES=0 if norm is None else norm.squares.shape[1],
            MOST_SQUARES=MOST_CHUNKS,
            HEADS=heads,
            HALF=half,
            USE_PDL=use_pdl,
            num_warps=NUM_WARPS,
            **constants,
            **({"launch_pdl": True} if use_pdl else {}),
        )
    return q
