"""One gateway's share of the work of batches. Every gateway runs one; the queue keeps them apart."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from footplate.platform.batches.finalizing import Finalizing, sweep_batch
from footplate.platform.batches.line_run import HeldLine, LeaseLost, LineWork, find_kept, run_line
from footplate.platform.batches.metrics import BatchMetrics
from footplate.platform.batches.retries import FAILED_WAIT_S, Later
from footplate.platform.batches.states import ENDING
from footplate.platform.batches.store import FileRows
from footplate.platform.batches.validating import Validation
from footplate.platform.batches.values import Batch, BatchStatus, ClaimedLine, LineEnd, file_key
from footplate.platform.errors import BatchStoreAway, FileStoreAway
from footplate.platform.ports import InferenceClient
from footplate.tenancy.errors import StoreUnavailable

_LOGGER = logging.getLogger(__name__)
_AWAY = (BatchStoreAway, FileStoreAway, StoreUnavailable)
MAX_SWEPT = 50
_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class Pace:
    """How much at once, and how often to look. A wake ends the wait for work early."""

    max_running: int = 16
    poll_s: float = 1.0
    beat_s: float = 1.0
    sweep_s: float = 15.0


class BatchWorker:
    """Validates, runs and finalizes what it gets. One event loop owns it; `start` begins, `close` ends it.

    While the database or the file store is away it waits and goes on. What it holds when it is closed is
    given back at once; what it holds when it is killed comes free with its leases.
    """

    def __init__(
        self,
        work: LineWork,
        client: InferenceClient,
        files: FileRows,
        metrics: BatchMetrics,
        pace: Pace | None = None,
    ) -> None:
        self._work = work
        self._queue, self._data = work.queue, work.data
        self._files = files
        self._metrics = metrics
        self._pace = pace or Pace()
        shared = (work.threads, work.worker)
        self._validation = Validation(work.queue, work.data, work.keys, client, *shared, work.cascades)
        self._finalizing = Finalizing(work.queue, work.data, work.sink, *shared)
        self._held: dict[tuple[str, int], HeldLine] = {}
        # Batches that are validated or finalized here, and whether they are still ours.
        self._batches: dict[str, bool] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._jobs: set[asyncio.Task[None]] = set()
        self._has_room, self._is_woken = asyncio.Event(), asyncio.Event()
        self._is_closing = False

    @property
    def num_running(self) -> int:
        """How many lines run here."""
        return len(self._held)

    def start(self) -> None:
        """Begin to work."""
        pace = self._pace
        loops: tuple[tuple[Callable[[], Awaitable[bool]], float, asyncio.Event | None], ...] = (
            (self._claim, pace.poll_s, self._has_room),
            (self._conduct, pace.poll_s, self._is_woken),
            (self._beat, pace.beat_s, None),
            (self._sweep, pace.sweep_s, None),
        )
        self._tasks = [asyncio.create_task(self._repeat(*each)) for each in loops]

    def wake(self) -> None:
        """There may be something to do."""
        self._is_woken.set()
        self._has_room.set()

    async def close(self) -> None:
        """Begin nothing more, and give back what is not done."""
        self._is_closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for held in self._held.values():
            held.stop(is_final=False)
        for batch_id in self._batches:
            self._batches[batch_id] = False
        if self._jobs:
            _, left = await asyncio.wait(self._jobs, timeout=10.0)
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    async def _repeat(
        self, step: Callable[[], Awaitable[bool]], every_s: float, wake: asyncio.Event | None
    ) -> None:
        """Do a step again and again; at once while it says that there is more, else after a while."""
        while True:
            has_more = False
            try:
                has_more = await step()
            except _AWAY as error:
                _LOGGER.warning("batches wait: %s", type(error).__name__)
            except Exception:
                _LOGGER.exception("a step of the work of batches failed; it is tried again")
            if has_more:
                continue
            if wake is None:
                await asyncio.sleep(every_s)
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(every_s):
                    await wake.wait()
            wake.clear()

    async def _claim(self) -> bool:
        num_free = self._pace.max_running - len(self._held)
        if num_free <= 0:
            return False
        # Shielded: what is claimed must be given back by somebody.
        claiming = asyncio.ensure_future(self._ask(lambda: self._queue.claim(self._work.worker, num_free)))
        try:
            claimed = await asyncio.shield(claiming)
        except asyncio.CancelledError:
            with suppress(Exception):
                for line in await claiming:
                    await self._give_back(line, 0.0)
            raise
        for line in claimed:
            held = self._held[line.key] = HeldLine(line)
            self._spawn(self._run(held))
        return len(claimed) == num_free

    async def _run(self, held: HeldLine) -> None:
        line = held.line
        try:
            outcome: LineEnd | Later | None = None
            if line.lost_attempts:
                outcome = await find_kept(self._work, line)
                if outcome is not None:
                    self._metrics.line_ended("found")
            if outcome is None and not held.leave.is_set():
                outcome = await run_line(self._work, held)
            await self._end(held, outcome)
        except LeaseLost:
            self._metrics.line_ended("lost")
        except _AWAY:
            # Whether its answer was kept is not known, so whoever gets it next looks.
            await self._give_back(line, FAILED_WAIT_S, is_lost=held.may_be_kept)
        except Exception:
            _LOGGER.exception("a line of a batch could not be run; it is tried again")
            await self._give_back(line, FAILED_WAIT_S, is_failure=True, is_lost=held.may_be_kept)
        finally:
            del self._held[line.key]
            self._has_room.set()
            if not any(other.line.batch_id == line.batch_id for other in self._held.values()):
                # It may have been the last one of its batch.
                self._is_woken.set()

    async def _end(self, held: HeldLine, outcome: LineEnd | Later | None) -> None:
        line = held.line
        if isinstance(outcome, LineEnd):
            end = outcome
            if await self._insist(lambda: self._queue.end_line(self._work.worker, line, end)):
                self._metrics.line_ended(end.state.value)
            else:
                self._metrics.line_ended("lost")
        elif isinstance(outcome, Later):
            await self._give_back(line, outcome.wait_s, is_failure=outcome.is_failure)
        else:
            await self._give_back(line, 0.0, is_lost=held.may_be_kept)

    async def _give_back(
        self, line: ClaimedLine, wait_s: float, *, is_failure: bool = False, is_lost: bool = False
    ) -> None:
        self._metrics.line_ended("given_back")
        await self._insist(
            lambda: self._queue.give_back(
                self._work.worker, line, wait_s, is_failure=is_failure, is_lost=is_lost
            )
        )

    async def _conduct(self) -> bool:
        await self._ask(self._queue.advance)
        worker = self._work.worker
        found = False
        for take, job in (
            (self._queue.begin_validation, self._validate),
            (self._queue.begin_finalizing, self._finalize),
        ):
            if len(self._batches) >= 2:
                break
            batch = await self._ask(lambda take=take: take(worker))  # type: ignore[misc]
            if batch is not None and batch.id not in self._batches:
                found = self._batches[batch.id] = True
                self._spawn(self._hold_batch(batch, job))
        return found

    async def _hold_batch(self, batch: Batch, job: Callable[[Batch], Coroutine[Any, Any, None]]) -> None:
        try:
            await job(batch)
        except _AWAY as error:
            _LOGGER.warning("a batch waits: %s", type(error).__name__)
            with suppress(*_AWAY):
                await self._ask(lambda: self._queue.put_off(batch.id, self._work.worker, FAILED_WAIT_S))
        except Exception:
            _LOGGER.exception("a batch could not be worked on; it is tried again")
        finally:
            del self._batches[batch.id]
            self.wake()

    async def _validate(self, batch: Batch) -> None:
        is_accepted = await self._validation.run(batch, lambda: not self._batches[batch.id])
        if is_accepted is False:
            self._metrics.batch_ended(BatchStatus.FAILED.value)

    async def _finalize(self, batch: Batch) -> None:
        status = await self._finalizing.run(batch, lambda: not self._batches[batch.id])
        if status is not None:
            self._metrics.batch_ended(status.value)

    async def _beat(self) -> bool:
        """Keep up the leases of what is held, and hear what has become of it."""
        worker = self._work.worker
        if self._batches:
            names = list(self._batches)
            ours = await self._ask(lambda: self._queue.renew_batches(worker, names))
            for name in names:
                if name in self._batches and name not in ours:
                    self._batches[name] = False
        lines = [held.line for held in self._held.values()]
        if not lines:
            return False
        statuses = await self._ask(lambda: self._queue.renew(worker, lines))
        for line in lines:
            held = self._held.get(line.key)
            if held is None or held.line is not line:
                continue
            status = statuses.get(line.key)
            if status is None:
                held.stop(is_final=False)
            elif status in ENDING:
                held.stop(is_final=True)
        return False

    async def _sweep(self) -> bool:
        """Let go of what nobody can see any more."""

        def sweep() -> bool:
            files = self._files.doomed(MAX_SWEPT)
            for tenant_id, file_id in files:
                self._data.delete(file_key(tenant_id, file_id))
                self._files.forget(file_id)
            batches = self._queue.unswept(MAX_SWEPT)
            for tenant_id, batch_id in batches:
                sweep_batch(self._queue, self._data, tenant_id, batch_id)
            return len(files) == MAX_SWEPT or len(batches) == MAX_SWEPT

        # Counting all that waits takes a while where much does.
        self._metrics.depth = await self._ask(self._queue.depth)
        return await self._ask(sweep)

    async def _ask(self, work: Callable[[], _Answer]) -> _Answer:
        return await self._work.threads.ask(work)

    async def _insist(self, work: Callable[[], bool]) -> bool:
        """Ask until there is an answer: while the database is away its clock ends no lease."""
        wait_s = 0.2
        while True:
            try:
                return await self._ask(work)
            except BatchStoreAway:
                if self._is_closing:
                    return False
                await asyncio.sleep(wait_s)
                wait_s = min(wait_s * 2, 5.0)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._jobs.add(task)
        task.add_done_callback(self._jobs.discard)
