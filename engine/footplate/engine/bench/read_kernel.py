"""Reading device memory and doing next to nothing with it: what no decode step can be faster than."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

_NUM_WARPS = 8


@triton.jit
def _read_kernel(data, sums, num_steps, BLOCK: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for step in range(num_steps):
        block = program + step * tl.num_programs(0)
        total += tl.load(data + block * BLOCK + tl.arange(0, BLOCK))
    tl.store(sums + program, tl.sum(total, axis=0))


def make_reader(memory: torch.Tensor, num_programs: int, block: int) -> tuple[Callable[[], None], int]:
    """(a call that reads `memory`, how many bytes it reads: whole blocks, the same number each program)."""
    flat = memory.view(torch.float32).flatten()
    sums = torch.empty(num_programs, device=memory.device)
    num_steps = flat.numel() // (block * num_programs)

    def read() -> None:
        _read_kernel[(num_programs,)](flat, sums, num_steps, BLOCK=block, num_warps=_NUM_WARPS)

    return read, num_steps * block * num_programs * 4
