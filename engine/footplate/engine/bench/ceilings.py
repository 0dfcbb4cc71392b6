"""What the machine can do at best, measured in the run whose figures are held against it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

MIB = 1 << 20
ROUNDS = 8
# What is read has the size of what a step reads, so that a cache that holds one holds the other.
MIN_READ_BYTES = 64 * MIB
MAX_READ_BYTES = {"cpu": 1024 * MIB, "cuda": 2048 * MIB}
PROBE_SIZE, MATMUL_SIZE = 256, {"cpu": 2048, "cuda": 8192}


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Best of several rounds, each. Copies count what they read and what they write."""

    read_bytes_s: float
    copy_bytes_s: float
    flops_s: float
    flops_dtype: str  # the type with the fastest product
    num_bytes: int  # how much memory was read

    @property
    def bytes_s(self) -> float:
        return max(self.read_bytes_s, self.copy_bytes_s)


def measure_ceilings(device: torch.device, num_bytes: int) -> Ceilings:
    """Read and copy about `num_bytes` again and again; multiply large matrices in each type."""
    largest = MAX_READ_BYTES[device.type]
    size = min(max(num_bytes, MIN_READ_BYTES), largest) // MIB * MIB
    memory = torch.ones(size // 4, dtype=torch.float32, device=device)
    read = max(count / _best_s(call, device) for call, count in _readers(memory))
    target = torch.empty_like(memory)
    copy = 2 * size / _best_s(partial(target.copy_, memory), device)
    flops, name = _fastest_product(device)
    return Ceilings(read, copy, flops, name, size)


def _readers(memory: torch.Tensor) -> list[tuple[Callable[[], object], int]]:
    readers: list[tuple[Callable[[], object], int]] = [(memory.sum, memory.nbytes)]
    if memory.device.type == "cuda":
        from footplate.engine.bench.read_kernel import make_reader

        num_multiprocessors = torch.cuda.get_device_properties(memory.device).multi_processor_count
        readers += [make_reader(memory, num_multiprocessors * factor, 4096) for factor in (8, 16)]
    return readers


def _fastest_product(device: torch.device) -> tuple[float, str]:
    """(operations a second, type): a multiplication and an addition are two.

    Types that the device has no instructions for can be a thousand times slower; a small product tells.
    """
    dtypes = (torch.float32, torch.bfloat16, torch.int8 if device.type == "cpu" else torch.float16)
    small = {dtype: _flops_s(dtype, PROBE_SIZE, device) for dtype in dtypes}
    worth = [dtype for dtype in dtypes if small[dtype] * 4 > small[torch.float32]]
    found = [(_flops_s(dtype, MATMUL_SIZE[device.type], device), str(dtype)) for dtype in worth]
    best, name = max(found)
    return best, name.removeprefix("torch.")


def _flops_s(dtype: torch.dtype, size: int, device: torch.device) -> float:
    # Random values: a GPU that multiplies equal ones draws less power, and clocks higher than it ever can.
    left, right = (torch.randn((size, size), device=device).mul_(9).to(dtype) for _ in range(2))
    multiply = torch._int_mm if dtype is torch.int8 else torch.mm
    return 2 * size**3 / _best_s(lambda: multiply(left, right.T), device, limit_s=1.0)


def _best_s(call: Callable[[], object], device: torch.device, limit_s: float = 10.0) -> float:
    """The fastest of some calls, in seconds; fewer where they take longer than `limit_s` together."""
    call()
    _wait(device)
    taken: list[float] = []
    begin = time.perf_counter()
    while len(taken) < ROUNDS and (not taken or time.perf_counter() - begin < limit_s):
        start = time.perf_counter()
        call()
        _wait(device)
        taken.append(time.perf_counter() - start)
    return min(taken)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
