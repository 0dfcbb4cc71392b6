"""Makes the files of a batch none of whose lines runs any more. Safe to do twice: the files are the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from footplate.platform.batches.line_run import settle_kept
from footplate.platform.batches.lines import read_line
from footplate.platform.batches.results import KeptResult, unfinished_line
from footplate.platform.batches.states import code_of_unfinished, last_status
from footplate.platform.batches.store import BatchQueue, ByteStore, ByteWriter, Ended
from footplate.platform.batches.threads import StoreThreads
from footplate.platform.batches.values import (
    Batch,
    BatchStatus,
    LineCounts,
    LineRow,
    LineState,
    LineTokens,
    file_key,
    line_event_id,
    result_file_ids,
    result_key,
)
from footplate.platform.errors import FileStoreAway
from footplate.platform.metering import EventSink

PAGE_LINES = 64
_FINISHED = (LineState.SUCCEEDED, LineState.FAILED)


@dataclass(frozen=True, slots=True)
class Finalizing:
    """What finalizing needs."""

    queue: BatchQueue
    data: ByteStore
    sink: EventSink | None
    threads: StoreThreads
    worker: str

    async def run(self, batch: Batch, is_lost: Callable[[], bool]) -> BatchStatus | None:
        """End a batch; None when another worker has it by now.

        Raises:
            BatchStoreAway, FileStoreAway: something can't be asked.
        """
        for row in await self.threads.ask(lambda: self.queue.lines_left(batch.id)):
            await self._settle(batch, row)
        ended = await self.threads.ask(lambda: self._write(batch, is_lost))
        if ended is None or not await self.threads.ask(lambda: self.queue.finish(batch, self.worker, ended)):
            return None
        await self.threads.ask(lambda: sweep_batch(self.queue, self.data, batch.tenant_id, batch.id))
        return ended.status

    async def _settle(self, batch: Batch, row: LineRow) -> None:
        """A worker that was lost may have kept an answer: then the line has one, and is billed for it."""
        number = row.span.number
        keys = {n: result_key(batch.tenant_id, batch.id, number, n) for n in row.lost_attempts}
        end = await settle_kept(self.data, self.threads, self.sink, keys)
        if end is not None:
            await self.threads.ask(lambda: self.queue.end_left(batch.id, self.worker, number, end))

    def _write(self, batch: Batch, is_lost: Callable[[], bool]) -> Ended | None:
        last = last_status(batch.ending, batch.status)
        output, errors = (
            _LineFile(self.data, batch.tenant_id, file_id) for file_id in result_file_ids(batch.id)
        )
        counts, tokens = LineCounts(), LineTokens()
        try:
            for row, line, kept in self._results(batch, last):
                if is_lost():
                    return None
                (output if row.state is LineState.SUCCEEDED else errors).add(line)
                counts = _counted(counts, row.state)
                if kept is not None:
                    tokens = tokens + kept.end(0).tokens
            return Ended(last, counts, tokens, output.commit(), errors.commit())
        finally:
            output.abort()
            errors.abort()

    def _results(self, batch: Batch, last: BatchStatus) -> Iterator[tuple[LineRow, bytes, KeptResult | None]]:
        after = 0
        while rows := self.queue.lines(batch.id, after, PAGE_LINES):
            keys = [
                result_key(batch.tenant_id, batch.id, row.span.number, row.result_attempt or 0)
                for row in rows
                if row.state in _FINISHED
            ]
            found = iter(self.data.read_many(keys))
            for row in rows:
                if row.state in _FINISHED:
                    data = next(found)
                    kept = None if data is None else KeptResult.from_bytes(data)
                    if kept is None:
                        # It was durable once: whoever looks after the store may bring it back.
                        raise FileStoreAway("an answer that was kept is not in the file store")
                    yield row, kept.line, kept
                else:
                    yield row, self._unfinished(batch, row, last), None
            after = rows[-1].span.number

    def _unfinished(self, batch: Batch, row: LineRow, last: BatchStatus) -> bytes:
        span = row.span
        data = self.data.read(batch.input_key, span.offset, span.num_bytes)
        try:
            custom_id = "" if data is None else read_line(data).custom_id
        except msgspec.DecodeError:
            custom_id = ""
        return unfinished_line(line_event_id(batch.id, span.number), custom_id, *code_of_unfinished(last))


def sweep_batch(queue: BatchQueue, data: ByteStore, tenant_id: str, batch_id: str) -> None:
    """Let go of the answers of a batch's lines: they stand in its files."""
    data.delete_folder(f"{tenant_id}/batches/{batch_id}")
    queue.swept(batch_id)


def _counted(counts: LineCounts, state: LineState) -> LineCounts:
    return LineCounts(
        counts.total + 1,
        counts.completed + (state is LineState.SUCCEEDED),
        counts.failed + (state is LineState.FAILED),
    )


class _LineFile:
    """A file of lines that is only begun when it has one."""

    def __init__(self, data: ByteStore, tenant_id: str, file_id: str) -> None:
        self._data = data
        self._id = file_id
        self._key = file_key(tenant_id, file_id)
        self._writer: ByteWriter | None = None
        self._num_bytes = 0

    def add(self, line: bytes) -> None:
        if self._writer is None:
            self._writer = self._data.writer(self._key)
        self._writer.write(line + b"\n")
        self._num_bytes += len(line) + 1

    def commit(self) -> tuple[str, int] | None:
        """Its id and size; None for no line."""
        if self._writer is None:
            return None
        self._writer.commit()
        self._writer = None
        return self._id, self._num_bytes

    def abort(self) -> None:
        if self._writer is not None:
            self._writer.abort()
            self._writer = None
