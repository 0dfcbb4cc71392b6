"""Work that would hold up the event loop, in a few threads apart and one at a time for each tenant."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar
from weakref import WeakValueDictionary

from footplate.platform.errors import LimitRefused

_Result = TypeVar("_Result")


class TenantThreads:
    """Tenants take turns: whoever asks for much waits for itself. Belongs to one event loop.

    `max_waiting`: how much of one tenant's may wait; None is any number.
    """

    def __init__(self, name: str, max_waiting: int | None = None, num_threads: int = 2) -> None:
        self._max_waiting = max_waiting
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._turns: WeakValueDictionary[str, _Turn] = WeakValueDictionary()

    async def run(self, tenant_id: str, work: Callable[[], _Result]) -> _Result:
        """What `work` gives; raises what it raises.

        Raises:
            LimitRefused: too much of this tenant's is waiting.
        """
        turn = self._turns.get(tenant_id)
        if turn is None:
            turn = self._turns[tenant_id] = _Turn()
        if self._max_waiting is not None and turn.num_waiting >= self._max_waiting:
            raise LimitRefused(
                f"{turn.num_waiting} large requests of this tenant are waiting, the limit; "
                "send fewer at a time.",
                "rate_limit_exceeded",
                1,
                about="requests",
            )
        turn.num_waiting += 1
        try:
            await turn.lock.acquire()
        finally:
            turn.num_waiting -= 1
        try:
            working = asyncio.get_running_loop().run_in_executor(self._threads, work)
        except BaseException:
            turn.lock.release()
            raise

        def end(done: asyncio.Future[_Result]) -> None:
            turn.lock.release()
            if not done.cancelled():
                done.exception()  # nobody may be left to ask for it

        working.add_done_callback(end)
        # A client that leaves ends no thread, so its tenant's turn is not over either.
        return await asyncio.shield(working)


class _Turn:
    """One tenant's place in the line."""

    __slots__ = ("__weakref__", "lock", "num_waiting")

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.num_waiting = 0
