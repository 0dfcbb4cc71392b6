"""Drawing tokens in Triton, without a sort: arg-max over pieces of the vocabulary, then over the pieces.

Two launches serve greedy and plainly drawn rows: `_scan_kernel` splits every row over many programs, so that
one row alone is not slow, and `_finish_kernel` takes the best of their answers.
"""

import torch
import triton
import triton.language as tl

from footplate.engine.kernels.sample.reference import DrawState
from footplate.engine.sampling.sampler import MIN_TEMPERATURE

CHUNK = 4096  # ids a program scans

_NEVER = tl.constexpr(float("-inf"))
_MIN_TEMPERATURE = tl.constexpr(MIN_TEMPERATURE)
_NO_ID = tl.constexpr(2147483647)


@triton.jit
def _mixed(x):
    """MurmurHash3's 32-bit finaliser, as sampling/noise has it. uint32."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _draw_key(seed, position):
    """The 64 bits of `noise.draw_key`, low half and high half, uint32."""
    z = seed.to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15
    z += (position.to(tl.int64) + 1).to(tl.uint64, bitcast=True) * 0xD1B54A32D192ED03
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = z ^ (z >> 31)
    return z.to(tl.uint32), (z >> 32).to(tl.uint32)


@triton.jit
def _gumbel(token_ids, seed, position):
    """The noise of `noise.gumbel`: its bits exactly, its logarithms to the last place. float32."""
    low, high = _draw_key(seed, position)
    x = _mixed(token_ids.to(tl.uint32, bitcast=True) * 0x9E3779B1 ^ low)
    x = _mixed(x + high)
    uniform = ((x >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return -tl.log(-tl.log(uniform))


@triton.jit
def _scan_kernel(
    logits,
    rows,
    lengths,
    temperatures,
    seeds,
    best_scores,
    best_ids,
    logits_stride,
    vocab_size,
    num_chunks,
    CHUNK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    index, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.load(rows + index).to(tl.int64)
    is_real = row >= 0
    token_ids = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = (token_ids < vocab_size) & is_real
    scores = tl.load(logits + index * logits_stride + token_ids, mask=inside, other=_NEVER).to(tl.float32)
    temperature = tl.load(temperatures + row, mask=is_real, other=0.0)
    if temperature >= _MIN_TEMPERATURE:
        seed, position = tl.load(seeds + row), tl.load(lengths + row)
        scores = tl.div_rn(scores, temperature) + _gumbel(token_ids, seed, position)
    score, at = tl.max(scores, axis=0, return_indices=True)
    tl.store(best_scores + index * num_chunks + chunk, score)
    tl.store(best_ids + index * num_chunks + chunk, chunk * CHUNK + at)


@triton.jit
def _finish_kernel(
    rows,
    tokens,
    lengths,
    best_scores,
    best_ids,
    output,
    tokens_stride,
    num_chunks,
    CHUNKS: tl.constexpr,
    APPENDS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.load(rows + index).to(tl.int64)
    is_real = row >= 0
    chunk = tl.arange(0, CHUNKS)
    scores = tl.load(best_scores + index * num_chunks + chunk, mask=chunk < num_chunks, other=_NEVER)
    ids = tl.load(best_ids + index * num_chunks + chunk, mask=chunk < num_chunks, other=_NO_ID)
    best = tl.max(scores, axis=0)
    token = tl.min(tl.where(scores == best, ids, _NO_ID), axis=0)
    token = tl.where(is_real, token, -1)
    tl.store(output + index, token)
    if APPENDS:
        length = tl.load(lengths + row, mask=is_real, other=0)
        tl.store(tokens + row * tokens_stride + length, token, mask=is_real)
        tl.store(lengths + row, length + 1, mask=is_real)


def sample(
    logits: torch.Tensor,
    rows: torch.Tensor,
    state: DrawState,
    *,
    appends: bool = False,
    use_pdl: bool = False,
) -> torch.Tensor:
    """Ids [R] int32 drawn from logits [R, V] by the parameters of `rows` [R] int32; row -1 gets -1.

    Rows of logits may lie apart, elements may not. No value of a row depends on another row, and nothing on
    the host depends on the parameters, so a captured graph serves any mixture. See the reference for the
    order. With `appends` the ids enter the token table and lengths grow by one; a row then stands at most
    once in `rows`.
    """
    if logits.stride(1) != 1:
        raise ValueError("sample needs logits whose elements lie side by side")
    num_rows, vocab_size = logits.shape
    device = logits.device
    num_chunks = triton.cdiv(vocab_size, CHUNK)
    scores = torch.empty((num_rows, num_chunks), dtype=torch.float32, device=device)
    ids = torch.empty((num_rows, num_chunks), dtype=torch.int32, device=device)
    output = torch.empty(num_rows, dtype=torch.int32, device=device)
    if not num_rows:
        return output
    launch = {"USE_PDL": use_pdl, **({"launch_pdl": True} if use_pdl else {})}
    _scan_kernel[(num_rows, num_chunks)](
        logits,
        rows,
        state.lengths,
        state.temperature,
        state.seeds,
        scores,
        ids,
        logits.stride(0),
        vocab_size,
        num_chunks,
        CHUNK=CHUNK,
        num_warps=8,
        **launch,
    )
    _finish_kernel[(num_rows,)](
        rows,
        state.tokens,
        state.lengths,
        scores,
        ids,
        output,
        state.tokens.stride(0),
        num_chunks,
        CHUNKS=triton.next_power_of_2(num_chunks),
        APPENDS=appends,
        num_warps=1,
        **launch,
    )
    return output
