"""The streamed product on Hopper in Gluon: weights come by TMA, from before the kernel ahead has ended.

A program's share of the weight flows through a ring of tiles in shared memory. The weight depends on no
earlier kernel, so under programmatic dependent launch a program fills its ring while the kernel before still
runs: memory stays busy over the start of every product. Weight rows are the tall side of the tensor cores'
product and the few rows of x its narrow one, so nothing is padded to 64 but the weight's own tiles.

What the kernel computes is what `kernel.py: _streamed_kernel` does.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@gluon.jit
def new_ring(weight, x, STAGES: gl.constexpr):
    """(tiles of the weight, the rows that go with them, and barriers for the arrival of each)."""
    TILE: gl.constexpr = weight.block_shape[0]
    STEP: gl.constexpr = weight.block_shape[1]
    ROWS: gl.constexpr = x.block_shape[0]
    weights = gl.allocate_shared_memory(weight.dtype, [STAGES, TILE, STEP], weight.layout)
    rows = gl.allocate_shared_memory(x.dtype, [STAGES, ROWS, STEP], x.layout)
    w_arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    x_arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(w_arrived.index(stage), count=1)
        mbarrier.init(x_arrived.index(stage), count=1)
    fence_async_shared()
    return weights, rows, w_arrived, x_arrived


@gluon.jit
def ask_weight(weight, unit, end, slot, weights, arrived, STEPS: gl.constexpr):
    """Ask for one step of a weight, unless it lies past the program's share."""
    TILE: gl.constexpr = weight.block_shape[0]
    STEP: gl.constexpr = weight.block_shape[1]
    NUM_BYTES: gl.constexpr = TILE * STEP * weight.dtype.primitive_bitwidth // 8
    mbarrier.expect(arrived.index(slot), NUM_BYTES, pred=unit < end)
    tma.async_copy_global_to_shared(
        weight,
        [unit // STEPS * TILE, unit % STEPS * STEP],
        arrived.index(slot),
        weights.index(slot),
        pred=unit < end,
    )


@gluon.jit
def _ask_rows(x, unit, end, slot, rows, arrived, STEPS: gl.constexpr):
    """Ask for the columns of x that go with a step."""
    STEP: gl.constexpr = x.block_shape[1]
    NUM_BYTES: gl.constexpr = x.block_shape[0] * STEP * x.dtype.primitive_bitwidth // 8
    mbarrier.expect(arrived.index(slot), NUM_BYTES, pred=unit < end)
    tma.async_copy_global_to_shared(
        x, [0, unit % STEPS * STEP], arrived.index(slot), rows.index(slot), pred=unit < end
    )


@gluon.jit
def stream(
    x, weight, following, parts, num_rows, done, weights, rows, w_arrived, x_arrived,
    N: gl.constexpr, STEPS: gl.constexpr, SHARE: gl.constexpr,
    NEXT_N: gl.constexpr, NEXT_STEPS: gl.constexpr, NEXT_SHARE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The program's share of x weightᵀ, into parts; behind it the ring fills with the following weight.

    `done` steps have gone through the ring before. NEXT_N is 0 where nothing follows. Returns the new `done`.
    """
    TILE: gl.constexpr = weight.block_shape[0]
    ROWS: gl.constexpr = x.block_shape[0]
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, ROWS, 16])
    TOTAL: gl.constexpr = (N + TILE - 1) // TILE * STEPS
    NEXT_TOTAL: gl.constexpr = (NEXT_N + TILE - 1) // TILE * NEXT_STEPS
    program = gl.program_id(0)
    begin = gl.minimum(program * SHARE, TOTAL)
    end = gl.minimum(begin + SHARE, TOTAL)
    next_begin = gl.minimum(program * NEXT_SHARE, NEXT_TOTAL)
    next_end = gl.minimum(next_begin + NEXT_SHARE, NEXT_TOTAL)
    for stage in range(STAGES):
        slot = (done + stage) % STAGES
        _ask_rows(x, begin + stage, end, slot, rows, x_arrived, STEPS)
        if NEXT_N > 0:
            # A share shorter than the ring leaves room from the start.
            if begin + stage >= end:
                ask_weight(
                    following,
                    next_begin + (begin + stage - end),
                    next_end,
                    slot,
                    weights,
                    w_arrived,
                    NEXT_STEPS,
                )
    n = gl.arange(0, TILE, layout=gl.SliceLayout(1, SUMS))
    m = gl.arange(0, ROWS, layout=gl.SliceLayout(0, SUMS))
    unit = begin
    while unit < end:
        tile = unit // STEPS
        stop = gl.minimum((tile + 1) * STEPS, end)
        total = gl.zeros([TILE, ROWS], gl.float32, layout=SUMS)
        for at in range(unit, stop):
            count = done + at - begin
            place = count % STAGES
            mbarrier.wait(w_arrived.index(place), (count // STAGES) & 1)
            mbarrier.wait(x_arrived.index(place), (count // STAGES) & 1)
            total = warpgroup_mma(weights.index(place), rows.index(place).permute((1, 0)), total)
            ahead = at + STAGES
            if ahead < end:
                ask_weight(weight, ahead, end, place, weights, w_arrived, STEPS)
                _ask_rows(x, ahead, end, place, rows, x_arrived, STEPS)
            elif NEXT_N > 0:
                ask_weight(
                    following, next_begin + (ahead - end), next_end, place, weights, w_arrived, NEXT_STEPS
                )
        part = program - tile * STEPS // SHARE
        row = gl.expand_dims(part * num_rows + m, 0) * N
        column = gl.expand_dims(tile * TILE + n, 1)
        inside = gl.expand_dims(m < num_rows, 0) & (column < N)
        gl.store(parts + row + column, total, mask=inside)
        unit = stop
    return done + end - begin


@gluon.jit(do_not_specialize=["num_rows"])
def streamed_kernel(
    x,
    weight,
    parts,
    num_rows,
    N: gl.constexpr,
    STEPS: gl.constexpr,
    SHARE: gl.constexpr,
    STAGES: gl.constexpr,
    USE_PDL: gl.constexpr,
):
    """x [M, K] in boxes [ROWS, STEP], weight [N, K] in boxes [TILE, STEP], parts [most, M, N] float32."""
    TILE: gl.constexpr = weight.block_shape[0]
    TOTAL: gl.constexpr = (N + TILE - 1) // TILE * STEPS
    weights, rows, w_arrived, x_arrived = new_ring(weight, x, STAGES)
    if USE_PDL:
        gdc_launch_dependents()
    begin = gl.program_id(0) * SHARE
    end = gl.minimum(begin + SHARE, TOTAL)
    for stage in range(STAGES):
        ask_weight(weight, begin + stage, end, stage, weights, w_arrived, STEPS)
    if USE_PDL:
        gdc_wait()
    stream(
        x, weight, weight, parts, num_rows, 0, weights, rows, w_arrived, x_arrived,
        N, STEPS, SHARE, 0, STEPS, SHARE, STAGES,
    )  # fmt: skip
