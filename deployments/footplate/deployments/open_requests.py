"""Requests that run while the shared store can't know of them, on this machine's disk.

A gateway that is killed while Valkey is away, or just after, would take with it what its streams have used:
their leases are in its memory alone. So it writes them down here, and whoever starts next on the machine
finds those that nobody has ended. It survives the death of the process, not that of the machine. Nothing is
written while the store is there.

    root/<process>.open     frames: length, MessagePack of (request id, note, progress); ended: an empty note
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from footplate.tenancy.limiter.reaper import LostPort
from footplate.tenancy.limiter.reservations import LostRequest

_LOGGER = logging.getLogger(__name__)
_LENGTH = struct.Struct("<I")
_FRAME = msgspec.msgpack.Decoder(tuple[str, bytes, bytes])
MAX_FILE_BYTES = 16 << 20
LOOK_S = 30.0


class OpenRequests:
    """The file of one process, made when it is first needed. One event loop owns it; writes are short."""

    def __init__(self, root: Path, name: str, *, max_file_bytes: int = MAX_FILE_BYTES) -> None:
        self._path = root / f"{name}.open"
        self._max_file_bytes = max_file_bytes
        self._file = -1
        self._num_bytes = 0
        self._kept: dict[str, tuple[bytes, bytes]] = {}
        self._is_failing = False

    def keep(self, request_id: str, note: bytes, progress: bytes) -> None:
        """Write down what whoever finds it must know; again, as the request comes further."""
        self._kept[request_id] = (note, progress)
        self._append(_frame(request_id, note, progress))

    def drop(self, request_id: str) -> None:
        """It has ended, or the store knows of it."""
        if self._kept.pop(request_id, None) is None:
            return
        if self._kept:
            self._append(_frame(request_id, b"", b""))
        else:
            self._remove()

    def close(self) -> None:
        """Leave what is still open to whoever comes next."""
        if not self._kept:
            self._remove()
        elif self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _append(self, data: bytes) -> None:
        try:
            if self._file < 0 or self._num_bytes + len(data) > self._max_file_bytes:
                self._begin()
            else:
                _write_all(self._file, data)
                self._num_bytes += len(data)
            self._is_failing = False
        except OSError as error:
            # The file lacks something, and may end in a part of it: the next change begins a new one.
            self._num_bytes = self._max_file_bytes
            if not self._is_failing:
                _LOGGER.error("open requests can't be written down: %s", error.strerror)
            self._is_failing = True

    def _begin(self) -> None:
        """A file of all that is kept, in place of the one before, which stays until then."""
        data = b"".join(_frame(name, *kept) for name, kept in self._kept.items())
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        new = self._path.with_suffix(".new")
        file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        try:
            # Held as long as the process lives: who finds it free knows that the process is gone.
            fcntl.flock(file, fcntl.LOCK_EX)
            _write_all(file, data)
            new.rename(self._path)
        except OSError:
            os.close(file)
            with suppress(OSError):
                new.unlink()
            raise
        before, self._file, self._num_bytes = self._file, file, len(data)
        if before >= 0:
            os.close(before)

    def _remove(self) -> None:
        if self._file >= 0:
            self._path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = -1


class LeftRequests:
    """Finds what processes of this machine have left open, and has it taken care of."""

    def __init__(self, root: Path, port: LostPort) -> None:
        self._root = root
        self._port = port

    async def run(self) -> None:
        """Look now and again, until cancelled."""
        while True:
            try:
                await self.look()
            except Exception:
                _LOGGER.exception("requests that were left open could not be taken care of; they stay")
            await asyncio.sleep(LOOK_S)

    async def look(self) -> int:
        """Take care of every file whose process is gone; how many requests were left in them."""
        num_left = 0
        for path in sorted(self._root.glob("*.open")) if self._root.is_dir() else []:
            with suppress(FileNotFoundError, BlockingIOError):
                num_left += await self._take_over(path)
        return num_left

    async def _take_over(self, path: Path) -> int:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Its process may have begun a new one between the two calls.
            if not os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return 0
            left = read_open(path.read_bytes())
            if left:
                await self._port.take_care(left)
            path.unlink(missing_ok=True)
            return len(left)
        finally:
            os.close(descriptor)


def read_all_open(root: Path) -> Iterator[LostRequest]:
    """What all processes of this machine have written down and not ended, at work or gone."""
    for path in sorted(root.glob("*.open")) if root.is_dir() else []:
        with suppress(FileNotFoundError):
            yield from read_open(path.read_bytes())


def read_open(data: bytes) -> list[LostRequest]:
    """What a file says is open, each as it was last known; a torn frame at its end counts for nothing."""
    found: dict[str, LostRequest] = {}
    for name, note, progress in _frames(data):
        if note:
            found[name] = LostRequest(name, note, progress)
        else:
            found.pop(name, None)
    return list(found.values())


def _frames(data: bytes) -> Iterator[tuple[str, bytes, bytes]]:
    position = 0
    while position + _LENGTH.size <= len(data):
        (length,) = _LENGTH.unpack_from(data, position)
        position += _LENGTH.size
        payload = data[position : position + length]
        if len(payload) < length:
            return
        position += length
        with suppress(msgspec.DecodeError):
            yield _FRAME.decode(payload)


def _frame(request_id: str, note: bytes, progress: bytes) -> bytes:
    payload = msgspec.msgpack.encode((request_id, note, progress))
    return _LENGTH.pack(len(payload)) + payload


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
