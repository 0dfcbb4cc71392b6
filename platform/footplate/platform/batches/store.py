"""What files and batches need from a database and from a store of bytes, as protocols.

Methods may block; any thread may call them. Rows raise BatchStoreAway when the database gives no answer in a
bounded time, bytes FileStoreAway. Leases and times are the database's own clock's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from footplate.platform.batches.values import (
    Batch,
    BatchStatus,
    ClaimedLine,
    FileLimits,
    LineCounts,
    LineEnd,
    LineFault,
    LineRow,
    LineSpan,
    LineTokens,
    NewBatch,
    StoredFile,
)


@dataclass(frozen=True, slots=True)
class ListPage:
    """Which part of a list is asked for: what comes after the entry with the id `after`."""

    limit: int
    after: str | None = None
    is_ascending: bool = False


@dataclass(frozen=True, slots=True)
class NewFile:
    """A file before its bytes are there."""

    tenant_id: str
    purpose: str
    filename: str
    expires_after_s: int | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """What a finalized batch has come to; a file id None: it would have no line."""

    status: BatchStatus
    counts: LineCounts
    tokens: LineTokens
    output: tuple[str, int] | None
    errors: tuple[str, int] | None


class ByteWriter(Protocol):
    """Takes the bytes of one object."""

    def write(self, data: bytes) -> None: ...

    def commit(self) -> None:
        """Make it be there, whole and durable. Until then nobody sees any of it."""
        ...

    def abort(self) -> None:
        """Let nothing remain of it. Safe at any time."""
        ...


class ByteStore(Protocol):
    """Objects by key, whole or not there at all."""

    def writer(self, key: str) -> ByteWriter:
        """Begin an object, or one in the place of what is there."""
        ...

    def put(self, key: str, data: bytes) -> None:
        """Keep an object; durable when it returns."""
        ...

    def read(self, key: str, offset: int = 0, num_bytes: int | None = None) -> bytes | None:
        """A part of an object, or None when it is not there."""
        ...

    def read_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """Several small objects at once, in the order of their keys."""
        ...

    def pieces(self, key: str) -> Iterator[bytes] | None:
        """An object piece by piece, or None when it is not there."""
        ...

    def delete(self, key: str) -> None:
        """Let go of an object; one that is not there is no fault."""
        ...

    def delete_folder(self, folder: str) -> None:
        """Let go of every object whose key begins with the folder's name and a slash."""
        ...


class FileRows(Protocol):
    """What is known of files beside their bytes. A tenant sees its own only."""

    def begin(self, new: NewFile, limits: FileLimits) -> str:
        """Note a file whose bytes are about to come; its id. Raises LimitRefused."""
        ...

    def note_size(self, file_id: str, new: NewFile, num_bytes: int, limits: FileLimits) -> None:
        """So much of it is there by now: it counts like what is kept. Raises LimitRefused."""
        ...

    def finish(self, file_id: str, new: NewFile, num_bytes: int, limits: FileLimits) -> StoredFile:
        """Its bytes are there. Raises LimitRefused; then it is as if it had been deleted."""
        ...

    def find(self, tenant_id: str, file_id: str) -> StoredFile | None: ...

    def page_of(self, tenant_id: str, page: ListPage, purpose: str | None) -> tuple[list[StoredFile], bool]:
        """A page, newest first unless it says otherwise, and whether there is more. Raises NotThere."""
        ...

    def begin_delete(self, tenant_id: str, file_id: str) -> StoredFile | None:
        """Nobody sees it from now on; its bytes are to go. Raises WrongState while a batch reads it."""
        ...

    def doomed(self, limit: int) -> list[tuple[str, str]]:
        """(tenant, id) of files whose bytes are to go: deleted, expired, or never finished."""
        ...

    def forget(self, file_id: str) -> None:
        """Its bytes are gone."""
        ...


class BatchRows(Protocol):
    """Batches as their owners see them."""

    def create(self, new: NewBatch, max_open: int) -> Batch:
        """Note a batch. Raises InvalidRequest (no such file, or of another purpose) and LimitRefused."""
        ...

    def find(self, tenant_id: str, batch_id: str) -> Batch | None: ...

    def page_of(self, tenant_id: str, page: ListPage) -> tuple[list[Batch], bool]:
        """A page, newest first, and whether there is more. Raises NotThere."""
        ...

    def cancel(self, tenant_id: str, batch_id: str) -> Batch | None:
        """End it early. Raises WrongState when it is over."""
        ...


class BatchQueue(Protocol):
    """The work of batches, shared by all workers. A lease that is not renewed ends; then another may take it.

    `worker` is the name of one process, never used by another one.
    """

    def advance(self) -> None:
        """Move on what needs no worker: leases that are over, batches whose time or lines are over."""
        ...

    def begin_validation(self, worker: str) -> Batch | None:
        """Lease a batch to validate."""
        ...

    def renew_batches(self, worker: str, batch_ids: Collection[str]) -> set[str]:
        """Begin leases of batches anew; those that this worker still has."""
        ...

    def put_off(self, batch_id: str, worker: str, wait_s: float) -> None:
        """Let go of a batch, to be leased again after a while."""
        ...

    def accept(self, batch_id: str, worker: str, model: str, spans: Sequence[LineSpan]) -> bool:
        """Its lines may run. False: another worker has it by now, or it was cancelled."""
        ...

    def reject(self, batch_id: str, worker: str, faults: Sequence[LineFault]) -> bool:
        """It fails, for these faults."""
        ...

    def claim(self, worker: str, num_free: int) -> list[ClaimedLine]:
        """Lease lines to run, by `fairness.shares`."""
        ...

    def renew(self, worker: str, held: Collection[ClaimedLine]) -> dict[tuple[str, int], BatchStatus]:
        """Begin leases of lines anew: the status of the batch of each that this worker still has."""
        ...

    def end_line(self, worker: str, line: ClaimedLine, end: LineEnd) -> bool:
        """The line has ended. False: another worker has it by now."""
        ...

    def give_back(
        self, worker: str, line: ClaimedLine, wait_s: float, *, is_failure: bool, is_lost: bool = False
    ) -> bool:
        """Let go of a line that has not ended. `is_lost`: this attempt may have left an answer.

        With a wait, its batch begins no other line meanwhile either: what refused the one refuses the others.
        """
        ...

    def begin_finalizing(self, worker: str) -> Batch | None:
        """Lease a batch none of whose lines runs or may run."""
        ...

    def lines(self, batch_id: str, after: int, limit: int) -> list[LineRow]:
        """Lines of a batch by number, those behind `after`."""
        ...

    def lines_left(self, batch_id: str) -> list[LineRow]:
        """Unfinished lines of which an attempt was lost."""
        ...

    def end_left(self, batch_id: str, worker: str, number: int, end: LineEnd) -> bool:
        """A line of a batch that is being finalized had an answer after all."""
        ...

    def finish(self, batch: Batch, worker: str, ended: Ended) -> bool:
        """The batch is over and its files are there, in one transaction. Lines are forgotten."""
        ...

    def unswept(self, limit: int) -> list[tuple[str, str]]:
        """(tenant, batch) whose lines' answers may still be in the file store."""
        ...

    def swept(self, batch_id: str) -> None:
        """They are gone."""
        ...

    def depth(self) -> Mapping[str, int]:
        """How many lines wait and run, over all gateways."""
        ...
