"""Launching what lies between two attentions as one kernel."""

from __future__ import annotations

import functools

import torch

from footplate.engine.kernels.streamed_block.block import Block
from footplate.engine.kernels.streamed_linear.parts import (
    MOST_CHUNKS,
    ROW_BUCKETS,
    STEP,
    Cut,
    Parts,
    PendingNorm,
    row_bucket,
)

MAX_ROWS = 16  # above, products as kernels of their own are as fast
NUM_WARPS = 4
NUM_COUNTERS = 8
RING_BYTES = 160 << 10  # of a multiprocessor's 227 KiB of shared memory; more was no faster
MIN_CHUNK = 32 * NUM_WARPS
MAX_WIDTH = 4096  # 32 elements of gate and as many of up for a thread
TILE, SMALL_TILE = 128, 64
SMALL_WEIGHT = 1 << 23  # elements of the output projection below which small tiles leave longer shares


def suits(block: Block) -> bool:
    """Whether the kernel can run the block on the current device."""
    weights = [w for w in (block.out, block.gate_up, block.down, block.next_qkv) if w is not None]
    is_shaped = block.size % MIN_CHUNK == 0 and all(w.shape[1] % 8 == 0 for w in weights)
    is_known = block.activation in ("silu", "gelu_tanh")
    return is_shaped and is_known and all(w.dtype is torch.bfloat16 and w.is_contiguous() for w in weights)


@functools.cache
def _chunk(size: int, bucket: int, num_programs: int) -> int:
    """Elements of a row that one program norms: a chunk for each, all at once; 0 if that can't be."""
    chunk = MIN_CHUNK
    while chunk <= size and size % chunk == 0:
        if bucket * (size // chunk) <= num_programs and size // chunk <= MOST_CHUNKS:
            return chunk
        chunk *= 2
    return 0


@functools.cache
def _width(size: int, bucket: int, num_programs: int) -> int:
    """Elements that a program activates at once: so many that one round does all rows."""
    width = MIN_CHUNK
    while bucket * -(-size // width) > num_programs and width < MAX_WIDTH:
        width *= 2
    return width


@functools.cache
def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def most_rows(block: Block) -> int:
    """The most rows that the kernel takes at once."""
    fitting = [b for b in ROW_BUCKETS if b <= MAX_ROWS and _chunk(block.size, b, _num_sms(block.out.device))]
    return max(fitting, default=0)


@functools.cache
def _cut(num_outputs: int, num_inputs: int, tile: int, num_programs: int, num_stages: int) -> Cut:
    total = -(-num_outputs // tile) * -(-num_inputs // STEP)
    return Cut(num_outputs, num_inputs, tile, -(-total // num_programs), num_stages)


def new_counters(num_layers: int, device: torch.device) -> list[torch.Tensor]:
    """Where the programs of each layer's launch meet; a launch clears those of the one after it."""
    return list(torch.zeros((num_layers, NUM_COUNTERS), dtype=torch.int32, device=device))


def _cuts(block: Block, bucket: int, num_programs: int) -> list[Cut]:
    """How the block's four products are shared out; behind the last layer the fourth is never computed."""
    tile = TILE if block.out.numel() > SMALL_WEIGHT else SMALL_TILE
    stages = min(16, RING_BYTES // (2 * STEP * (tile + bucket)))
    weights = (block.out, block.gate_up, block.down, _following(block))
    return [_cut(*w.shape, tile, num_programs, stages) for w in weights]


def _following(block: Block) -> torch.Tensor:
    return block.down if block.next_qkv is None else block.next_qkv


def _constants(block: Block, cuts: list[Cut], bucket: int, num_programs: int) -> dict[str, object]:
    """What the kernel is compiled for."""
    constants: dict[str, object] = {}
    for name, cut in zip(("OUT", "GATE", "DOWN", "NEXT"), cuts, strict=True):
        constants |= {f"{name}_STEPS": cut.steps, f"{name}_SHARE": cut.share, f"{name}_MOST": cut.most_parts}
    del constants["NEXT_MOST"]
    return constants | {
        "SIZE": block.size,
        "F": block.down.shape[1],
        "NEXT_N": 0 if block.next_qkv is None else cuts[3].num_outputs,
        "CHUNK": _chunk(block.size, bucket, num_programs),
        "WIDTH": _width(block.down.shape[1], bucket, num_programs),
        "STAGES": cuts[0].num_stages,
        "IS_GELU": block.activation == "gelu_tanh",
    }


def streamed_block(
    attended: torch.Tensor,
    block: Block,
    residual: torch.Tensor,
    counters: torch.Tensor,
    next_counters: torch.Tensor,
    *,
    use_pdl: bool = False,
) -> Parts | None:
    """attended [M, H D] -> parts of the next layer's q, k and v that lack a norm; None behind the last layer.

    residual [M, K] is changed in place. `counters` are zero and `next_counters` unused by any running kernel.
    No other kernel that waits for this one may hold the device's multiprocessors meanwhile.
    """
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from footplate.engine.kernels.streamed_block.hopper.kernel import block_kernel

    num_rows, device = attended.shape[0], attended.device
    bucket, num_programs = row_bucket(num_rows), _num_sms(device)
    cuts = _cuts(block, bucket, num_programs)
    constants = _constants(block, cuts, bucket, num_programs)

    def empty(num_columns: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty((num_rows, num_columns), dtype=dtype, device=device)

    def parts_of(cut: Cut) -> torch.Tensor:
        shape = (cut.most_parts, num_rows, cut.num_outputs)
        return torch.empty(shape, dtype=torch.float32, device=device)

    lines = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    inputs = [empty(n, attended.dtype) for n in (block.size, block.down.shape[1], block.size)]
    squares = [empty(block.size // _chunk(block.size, bucket, num_programs), torch.float32) for _ in range(2)]
    values = [parts_of(cut) for cut in cuts[:3]]
    values.append(values[0] if block.next_qkv is None else parts_of(cuts[3]))
    rows = [TensorDescriptor.from_tensor(x, [bucket, STEP], lines) for x in (attended, *inputs)]
    weights = (block.out, block.gate_up, block.down, _following(block))
    tiles = [TensorDescriptor.from_tensor(w, [cuts[0].tile, STEP], lines) for w in weights]
    block_kernel[(num_programs,)](
        rows[0],
        *tiles,
        *rows[1:],
        *values,
        residual,
        block.mlp_gain,
        block.next_gain,
        *inputs,
        *squares,
        counters,
        next_counters,
        num_rows,
        block.eps,
        **constants,
        USE_PDL=use_pdl,
        num_warps=NUM_WARPS,
        **({"launch_pdl": True} if use_pdl else {}),
    )
    if block.next_qkv is None:
        return None
    return Parts(values[3], cuts[3], attended.dtype, PendingNorm(squares[1], block.size, block.eps))
