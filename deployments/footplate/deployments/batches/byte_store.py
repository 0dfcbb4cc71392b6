"""Files' bytes on a disk, or on any file system that fsspec knows; see `ByteStore`.

On a disk an object is written under another name, synced, and put in its place: it is there whole or not at
all, also after a power cut. An object store has no half objects: its upload is completed, or given up.
"""

from __future__ import annotations

import errno
import glob
import os
import secrets
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from footplate.platform.batches.store import ByteStore, ByteWriter
from footplate.platform.errors import FileStoreAway, FileStoreFull

EMBEDDED = "embedded"
PIECE_BYTES = 1 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT)


def open_byte_store(files_url: str, data_dir: Path) -> ByteStore:
    """The store of a URL; `embedded`: the folder `files` of the data folder.

    Raises:
        ValueError, ImportError: nothing here knows such URLs, or a package for them is missing.
    """
    url = str(data_dir / "files") if files_url == EMBEDDED else files_url
    system, root = fsspec.core.url_to_fs(url)
    if isinstance(system, LocalFileSystem):
        return DiskStore(Path(root))
    return ObjectStore(system, root)


@contextmanager
def _asking() -> Iterator[None]:
    """Whatever goes wrong on the way to a store means the same here, and its text may name secrets."""
    try:
        yield
    except FileStoreAway:
        raise
    except Exception as error:
        is_full = isinstance(error, OSError) and error.errno in _FULL
        raise (FileStoreFull if is_full else FileStoreAway)(type(error).__name__) from None


class DiskStore:
    """A folder of this machine, or one that several mount."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def writer(self, key: str) -> ByteWriter:
        """As `ByteStore.writer`."""
        with _asking():
            return _DiskWriter(self._root / key)

    def put(self, key: str, data: bytes) -> None:
        """As `ByteStore.put`."""
        with _asking():
            writer = _DiskWriter(self._root / key)
            try:
                writer.write(data)
                writer.commit()
            finally:
                writer.abort()

    def read(self, key: str, offset: int = 0, num_bytes: int | None = None) -> bytes | None:
        """As `ByteStore.read`."""
        with _asking():
            try:
                with open(self._root / key, "rb") as file:
                    file.seek(offset)
                    return file.read(-1 if num_bytes is None else num_bytes)
            except FileNotFoundError:
                return None

    def read_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """As `ByteStore.read_many`."""
        return [self.read(key) for key in keys]

    def pieces(self, key: str) -> Iterator[bytes] | None:
        """As `ByteStore.pieces`."""
        return _pieces(lambda: open(self._root / key, "rb"))

    def delete(self, key: str) -> None:
        """As `ByteStore.delete`."""
        with _asking():
            path = self._root / key
            path.unlink(missing_ok=True)
            # What a process that died had begun of it stands beside it, and nobody else knows its name.
            for begun in path.parent.glob(f".{glob.escape(path.name)}.*"):
                begun.unlink(missing_ok=True)

    def delete_folder(self, folder: str) -> None:
        """As `ByteStore.delete_folder`."""
        with _asking():
            path = self._root / folder
            for entry in list(path.iterdir()) if path.is_dir() else ():
                entry.unlink(missing_ok=True)
            with suppress(FileNotFoundError, NotADirectoryError):
                path.rmdir()


class _DiskWriter:
    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._new = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
        descriptor = os.open(self._new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        self._file = os.fdopen(descriptor, "wb")
        self._is_over = False

    def write(self, data: bytes) -> None:
        with _asking():
            self._file.write(data)

    def commit(self) -> None:
        with _asking():
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            os.replace(self._new, self._path)
            self._is_over = True
            # Its name is in the folder, which has to be synced too.
            folder = os.open(self._path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def abort(self) -> None:
        if self._is_over:
            return
        self._is_over = True
        with suppress(OSError):
            self._file.close()
        with suppress(OSError):
            self._new.unlink(missing_ok=True)


class ObjectStore:
    """Any other file system of fsspec: S3 and what speaks like it, Google's, Azure's, memory for tests."""

    def __init__(self, system: Any, root: str) -> None:
        self._system = system
        self._root = root.rstrip("/")

    def writer(self, key: str) -> ByteWriter:
        """As `ByteStore.writer`."""
        with _asking():
            return _ObjectWriter(self._system, self._path(key))

    def put(self, key: str, data: bytes) -> None:
        """As `ByteStore.put`."""
        with _asking():
            self._system.pipe_file(self._path(key), data)

    def read(self, key: str, offset: int = 0, num_bytes: int | None = None) -> bytes | None:
        """As `ByteStore.read`."""
        part = {} if num_bytes is None and not offset else {"start": offset}
        if num_bytes is not None:
            part["end"] = offset + num_bytes
        with _asking():
            try:
                return bytes(self._system.cat_file(self._path(key), **part))
            except FileNotFoundError:
                return None

    def read_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """As `ByteStore.read_many`: side by side, where the file system can."""
        if not keys:
            return []
        paths = [self._path(key) for key in keys]
        with _asking():
            found = self._system.cat(paths, on_error="return")
            return [self._found(found[self._system._strip_protocol(path)]) for path in paths]

    def pieces(self, key: str) -> Iterator[bytes] | None:
        """As `ByteStore.pieces`."""
        return _pieces(lambda: self._system.open(self._path(key), "rb", block_size=PIECE_BYTES))

    def delete(self, key: str) -> None:
        """As `ByteStore.delete`."""
        with _asking(), suppress(FileNotFoundError):
            self._system.rm_file(self._path(key))

    def delete_folder(self, folder: str) -> None:
        """As `ByteStore.delete_folder`."""
        with _asking(), suppress(FileNotFoundError):
            self._system.rm(self._path(folder), recursive=True)

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    @staticmethod
    def _found(answer: Any) -> bytes | None:
        if isinstance(answer, FileNotFoundError):
            return None
        if isinstance(answer, Exception):
            raise answer
        return bytes(answer)


class _ObjectWriter:
    """Gathers on this machine's temporary disk and uploads at the end: no store shows a half of it."""

    def __init__(self, system: Any, path: str) -> None:
        self._system = system
        self._path = path
        self._file = tempfile.NamedTemporaryFile("wb")

    def write(self, data: bytes) -> None:
        with _asking():
            self._file.write(data)

    def commit(self) -> None:
        with _asking():
            self._file.flush()
            self._system.put_file(self._file.name, self._path)
            self._file.close()

    def abort(self) -> None:
        with suppress(OSError):
            self._file.close()


def _pieces(begin: Callable[[], Any]) -> Iterator[bytes] | None:
    with _asking():
        try:
            file = begin()
        except FileNotFoundError:
            return None

    def read() -> Iterator[bytes]:
        try:
            while True:
                with _asking():
                    piece = bytes(file.read(PIECE_BYTES))
                if not piece:
                    return
                yield piece
        finally:
            file.close()

    return read()
