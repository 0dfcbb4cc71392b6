"""Which tilings a sweep tries, and compiling them in other processes while one process measures."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from typing import Any

from footplate.engine.kernels.skinny_linear.tiling import Tiling

_SHARED_BYTES = 200 * 1024  # of a multiprocessor, for all of one program's stages


def tilings(num_outputs: int, bucket: int) -> list[Tiling]:
    """Candidates for a 16-bit weight of so many rows, those first that were good on other shapes."""
    return list(_vector_tilings(num_outputs) if bucket == 1 else _matrix_tilings(num_outputs, bucket))


def _vector_tilings(num_outputs: int) -> Iterator[Tiling]:
    for block_n, block_k, num_warps, num_stages in (
        (8, 1024, 4, 3),
        (8, 1024, 4, 2),
        (8, 1024, 4, 1),
        (16, 1024, 4, 2),
        (16, 1024, 4, 1),
        (4, 1024, 4, 4),
        (4, 1024, 4, 3),
        (8, 512, 2, 3),
        (8, 512, 2, 4),
        (16, 512, 2, 3),
        (4, 2048, 8, 3),
        (4, 2048, 4, 2),
        (8, 2048, 8, 2),
        (2, 2048, 4, 3),
        (4, 2048, 8, 1),
        (8, 1024, 4, 4),
        (16, 512, 4, 3),
    ):
        if num_outputs // block_n >= 64:
            yield Tiling(block_n, block_k, num_warps, num_stages, 2)


def _matrix_tilings(num_outputs: int, bucket: int) -> Iterator[Tiling]:
    for block_n, block_k, num_warps, num_stages in (
        (64, 128, 4, 4),
        (64, 128, 4, 3),
        (64, 256, 4, 3),
        (32, 256, 4, 4),
        (32, 128, 4, 7),
        (32, 128, 4, 4),
        (16, 256, 4, 7),
        (16, 256, 4, 5),
        (16, 512, 4, 3),
        (32, 256, 4, 3),
        (64, 64, 4, 6),
        (128, 128, 8, 3),
        (128, 64, 4, 4),
        (128, 128, 4, 3),
        (32, 256, 2, 3),
        (16, 256, 2, 4),
        (64, 256, 8, 3),
        (128, 64, 8, 5),
    ):
        fits = (block_n + bucket) * block_k * 2 * num_stages <= _SHARED_BYTES
        if fits and num_outputs // block_n >= 60 and bucket * block_k <= 64 * 256:
            yield Tiling(block_n, block_k, num_warps, num_stages, 2)


def prefetches(best: Tiling) -> list[Tiling]:
    """The tiling with other numbers of rows asked for early."""
    counts = (0, 4, 8, 32)
    return [replace(best, prefetch=n) for n in counts if n <= best.block_n and n != best.prefetch]


class Compilers:
    """Processes that compile into Triton's cache on disk, without running anything on the device."""

    def __init__(self) -> None:
        count = max(1, (os.cpu_count() or 2) - 2)
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(count, mp_context=context, initializer=_compile_only)

    def submit(self, compile_one: Callable[..., None], jobs: Sequence[tuple[Any, ...]]) -> list[Future[None]]:
        return [self._pool.submit(compile_one, *job) for job in jobs]

    def stop(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def _compile_only() -> None:
    """From here on this process's kernel launches compile and do not launch."""
    from triton.runtime.jit import JITFunction

    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **kwargs)

    JITFunction.run = compile_only
