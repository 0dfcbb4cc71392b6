"""Drawing tokens in Triton, without a sort: many programs scan a row, one program ends it.

Greedy and plainly drawn rows need two launches: `_scan_kernel` takes the arg-max of each chunk of a row and
`_finish_kernel` that of the chunks. For rows that top-k, top-p or min-p truncate the scan only finds the best
score of each group of ids. From these follows a bound below which no token survives; `_gather_kernel` lists
the few tokens above it, and the finish finds the exact cut among them by bisection over the bits of a score.
Where a chunk has more such tokens than its list holds, the finish goes through the logits again instead.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from footplate.engine.kernels.sample.reference import DrawState
from footplate.engine.sampling.sampler import MIN_TEMPERATURE

CHUNK = 4096  # ids a program scans
GROUP = 256  # ids of which the scan keeps the best score
GATHER_PROGRAMS = 1024  # several for each multiprocessor
LISTED = 256  # tokens of a chunk that the gather may list; more are rare and cost time only
_TILE = 2048  # tokens that the finish looks at together
_SLACK = tl.constexpr(0.01)  # nats by which a bound stays below what rounding could move

_NEVER = tl.constexpr(float("-inf"))
_MIN_TEMPERATURE = tl.constexpr(MIN_TEMPERATURE)
_HARDLY = tl.constexpr(-1.0e30)  # finite: a row of nothing else must not subtract infinities
_NO_ID = tl.constexpr(2147483647)


@triton.jit
def _numbers(logits):
    """Logits as float32, in which what is no number never wins."""
    scores = logits.to(tl.float32)
    return tl.where(scores == scores, scores, _HARDLY)


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
def _settings(row, is_real, temperatures, top_ks, top_ps, min_ps):
    """A row's parameters, and whether they truncate; padding is greedy."""
    temperature = tl.load(temperatures + row, mask=is_real, other=0.0)
    top_k = tl.load(top_ks + row, mask=is_real, other=0)
    top_p = tl.load(top_ps + row, mask=is_real, other=1.0)
    min_p = tl.load(min_ps + row, mask=is_real, other=0.0)
    truncates = (temperature >= _MIN_TEMPERATURE) & ((top_k > 0) | (top_p < 1.0) | (min_p > 0.0))
    return temperature, top_k, top_p, min_p, truncates


@triton.jit
def _floor(best, min_p):
    """The lowest score that min-p keeps."""
    return best + tl.where(min_p > 0.0, tl.log(tl.maximum(min_p, 1e-37)), _NEVER)


@triton.jit
def _rank(scores):
    """Integers ordered as float32 scores are."""
    bits = (scores + 0.0).to(tl.int32, bitcast=True)  # -0 becomes 0
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _kth_largest(ranks, k):
    """The largest integer that at least k of `ranks` reach."""
    low, high = tl.min(ranks, axis=0), tl.max(ranks, axis=0) + 1
    while high - low > 1:
        middle = (low + high) // 2
        if tl.sum((ranks >= middle).to(tl.int32), axis=0) >= k:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _scan_kernel(
    logits,
    rows,
    lengths,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    seeds,
    best_scores,
    best_ids,
    group_scores,
    logits_stride,
    vocab_size,
    num_chunks,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    index, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.load(rows + index).to(tl.int64)
    is_real = row >= 0
    temperature, _, _, _, truncates = _settings(row, is_real, temperatures, top_ks, top_ps, min_ps)
    token_ids = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = (token_ids < vocab_size) & is_real
    scores = _numbers(tl.load(logits + index * logits_stride + token_ids, mask=inside, other=_NEVER))
    is_drawn = temperature >= _MIN_TEMPERATURE
    if is_drawn:
        scores = tl.div_rn(scores, temperature)
    if truncates:
        GROUPS: tl.constexpr = CHUNK // GROUP
        group = (index * num_chunks + chunk) * GROUPS + tl.arange(0, GROUPS)
        tl.store(group_scores + group, tl.max(tl.reshape(scores, (GROUPS, GROUP)), axis=1))
    else:
        if is_drawn:
            scores += _gumbel(token_ids, tl.load(seeds + row), tl.load(lengths + row))
        score, at = tl.max(scores, axis=0, return_indices=True)
        tl.store(best_scores + index * num_chunks + chunk, score)
        tl.store(best_ids + index * num_chunks + chunk, chunk * CHUNK + at)


@triton.jit(do_not_specialize=["vocab_size", "num_chunks", "per_program"])
def _gather_kernel(
    logits,
    rows,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    group_scores,
    bounds,
    masses,
    counts,
    listed_scores,
    listed_ids,
    logits_stride,
    vocab_size,
    num_chunks,
    num_groups,
    per_program,
    CHUNK: tl.constexpr,
    GROUPS: tl.constexpr,
    LISTED: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """List the tokens of some chunks that may survive; sum the mass that top-p is a share of."""
    index, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * per_program
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.load(rows + index).to(tl.int64)
    temperature, top_k, top_p, min_p, truncates = _settings(
        row, row >= 0, temperatures, top_ks, top_ps, min_ps
    )
    if truncates:
        group = tl.arange(0, GROUPS)
        inside = group < num_groups
        groups = tl.load(group_scores + index * num_groups + group, mask=inside, other=_NEVER)
        best = tl.max(groups, axis=0)
        floor = _floor(best, min_p)
        bound = floor
        if (top_k > 0) & (top_k <= num_groups):
            # So many groups have a token at or above this score, so the k best tokens have.
            kth = _kth_largest(_rank(groups), top_k)
            bound = tl.maximum(bound, tl.max(tl.where(_rank(groups) <= kth, groups, _NEVER), axis=0))
        if top_k <= 0:
            # All tokens below this together hold less than 1 - top_p.
            rest = tl.log(vocab_size.to(tl.float32)) - tl.log(tl.maximum(1.0 - top_p, 1e-30))
            bound = tl.where(top_p < 1.0, tl.maximum(bound, best - rest - _SLACK), bound)
        for chunk in range(first, tl.minimum(first + per_program, num_chunks)):
            token_ids = chunk * CHUNK + tl.arange(0, CHUNK)
            at_logits = logits + index * logits_stride + token_ids
            scores = _numbers(tl.load(at_logits, mask=token_ids < vocab_size, other=_NEVER))
            scores = tl.div_rn(scores, temperature)
            place = index * num_chunks + chunk
            tl.store(masses + place, tl.sum(tl.where(scores >= floor, tl.exp(scores - best), 0.0), axis=0))
            may_survive = (scores >= bound) & (scores > _NEVER)
            at = tl.cumsum(may_survive.to(tl.int32), axis=0) - 1
            fits = may_survive & (at < LISTED)
            tl.store(listed_scores + place * LISTED + at, scores, mask=fits)
            tl.store(listed_ids + place * LISTED + at, token_ids, mask=fits)
            tl.store(counts + place, tl.sum(may_survive.to(tl.int32), axis=0))
        if first == 0:
            tl.store(bounds + 2 * index, bound)
            tl.store(bounds + 2 * index + 1, best)


@triton.jit
def _tokens_at(
    row_tokens,
    begin,
    CHUNKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    LISTED: tl.constexpr,
):
    """(scores, ids) [CHUNKS, COLUMNS] of one row, columns from `begin` on of each of its chunks.

    row_tokens says where they are: in the lists, or where these were too short in the logits. A score of
    -inf stands for no token, or one that can't survive.
    """
    logits, lists, is_listed, bound, temperature, vocab_size = row_tokens
    listed_scores, listed_ids, counts = lists
    chunk, column = tl.arange(0, CHUNKS)[:, None], begin + tl.arange(0, COLUMNS)[None, :]
    if is_listed:
        inside = column < counts[:, None]
        ids = tl.load(listed_ids + chunk * LISTED + column, mask=inside, other=_NO_ID)
        scores = tl.load(listed_scores + chunk * LISTED + column, mask=inside, other=_NEVER)
    else:
        ids = chunk * CHUNK + column
        scores = _numbers(tl.load(logits + ids, mask=ids < vocab_size, other=_NEVER))
        scores = tl.div_rn(scores, temperature)
        scores = tl.where(scores >= bound, scores, _NEVER)
    return scores, ids


@triton.jit
def _tally(
    row_tokens,
    width,
    threshold,
    best,
    CHUNKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    LISTED: tl.constexpr,
):
    """(how many tokens of one row reach the rank `threshold`, the mass of those above it)."""
    count, mass = tl.full((), 0, tl.int32), tl.full((), 0.0, tl.float32)
    for begin in range(0, width, COLUMNS):
        scores, _ = _tokens_at(row_tokens, begin, CHUNKS, COLUMNS, CHUNK, LISTED)
        ranks, exists = _rank(scores), scores > _NEVER
        count += tl.sum(tl.sum((exists & (ranks >= threshold)).to(tl.int32), axis=1), axis=0)
        shares = tl.where(exists & (ranks > threshold), tl.exp(scores - best), 0.0)
        mass += tl.sum(tl.sum(shares, axis=1), axis=0)
    return count, mass


@triton.jit
def _cut(
    row_tokens,
    width,
    best,
    settings,
    mass,
    CHUNKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    LISTED: tl.constexpr,
):
    """The lowest rank that min-p, top-k and top-p leave. `mass` is that of all tokens above min-p's floor."""
    top_k, top_p, min_p = settings
    highest = _rank(best)
    cut = _rank(tl.maximum(_floor(best, min_p), row_tokens[3]))
    if top_k > 0:
        # The largest rank that k tokens reach; `cut` if fewer reach even that.
        high = highest + 1
        while high - cut > 1:
            middle = (cut + high) // 2
            count, _ = _tally(row_tokens, width, middle, best, CHUNKS, COLUMNS, CHUNK, LISTED)
            if count >= top_k:
                cut = middle
            else:
                high = middle
    if top_p < 1.0:
        if top_k > 0:
            _, mass = _tally(row_tokens, width, cut - 1, best, CHUNKS, COLUMNS, CHUNK, LISTED)
        # The smallest rank with less than the share above it.
        low, cut = cut - 1, highest
        while cut - low > 1:
            middle = (low + cut) // 2
            _, mass_above = _tally(row_tokens, width, middle, best, CHUNKS, COLUMNS, CHUNK, LISTED)
            if mass_above < top_p * mass:
                cut = middle
            else:
                low = middle
    return cut


@triton.jit
def _draw_truncated(
    row_tokens,
    width,
    best,
    settings,
    mass,
    seed,
    position,
    CHUNKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    LISTED: tl.constexpr,
):
    """The id drawn for one row among what min-p, top-k and top-p leave."""
    cut = _cut(row_tokens, width, best, settings, mass, CHUNKS, COLUMNS, CHUNK, LISTED)
    drawn_score, drawn_id = tl.full((), _NEVER, tl.float32), tl.full((), _NO_ID, tl.int32)
    for begin in range(0, width, COLUMNS):
        scores, ids = _tokens_at(row_tokens, begin, CHUNKS, COLUMNS, CHUNK, LISTED)
        scores = tl.where(_rank(scores) >= cut, scores + _gumbel(ids, seed, position), _NEVER)
        score = tl.max(tl.max(scores, axis=1), axis=0)
        token = tl.min(tl.min(tl.where(scores == score, ids, _NO_ID), axis=1), axis=0)
        is_better = (score > drawn_score) | ((score == drawn_score) & (token < drawn_id))
        drawn_score, drawn_id = tl.where(is_better, score, drawn_score), tl.where(is_better, token, drawn_id)
    return drawn_id


@triton.jit
def _finish_kernel(
    logits,
    rows,
    tokens,
    lengths,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    seeds,
    best_scores,
    best_ids,
    bounds,
    masses,
    counts,
    listed_scores,
    listed_ids,
    output,
    logits_stride,
    tokens_stride,
    vocab_size,
    num_chunks,
    CHUNKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    LISTED: tl.constexpr,
    APPENDS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.load(rows + index).to(tl.int64)
    is_real = row >= 0
    length = tl.load(lengths + row, mask=is_real, other=0)
    temperature, top_k, top_p, min_p, truncates = _settings(
        row, is_real, temperatures, top_ks, top_ps, min_ps
    )
    chunk = tl.arange(0, CHUNKS)
    inside, at = chunk < num_chunks, index * num_chunks + chunk
    if truncates:
        chunk_counts = tl.load(counts + at, mask=inside, other=0)
        most = tl.max(chunk_counts, axis=0)
        is_listed = most <= LISTED
        bound, best = tl.load(bounds + 2 * index), tl.load(bounds + 2 * index + 1)
        begin = index * num_chunks * LISTED
        row_logits = logits + index * logits_stride
        lists = listed_scores + begin, listed_ids + begin, chunk_counts
        row_tokens = row_logits, lists, is_listed, bound, temperature, vocab_size
        width = tl.where(is_listed, most, tl.minimum(CHUNK, vocab_size))
        settings = top_k, top_p, min_p
        mass = tl.sum(tl.load(masses + at, mask=inside, other=0.0), axis=0)
        seed = tl.load(seeds + row)
        token = _draw_truncated(
            row_tokens, width, best, settings, mass, seed, length, CHUNKS, COLUMNS, CHUNK, LISTED
        )
    else:
        scores = tl.load(best_scores + at, mask=inside, other=_NEVER)
        ids = tl.load(best_ids + at, mask=inside, other=_NO_ID)
        token = tl.min(tl.where(scores == tl.max(scores, axis=0), ids, _NO_ID), axis=0)
    # Without any number it is id 0: one out of the vocabulary would be an address of the next step.
    token = tl.where(token == _NO_ID, 0, token)
    token = tl.where(is_real, token, -1)
    tl.store(output + index, token)
    if APPENDS:
        tl.store(tokens + row * tokens_stride + length, token, mask=is_real)
        tl.store(lengths + row, length + 1, mask=is_real)


class _Scratch(NamedTuple):
    """What the launches of one call hand to one another, for R rows of C chunks."""

    best_scores: torch.Tensor  # [R, C]
    best_ids: torch.Tensor  # [R, C]
    groups: torch.Tensor  # [R, groups] best score of each group
    bounds: torch.Tensor  # [R, 2] the score below which nothing survives, and the best
    masses: torch.Tensor  # [R, C] above min-p's floor, relative to the best score's
    counts: torch.Tensor  # [R, C] tokens that may survive
    listed_scores: torch.Tensor  # [R, C, LISTED]
    listed_ids: torch.Tensor  # [R, C, LISTED]


def _scratch(num_rows: int, num_chunks: int, device: torch.device) -> _Scratch:
    def floats(*shape: int) -> torch.Tensor:
        return torch.empty((num_rows, *shape), dtype=torch.float32, device=device)

    def integers(*shape: int) -> torch.Tensor:
        return torch.empty((num_rows, *shape), dtype=torch.int32, device=device)

    return _Scratch(
        best_scores=floats(num_chunks),
        best_ids=integers(num_chunks),
        groups=floats(num_chunks * (CHUNK // GROUP)),
        bounds=floats(2),
        masses=floats(num_chunks),
        counts=integers(num_chunks),
        listed_scores=floats(num_chunks, LISTED),
        listed_ids=integers(num_chunks, LISTED),
    )


def _scan(
    logits: torch.Tensor, rows: torch.Tensor, state: DrawState, scratch: _Scratch, launch: dict[str, Any]
) -> None:
    """Fill everything in `scratch`."""
    settings = (state.temperature, state.top_k, state.top_p, state.min_p)
    num_rows, num_chunks = scratch.best_scores.shape
    sizes = (logits.stride(0), logits.shape[1], num_chunks)
    _scan_kernel[(num_rows, num_chunks)](
        logits,
        rows,
        state.lengths,
        *settings,
        state.seeds,
        scratch.best_scores,
        scratch.best_ids,
        scratch.groups,
        *sizes,
        GROUP=GROUP,
        **launch,
    )
    num_groups = scratch.groups.shape[1]
    # Programs of rows that truncate nothing leave at once, but each takes its time to start.
    per_program = max(1, num_rows * num_chunks // GATHER_PROGRAMS)
    _gather_kernel[(num_rows, triton.cdiv(num_chunks, per_program))](
        logits,
        rows,
        *settings,
        *scratch[2:],
        *sizes,
        num_groups,
        per_program,
        GROUPS=triton.next_power_of_2(num_groups),
        LISTED=LISTED,
        **launch,
    )


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
    output = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    if not num_rows:
        return output
    num_chunks = triton.cdiv(vocab_size, CHUNK)
    scratch = _scratch(num_rows, num_chunks, logits.device)
    launch = {"CHUNK": CHUNK, "USE_PDL": use_pdl, "num_warps": 8}
    if use_pdl:
        launch["launch_pdl"] = True
    _scan(logits, rows, state, scratch, launch)
    chunks = triton.next_power_of_2(num_chunks)
    _finish_kernel[(num_rows,)](
        logits,
        rows,
        state.tokens,
        state.lengths,
        state.temperature,
        state.top_k,
        state.top_p,
        state.min_p,
        state.seeds,
        *scratch[:2],
        *scratch[3:],
        output,
        logits.stride(0),
        state.tokens.stride(0),
        vocab_size,
        num_chunks,
        CHUNKS=chunks,
        COLUMNS=max(16, min(_TILE // chunks, LISTED)),
        LISTED=LISTED,
        APPENDS=appends,
        **launch,
    )
    return output
