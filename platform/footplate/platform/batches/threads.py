"""Stores that block, asked from an event loop: in threads of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

CLOSE_S = 10.0
_Answer = TypeVar("_Answer")


class StoreThreads:
    """A bounded number of threads. What is begun runs to its end, whether or not somebody waits."""

    def __init__(self, name: str, num_threads: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._asked: set[Future[Any]] = set()

    async def ask(self, work: Callable[[], _Answer]) -> _Answer:
        """What `work` gives; raises what it raises."""
        asked = self._threads.submit(work)
        self._asked.add(asked)
        asked.add_done_callback(self._asked.discard)
        return await asyncio.wrap_future(asked)

    async def close(self) -> None:
        """Let no more work begin, and wait a bounded time for what has: it may be about to write."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        left = [asyncio.wrap_future(asked) for asked in list(self._asked)]
        if left:
            ended, _ = await asyncio.wait(left, timeout=CLOSE_S)
            for each in ended:
                if not each.cancelled():
                    each.exception()  # nobody asks for it any more
