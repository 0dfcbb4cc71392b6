"""Stores that block, asked from an event loop: in threads of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_Answer = TypeVar("_Answer")


class StoreThreads:
    """A bounded number of threads. What is begun runs to its end, whether or not somebody waits."""

    def __init__(self, name: str, num_threads: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)

    async def ask(self, work: Callable[[], _Answer]) -> _Answer:
        """What `work` gives; raises what it raises."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        """Let no more work begin."""
        self._threads.shutdown(wait=False, cancel_futures=True)
