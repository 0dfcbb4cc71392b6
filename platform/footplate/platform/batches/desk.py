"""Files and batches as the endpoints ask for them: rows and bytes together, off the event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from footplate.platform.batches.store import BatchRows, ByteStore, ByteWriter, FileRows, ListPage, NewFile
from footplate.platform.batches.threads import StoreThreads
from footplate.platform.batches.values import Batch, FileLimits, NewBatch, StoredFile, file_key
from footplate.platform.errors import BatchStoreAway, FileStoreAway, NotThere

NO_SUCH_FILE = "There is no such file, or it is not yours. GET /v1/files lists yours."
NO_SUCH_BATCH = "There is no such batch, or it is not yours. GET /v1/batches lists yours."
# As often the size of an upload is noted: many at a time fill a disk long before the first is whole.
NOTED_BYTES = 1 << 20
_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class BatchDesk:
    """What the endpoints of files and batches work with. `wake` tells a worker that there is work."""

    files: FileRows
    batches: BatchRows
    data: ByteStore
    limits: FileLimits = field(default_factory=FileLimits)
    max_open_batches: int = 100
    wake: list[Callable[[], None]] = field(default_factory=list)
    threads: StoreThreads = field(default_factory=lambda: StoreThreads("files", 4))

    async def file(self, tenant_id: str, file_id: str) -> StoredFile:
        """A tenant's file. Raises NotThere."""
        return _there(await self.threads.ask(lambda: self.files.find(tenant_id, file_id)), NO_SUCH_FILE)

    async def list_files(
        self, tenant_id: str, page: ListPage, purpose: str | None
    ) -> tuple[list[StoredFile], bool]:
        """A page of a tenant's files, and whether there is more. Raises NotThere."""
        return await self.threads.ask(lambda: self.files.page_of(tenant_id, page, purpose))

    async def content(self, tenant_id: str, file_id: str) -> tuple[StoredFile, AsyncIterator[bytes]]:
        """A file and its bytes, piece by piece. Raises NotThere."""
        file = await self.file(tenant_id, file_id)

        def begin() -> tuple[Iterator[bytes], bytes] | None:
            pieces = self.data.pieces(file.key)
            # The first one is read while a fault can still be told.
            return None if pieces is None else (pieces, next(pieces, b""))

        found = await self.threads.ask(begin)
        if found is None:
            raise FileStoreAway("a file's bytes are not in the file store")
        return file, self._rest(*found)

    async def _rest(self, pieces: Iterator[bytes], first: bytes) -> AsyncIterator[bytes]:
        piece = first
        while piece:
            yield piece
            piece = await self.threads.ask(lambda: next(pieces, b""))

    async def delete_file(self, tenant_id: str, file_id: str) -> None:
        """Let go of a file. Raises NotThere, and WrongState while a batch reads it."""

        def delete() -> StoredFile | None:
            found = self.files.begin_delete(tenant_id, file_id)
            if found is not None:
                self.data.delete(found.key)
                self.files.forget(found.id)
            return found

        _there(await self.threads.ask(delete), NO_SUCH_FILE)

    async def begin_upload(self, new: NewFile) -> Upload:
        """Begin a file. Raises LimitRefused."""

        def begin() -> Upload:
            file_id = self.files.begin(new, self.limits)
            key = file_key(new.tenant_id, file_id)
            return Upload(self, new, file_id, key, self.data.writer(key))

        return await self.threads.ask(begin)

    async def create_batch(self, new: NewBatch) -> Batch:
        """Raises InvalidRequest and LimitRefused."""
        batch = await self.threads.ask(lambda: self.batches.create(new, self.max_open_batches))
        self.tell()
        return batch

    async def batch(self, tenant_id: str, batch_id: str) -> Batch:
        """A tenant's batch. Raises NotThere."""
        return _there(await self.threads.ask(lambda: self.batches.find(tenant_id, batch_id)), NO_SUCH_BATCH)

    async def list_batches(self, tenant_id: str, page: ListPage) -> tuple[list[Batch], bool]:
        """A page of a tenant's batches, and whether there is more. Raises NotThere."""
        return await self.threads.ask(lambda: self.batches.page_of(tenant_id, page))

    async def cancel_batch(self, tenant_id: str, batch_id: str) -> Batch:
        """End a batch early. Raises NotThere and WrongState."""
        found = await self.threads.ask(lambda: self.batches.cancel(tenant_id, batch_id))
        self.tell()
        return _there(found, NO_SUCH_BATCH)

    def tell(self) -> None:
        """There is something to do for workers of this gateway."""
        for wake in self.wake:
            wake()

    async def close(self) -> None:
        """Let no more work begin."""
        await self.threads.close()


@dataclass(slots=True, eq=False)
class Upload:
    """A file whose bytes are coming. `finish` or `abort` must follow."""

    desk: BatchDesk
    new: NewFile
    file_id: str
    key: str
    writer: ByteWriter
    num_bytes: int = 0
    _num_noted: int = 0

    async def write(self, data: bytes) -> None:
        """Take the next bytes. Raises LimitRefused once the tenant's files would hold too much."""
        self.num_bytes += len(data)

        def write() -> None:
            if self.num_bytes - self._num_noted >= NOTED_BYTES:
                self.desk.files.note_size(self.file_id, self.new, self.num_bytes, self.desk.limits)
                self._num_noted = self.num_bytes
            self.writer.write(data)

        await self.desk.threads.ask(write)

    async def finish(self, new: NewFile) -> StoredFile:
        """All of it is there. Raises LimitRefused."""

        def finish() -> StoredFile:
            self.writer.commit()
            return self.desk.files.finish(self.file_id, new, self.num_bytes, self.desk.limits)

        return await self.desk.threads.ask(finish)

    async def abort(self) -> None:
        """Let nothing remain of it; what can't be told now is swept later."""

        def abort() -> None:
            self.writer.abort()
            self.desk.data.delete(self.key)
            self.desk.files.forget(self.file_id)

        with suppress(BatchStoreAway, FileStoreAway):
            await self.desk.threads.ask(abort)


def _there(found: _Answer | None, message: str) -> _Answer:
    if found is None:
        raise NotThere(message, "id")
    return found
