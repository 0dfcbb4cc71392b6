"""From one attention to the next on Hopper in Gluon, as one kernel: four products and what is between.

A decode step of few rows is bound by reading weights. As kernels of their own, products leave memory idle at
every seam: the next one can't ask for weights before it has been launched, and small kernels in between wait
for memory with nothing else on its way. Here each program has one ring of weight tiles that runs on over the
seams: while the programs meet, norm and activate, the first tiles of the next product arrive.

Programs meet at counters in global memory, so all of them must be resident at once: one for each
multiprocessor. A norm needs no pass of its own: x times the gain is multiplied by the weight, and whoever
reads the product applies 1 / rms, whose sums of squares the programs leave beside it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from footplate.engine.kernels.streamed_linear import parts as shapes
from footplate.engine.kernels.streamed_linear.hopper.kernel import ask_weight, new_ring, stream

MOST_CHUNKS = gl.constexpr(shapes.MOST_CHUNKS)


@gluon.jit
def _meet(counter, num_programs, FOR_TMA: gl.constexpr):
    """Wait until every program has come here; what each wrote before is then seen by all, with FOR_TMA by TMA
    too."""
    if FOR_TMA:
        gl.inline_asm_elementwise(
            "fence.proxy.async.global; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
    gl.thread_barrier()
    # One thread asks: polls by all would stand in the way of those that still have to come.
    gl.inline_asm_elementwise(
        """{
        .reg .pred asks, waits;
        .reg .u32 thread, seen;
        mov.u32 thread, %tid.x;
        setp.eq.u32 asks, thread, 0;
        mov.u32 seen, $2;
        @asks red.release.gpu.global.add.u32 [$1], 1;
        AGAIN:
        @asks ld.acquire.gpu.global.u32 seen, [$1];
        setp.lt.u32 waits, seen, $2;
        @waits bra AGAIN;
        mov.u32 $0, 0;
        }""",
        "=r,l,r",
        [counter.to(gl.int64), num_programs],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
    gl.thread_barrier()
    if FOR_TMA:
        gl.inline_asm_elementwise(
            "fence.proxy.async.global; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def _sum_parts(
    parts,
    at,
    column,
    inside,
    size,
    TILE: gl.constexpr,
    STEPS: gl.constexpr,
    SHARE: gl.constexpr,
    MOST: gl.constexpr,
):
    """The sum of a column's parts, in order. `size` is the elements of one part."""
    total = gl.load(parts + at, mask=inside, other=0.0)
    if MOST > 1:
        tile = column // TILE
        count = ((tile + 1) * STEPS - 1) // SHARE - tile * STEPS // SHARE + 1
        for part in gl.static_range(1, MOST):
            total += gl.load(parts + part * size + at, mask=inside & (part < count), other=0.0)
    return total


@gluon.jit
def _add_and_scale(
    parts, before, gain, residual, output, squares, row, column, is_own, num_rows,
    SIZE: gl.constexpr, CHUNK: gl.constexpr,
    TILE: gl.constexpr, STEPS: gl.constexpr, SHARE: gl.constexpr, MOST: gl.constexpr,
):  # fmt: skip
    """residual = before + product; output = residual times the norm's gain; the chunk's sum of squares beside
    it."""
    at = row * SIZE + column
    total = _sum_parts(parts, at, column, is_own, num_rows * SIZE, TILE, STEPS, SHARE, MOST)
    kept = (before.to(gl.float32) + total).to(residual.dtype.element_ty)
    gl.store(residual + at, kept, mask=is_own)
    wide = kept.to(gl.float32)
    gl.store(output + at, (wide * gain).to(output.dtype.element_ty), mask=is_own)
    if gl.program_id(0) < num_rows * (SIZE // CHUNK):
        gl.store(squares + gl.program_id(0), gl.sum(wide * wide, axis=0))


@gluon.jit
def _inverse_rms(squares, row, eps, SIZE: gl.constexpr, CHUNK: gl.constexpr, LAYOUT: gl.constexpr):
    """1 / rms of a row from the sums of its chunks."""
    COUNT: gl.constexpr = SIZE // CHUNK
    chunk = gl.arange(0, MOST_CHUNKS, layout=LAYOUT)
    total = gl.sum(gl.load(squares + row * COUNT + chunk, mask=chunk < COUNT, other=0.0), axis=0)
    return gl.rsqrt(total / SIZE + eps)


@gluon.jit
def _activate(
    parts, squares, output, num_rows, eps,
    F: gl.constexpr, WIDTH: gl.constexpr, SIZE: gl.constexpr, CHUNK: gl.constexpr, IS_GELU: gl.constexpr,
    TILE: gl.constexpr, STEPS: gl.constexpr, SHARE: gl.constexpr, MOST: gl.constexpr,
):  # fmt: skip
    """act(gate) * up, from the parts of a product with 2 F columns that still lacks its rows' 1 / rms."""
    PER_ROW: gl.constexpr = (F + WIDTH - 1) // WIDTH
    LAYOUT: gl.constexpr = gl.BlockedLayout([WIDTH // (32 * gl.num_warps())], [32], [gl.num_warps()], [0])
    offset = gl.arange(0, WIDTH, layout=LAYOUT)
    piece = gl.program_id(0)
    while piece < num_rows * PER_ROW:
        row = piece // PER_ROW
        column = piece % PER_ROW * WIDTH + offset
        inside = column < F
        size = num_rows * 2 * F
        at = row * (2 * F) + column
        gate = _sum_parts(parts, at, column, inside, size, TILE, STEPS, SHARE, MOST)
        up = _sum_parts(parts, at + F, column + F, inside, size, TILE, STEPS, SHARE, MOST)
        inverse = _inverse_rms(squares, row, eps, SIZE, CHUNK, LAYOUT)
        gate = gate * inverse
        inner = gate
        if IS_GELU:
            # x sigmoid(2 z) is x (1 + tanh z) / 2, without the digits that 1 + tanh loses for negative z.
            inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        small = gl.exp(-gl.abs(inner))
        weight = gl.where(inner >= 0, 1.0, small) / (1.0 + small)
        gl.store(
            output + row * F + column,
            (gate * weight * (up * inverse)).to(output.dtype.element_ty),
            mask=inside,
        )
        piece += gl.num_programs(0)


@gluon.jit
def _own_chunk(num_rows, SIZE: gl.constexpr, CHUNK: gl.constexpr):
    """(row, columns [CHUNK], whether there is one): the piece of the residual that a program adds to."""
    PER_ROW: gl.constexpr = SIZE // CHUNK
    LINE: gl.constexpr = gl.BlockedLayout([CHUNK // (32 * gl.num_warps())], [32], [gl.num_warps()], [0])
    program = gl.program_id(0)
    column = program % PER_ROW * CHUNK + gl.arange(0, CHUNK, layout=LINE)
    return program // PER_ROW, column, (column >= 0) & (program < num_rows * PER_ROW)


@gluon.jit
def _clear(counters):
    """Eight counters to 0, by the first program."""
    index = gl.arange(0, 8, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    gl.store(counters + index, gl.zeros_like(index), mask=index < 8 * (gl.program_id(0) == 0).to(gl.int32))


@gluon.jit(do_not_specialize=["num_rows"])
def block_kernel(
    attended, out_weight, gate_up_weight, down_weight, next_weight, x_gate, inner, x_next,
    out_parts, gate_up_parts, down_parts, next_parts,
    residual, mlp_gain, next_gain, x_gate_at, inner_at, x_next_at, mlp_squares, next_squares,
    counters, spare_counters, num_rows, eps,
    SIZE: gl.constexpr, F: gl.constexpr, NEXT_N: gl.constexpr,
    OUT_STEPS: gl.constexpr, OUT_SHARE: gl.constexpr, OUT_MOST: gl.constexpr,
    GATE_STEPS: gl.constexpr, GATE_SHARE: gl.constexpr, GATE_MOST: gl.constexpr,
    DOWN_STEPS: gl.constexpr, DOWN_SHARE: gl.constexpr, DOWN_MOST: gl.constexpr,
    NEXT_STEPS: gl.constexpr, NEXT_SHARE: gl.constexpr, CHUNK: gl.constexpr, WIDTH: gl.constexpr,
    STAGES: gl.constexpr, IS_GELU: gl.constexpr, USE_PDL: gl.constexpr,
):  # fmt: skip
    """Weights are descriptors of boxes [TILE, STEP]: [SIZE, H D], [2 F, SIZE], [SIZE, F], [NEXT_N, SIZE].

    The four inputs have boxes [ROWS, STEP]; squares are [M, SIZE / CHUNK], counters [8]. NEXT_N may be 0.
    """
    TILE: gl.constexpr = out_weight.block_shape[0]
    weights, rows, w_arrived, x_arrived = new_ring(out_weight, attended, STAGES)
    num_programs = gl.num_programs(0)
    out_begin = gl.program_id(0) * OUT_SHARE
    OUT_TOTAL: gl.constexpr = (SIZE + TILE - 1) // TILE * OUT_STEPS
    out_end = gl.minimum(out_begin + OUT_SHARE, OUT_TOTAL)
    for stage in range(STAGES):
        ask_weight(out_weight, out_begin + stage, out_end, stage, weights, w_arrived, OUT_STEPS)
    row, column, is_own = _own_chunk(num_rows, SIZE, CHUNK)
    mlp_gains = gl.load(mlp_gain + column)
    next_gains = gl.load(next_gain + column)
    if USE_PDL:
        gdc_wait()
    before = gl.load(residual + row * SIZE + column, mask=is_own, other=0.0)
    done = stream(
        attended, out_weight, gate_up_weight, out_parts, num_rows, 0, weights, rows, w_arrived, x_arrived,
        SIZE, OUT_STEPS, OUT_SHARE, 2 * F, GATE_STEPS, GATE_SHARE, STAGES,
    )  # fmt: skip
    _meet(counters, num_programs, False)
    _clear(spare_counters)
    _add_and_scale(
        out_parts, before, mlp_gains, residual, x_gate_at, mlp_squares, row, column, is_own, num_rows,
        SIZE, CHUNK, TILE, OUT_STEPS, OUT_SHARE, OUT_MOST,
    )  # fmt: skip
    _meet(counters + 1, num_programs, True)
    done = stream(
        x_gate, gate_up_weight, down_weight, gate_up_parts, num_rows, done, weights, rows, w_arrived,
        x_arrived, 2 * F, GATE_STEPS, GATE_SHARE, SIZE, DOWN_STEPS, DOWN_SHARE, STAGES,
    )  # fmt: skip
    _meet(counters + 2, num_programs, False)
    before = gl.load(residual + row * SIZE + column, mask=is_own, other=0.0)
    _activate(
        gate_up_parts, mlp_squares, inner_at, num_rows, eps,
        F, WIDTH, SIZE, CHUNK, IS_GELU, TILE, GATE_STEPS, GATE_SHARE, GATE_MOST,
    )  # fmt: skip
    _meet(counters + 3, num_programs, True)
    done = stream(
        inner, down_weight, next_weight, down_parts, num_rows, done, weights, rows, w_arrived, x_arrived,
        SIZE, DOWN_STEPS, DOWN_SHARE, NEXT_N, NEXT_STEPS, NEXT_SHARE, STAGES,
    )  # fmt: skip
    _meet(counters + 4, num_programs, False)
    if USE_PDL:
        gdc_launch_dependents()
    _add_and_scale(
        down_parts, before, next_gains, residual, x_next_at, next_squares, row, column, is_own, num_rows,
        SIZE, CHUNK, TILE, DOWN_STEPS, DOWN_SHARE, DOWN_MOST,
    )  # fmt: skip
    if NEXT_N > 0:
        _meet(counters + 5, num_programs, True)
        stream(
            x_next, next_weight, next_weight, next_parts, num_rows, done, weights, rows, w_arrived, x_arrived,
            NEXT_N, NEXT_STEPS, NEXT_SHARE, 0, NEXT_STEPS, NEXT_SHARE, STAGES,
        )  # fmt: skip
