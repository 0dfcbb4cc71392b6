"""Reads of files that may never answer, such as those on a mount whose server is away."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress

from footplate.tenancy.errors import Conflict, InvalidValue

# At a time; another one waits.
MAX_RUNNING = 2
# Threads that a mount holds on to can't be ended.
MAX_LEFT = 8


class FileChecks:
    """Each in a thread of its own, which keeps nothing else waiting and no process from its end.

    Belongs to one event loop.
    """

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._turns = asyncio.Semaphore(MAX_RUNNING)
        self.num_left = 0  # that took too long and have not ended

    async def run(self, work: Callable[[], None], what: str) -> None:
        """`work` in a thread. `what` names the files.

        Raises:
            Conflict: others are under way, or too many never ended.
            InvalidValue: it takes longer than it may; it is left to itself.
            Exception: what `work` raises.
        """
        if self.num_left >= MAX_LEFT:
            raise Conflict(
                f"{self.num_left} checks of models' files hang, as on a mount whose server is away; "
                "mend the mount, or start the gateway again"
            )
        try:
            await asyncio.wait_for(self._turns.acquire(), self._wait_s)
        except TimeoutError:
            raise Conflict("the files of other models are being checked; try again") from None
        try:
            await self._within(work, what)
        finally:
            self._turns.release()

    async def _within(self, work: Callable[[], None], what: str) -> None:
        done = _begin(work)
        ended, _ = await asyncio.wait([done], timeout=self._wait_s)
        if ended:
            return done.result()
        self.num_left += 1
        done.add_done_callback(self._found)
        raise InvalidValue(
            f"reading {what} took more than {self._wait_s:g} s; is its disk or mount there?", "source"
        )

    def _found(self, done: asyncio.Future[None]) -> None:
        self.num_left -= 1
        done.exception()


def _begin(work: Callable[[], None]) -> asyncio.Future[None]:
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def settle(error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    def run() -> None:
        error: BaseException | None = None
        try:
            work()
        except BaseException as raised:  # told to who waits, whatever it is
            error = raised
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, error)

    threading.Thread(target=run, name="model-files", daemon=True).start()
    return done
