"""Events on this machine's disk while the database is away: appended, synced, replayed, then deleted.

    root/                       shared by all gateways of the machine
      <name>/                   of one process, which holds a lock on `lock` as long as it lives
        lock
        000001.log  000002.log  frames: magic, length, CRC-32, event

A frame that a crash tore is known by its length or its sum. Reading goes on behind it at the next magic
number whose frame is whole, so damage costs no more than what it hit. Nothing is appended to a file after a
fault or a restart: a new one is begun.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import struct
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from footplate.billing.errors import InvalidUsage, JournalFailed, JournalFull
from footplate.billing.reconcile import WaitingEvents
from footplate.billing.usage import EventId, UsageEvent

MAGIC = b"FPU1"
_HEADER = struct.Struct("<4sII")  # magic, length, CRC-32 of the payload
MAX_FRAME_BYTES = 1 << 20
DEFAULT_SEGMENT_BYTES = 16 << 20
# For its owner: who looks for journals that are left holds even a new one, for the moment of the look.
LOOK_S = 5.0
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class Segment:
    """What a file held."""

    path: Path
    events: tuple[UsageEvent, ...]
    # Behind the last whole frame: a crash tore what nobody had been promised.
    num_torn_bytes: int
    # Before it: a disk or a program changed what had been whole.
    num_damaged_bytes: int


class Journal:
    """The journal of this process. One thread at a time appends and replays.

    `append` returns when its events are on the disk. Events are kept until `forget`.
    """

    def __init__(
        self, root: Path, name: str, *, segment_bytes: int = DEFAULT_SEGMENT_BYTES, wait_s: float = 0.0
    ) -> None:
        """Open or make `root/name`; waits so long for whoever holds it.

        Raises:
            JournalFailed: another process holds it, or the folder can't be written.
        """
        self.folder = root / name
        self.name = name
        self._segment_bytes = segment_bytes
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            _sync_folder(root)
            self._lock = _locked_within(self.folder, wait_s)
            self._paths = sorted(self.folder.glob("[0-9]*.log"))
        except OSError as error:
            raise _failure(self.folder, error) from error
        if self._lock is None:
            raise JournalFailed(f"journal {self.folder} is held by another process; give each its own name")
        self._number = max((int(path.stem) for path in self._paths), default=0)
        self._file: int | None = None
        self._size = 0

    def append(self, events: Sequence[UsageEvent]) -> None:
        """Write events and sync them: all are on the disk when it returns, none need be when it raises.

        Raises:
            JournalFull: the disk is full.
            JournalFailed: it can't be written, or can't be synced.
        """
        data = b"".join(frame(event) for event in events)
        try:
            descriptor = self._current()
            _write_all(descriptor, data)
            # What is not known to be on the disk is taken for not there: the file is given up below.
            os.fdatasync(descriptor)
        except OSError as error:
            self._give_up()
            raise _failure(self.folder, error) from error
        self._size += len(data)
        if self._size >= self._segment_bytes:
            self._end_segment()

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to replay."""
        return not self._paths

    def oldest(self) -> Segment | None:
        """The oldest file with all its events; no more is appended to it. None when there is none.

        Raises:
            JournalFailed: it can't be read.
        """
        if not self._paths:
            return None
        if len(self._paths) == 1:
            self._end_segment()
        try:
            return read_segment(self._paths[0])
        except OSError as error:
            raise _failure(self.folder, error) from error

    def forget(self, segment: Segment) -> None:
        """Delete a file whose events are in the database. One with damage inside is put aside instead.

        Raises:
            JournalFailed: it can't be deleted; to replay it again is safe.
        """
        try:
            if segment.num_damaged_bytes:
                segment.path.rename(segment.path.with_suffix(".damaged"))
            else:
                segment.path.unlink()
            _sync_folder(self.folder)
        except OSError as error:
            raise _failure(self.folder, error) from error
        self._paths.remove(segment.path)

    def put_aside(self, events: Sequence[UsageEvent]) -> None:
        """Keep events that the database refuses as they are, in a file that is not replayed.

        Raises:
            JournalFailed: it can't be written.
        """
        try:
            path = self.folder / "refused.events"
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                _write_all(descriptor, b"".join(frame(event) for event in events))
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            _sync_folder(self.folder)
        except OSError as error:
            raise _failure(self.folder, error) from error

    def close(self) -> None:
        """Let another process have it. A folder without events goes."""
        self._end_segment()
        if self._lock is None:
            return
        if not any(path.name != "lock" for path in self.folder.iterdir()):
            shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)
        self._lock = None

    def _current(self) -> int:
        if self._file is None:
            self._number += 1
            path = self.folder / f"{self._number:06d}.log"
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            self._paths.append(path)
            self._size = 0
            _sync_folder(self.folder)
        return self._file

    def _give_up(self) -> None:
        """After a fault nothing more goes to this file; what was whole in it stays."""
        if self._file is None:
            return
        with suppress(OSError):
            # What was not promised to anybody goes, so that a full disk is not filled by repetitions.
            os.ftruncate(self._file, self._size)
            if self._size == 0:
                self._paths[-1].unlink()
                self._paths.pop()
        self._end_segment()

    def _end_segment(self) -> None:
        if self._file is not None:
            with suppress(OSError):
                os.close(self._file)
            self._file = None


def orphans(root: Path) -> list[str]:
    """Names of journals whose process is gone, and that hold events or nothing at all."""
    names = []
    for folder in sorted(root.iterdir()) if root.is_dir() else []:
        if not folder.is_dir():
            continue
        with suppress(OSError):
            lock = _locked(folder)
            if lock is None:
                continue
            os.close(lock)
            # What was put aside stays where it is until somebody has looked at it.
            if any(folder.glob("[0-9]*.log")) or len(list(folder.iterdir())) == 1:
                names.append(folder.name)
    return names


def waiting_events(root: Path) -> WaitingEvents:
    """What the journals of a machine hold, their owners being at work or not. Raises OSError."""
    ids: set[EventId] = set()
    refused: set[EventId] = set()
    names, num_damaged_files = set(), 0
    for folder in sorted(root.iterdir()) if root.is_dir() else []:
        names.add(folder.name)
        for path in sorted(folder.glob("*")):
            num_damaged_files += path.suffix == ".damaged"
            kept = refused if path.name == "refused.events" else ids if path.suffix == ".log" else None
            if kept is None:
                continue
            # One that was replayed meanwhile is in the database.
            with suppress(FileNotFoundError):
                kept |= {each.skeleton.event_id for each in read_segment(path).events}
    return WaitingEvents(frozenset(ids), frozenset(names), frozenset(refused), num_damaged_files)


def frame(event: UsageEvent) -> bytes:
    """An event as it stands in a file."""
    payload = event.to_bytes()
    assert len(payload) <= MAX_FRAME_BYTES
    return _HEADER.pack(MAGIC, len(payload), zlib.crc32(payload)) + payload


def read_segment(path: Path) -> Segment:
    """All whole frames of a file. Raises OSError."""
    data = path.read_bytes()
    events = []
    end = num_read = 0
    for begin, payload in _payloads(data):
        try:
            events.append(UsageEvent.from_bytes(payload))
        except InvalidUsage:
            continue  # counted as damage: its bytes are in no event
        end = begin + _HEADER.size + len(payload)
        num_read += end - begin
    return Segment(path, tuple(events), len(data) - end, end - num_read)


def _payloads(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Whole frames: where each begins, and what is in it."""
    position = 0
    while (position := data.find(MAGIC, position)) >= 0:
        payload = _payload_at(data, position)
        if payload is None:
            position += 1
        else:
            yield position, payload
            position += _HEADER.size + len(payload)


def _payload_at(data: bytes, position: int) -> bytes | None:
    begin = position + _HEADER.size
    if begin > len(data):
        return None
    _, length, checksum = _HEADER.unpack_from(data, position)
    if length > MAX_FRAME_BYTES or begin + length > len(data):
        return None
    payload = data[begin : begin + length]
    return payload if zlib.crc32(payload) == checksum else None


def _locked(folder: Path) -> int | None:
    """A lock on a journal's folder, let go when its process ends, however it does. None: it is held."""
    try:
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Its holder may have deleted the folder between the two calls.
        if not os.path.samestat(os.fstat(descriptor), os.stat(folder / "lock")):
            raise BlockingIOError
    except (BlockingIOError, FileNotFoundError):
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _locked_within(folder: Path, wait_s: float) -> int | None:
    """As `_locked`; makes the folder anew when it was taken for one that is left, and cleared away."""
    deadline = time.monotonic() + wait_s
    while True:
        folder.mkdir(exist_ok=True, mode=0o700)
        lock = _locked(folder)
        if lock is not None or time.monotonic() >= deadline:
            return lock
        time.sleep(0.01)


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _failure(folder: Path, error: OSError) -> JournalFailed:
    if error.errno in _FULL:
        return JournalFull(f"the disk of {folder} is full: events wait in memory; free some space")
    reason = error.strerror or type(error).__name__
    return JournalFailed(f"{folder} can't be used ({reason}): events wait in memory; mend the folder")
