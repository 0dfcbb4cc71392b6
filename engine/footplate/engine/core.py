"""The step loop's body: schedule, launch, read; with one step ahead or without."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, runtime_checkable

from footplate.engine.kv.block_log import BlockChanges
from footplate.engine.plan import SchedulerOutput, StepResult
from footplate.engine.scheduler import DrainFirst, Scheduler
from footplate.engine.types import EngineRequest, EngineStats, SequenceDelta


class Runner(Protocol):
    """Carries out planned steps, in their order."""

    def run(self, output: SchedulerOutput) -> StepResult: ...


class Pending(Protocol):
    """A step on its way."""

    def result(self) -> StepResult:
        """What it drew; waits for the device. Steps are read in the order of their launch."""
        ...


@runtime_checkable
class QueueRunner(Runner, Protocol):
    """A runner whose device has a queue: a step can be launched while the one before it still runs."""

    def launch(self, output: SchedulerOutput) -> Pending: ...


class EngineCore:
    """One scheduler on one runner.

    `add`, `abort` and `stats` may be called from any thread while another one steps: the lock guards the
    scheduler and is never held while the device works. With `ahead`, step n + 1 is planned and queued before
    step n is read: on the device's own queue if it has one, else on a thread of the runner's. The device runs
    steps in order either way, so ids are the same.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner, *, ahead: bool) -> None:
        self.lock = threading.Lock()
        self.scheduler = scheduler
        self.runner = runner
        self._ahead = ahead
        self._queue = runner if isinstance(runner, QueueRunner) else None
        needs_thread = ahead and self._queue is None
        self._executor = ThreadPoolExecutor(1, "footplate-device") if needs_thread else None
        self._flying: deque[Pending] = deque()

    def add(self, request: EngineRequest) -> None:
        """Queue a request; raises as `Scheduler.add` does."""
        with self.lock:
            self.scheduler.add(request)

    def abort(self, request_id: str, index: int | None = None) -> None:
        with self.lock:
            self.scheduler.abort(request_id, index)

    def stats(self) -> EngineStats:
        with self.lock:
            return self.scheduler.stats()

    def block_changes(self, *, whole: bool = False) -> BlockChanges:
        """As `BlockPool.changes`."""
        with self.lock:
            return self.scheduler.pool.changes(whole=whole)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def step(self) -> list[SequenceDelta]:
        """Advance: launch what can be launched, read the oldest step once the pipeline is full."""
        with self.lock:
            output = self._plan()
        if output is not None:
            self._flying.append(self._launch(output))
        depth = 1 if self._ahead and output is not None else 0
        result = self._flying.popleft().result() if len(self._flying) > depth else None
        with self.lock:
            return self.scheduler.update(result) if result is not None else self.scheduler.take_deltas()

    def _plan(self) -> SchedulerOutput | None:
        try:
            return self.scheduler.schedule()
        except DrainFirst:
            return None

    def _launch(self, output: SchedulerOutput) -> Pending:
        if self._queue is not None:
            return self._queue.launch(output)
        if self._executor is not None:
            return self._executor.submit(self.runner.run, output)
        done: Future[StepResult] = Future()
        done.set_result(self.runner.run(output))
        return done

    def shutdown(self) -> None:
        """End the device thread; a step in flight is waited for."""
        if self._executor is not None:
            self._executor.shutdown(wait=True)
