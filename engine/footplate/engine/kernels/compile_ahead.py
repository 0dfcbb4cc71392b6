"""Compiling many Triton kernels at once, before any of them is launched.

Triton compiles a kernel at its first launch, one after the other; most of that runs outside Python's lock.
So a start goes through its launches twice: first only to hand every kernel to a pool of threads.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

MAX_THREADS = 16


def is_available() -> bool:
    """Whether this Triton compiles in threads; its interpreter compiles nothing."""
    try:
        import triton

        return hasattr(triton, "AsyncCompileMode") and not triton.knobs.runtime.interpret
    except ImportError:
        return False


@contextmanager
def compiling_ahead(launched: Collection[str] = ()) -> Iterator[None]:
    """Within it a launch only begins to compile its kernel, except of kernels whose names are in `launched`.

    What the others would have written holds anything. Leaving it waits for all. A kernel that can't be
    compiled is left to its launch, which says why.
    """
    from triton import AsyncCompileMode
    from triton.runtime.jit import JITFunction

    launch = JITFunction.run

    def begin_to_compile(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        warmup = warmup or kernel.__name__ not in launched
        return launch(kernel, *args, grid=grid, warmup=warmup, **options)

    threads = min(MAX_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads, "footplate-compile") as pool, AsyncCompileMode(pool, ignore_errors=True):
        JITFunction.run = begin_to_compile
        try:
            yield
        finally:
            JITFunction.run = launch
