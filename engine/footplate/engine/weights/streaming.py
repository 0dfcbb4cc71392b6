"""Bytes of files into tensors wherever they lie, by several threads through a few buffers.

Each thread has two buffers of SLICE bytes, pinned where the device is CUDA: it reads the next slice into one
while the copy out of the other runs on the thread's own stream. A tensor of the file's type on the host is
read in place. So memory beside the tensors themselves is bounded by threads * 2 * SLICE on the host, and on
the device by a slice for each thread where types differ.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from footplate.engine.errors import LoadError
from footplate.engine.weights.files import open_regular
from footplate.engine.weights.safetensors import ELEMENT_BYTES, FileState, StoredTensor

SLICE = 16 << 20
MIN_READERS, MAX_READERS = 4, 8  # a disk wants several requests at once, whatever the number of processors
FLOAT_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Placement:
    """A stored tensor and the memory it goes to.

    `target` is contiguous, has as many elements, and any float type and device. Values are rounded to
    `rounded_to` on the way, if it is given, and `added` is added to them in float32.
    """

    stored: StoredTensor
    target: torch.Tensor
    rounded_to: torch.dtype | None = None
    added: float = 0.0

    @property
    def is_plain(self) -> bool:
        """Whether the target holds just the file's bytes."""
        dtype = FLOAT_TYPES[self.stored.dtype]
        return self.target.dtype is dtype and self.rounded_to in (None, dtype) and not self.added


@dataclass(frozen=True, slots=True)
class _Slice:
    """A part of a placement, small enough for a buffer."""

    placement: Placement
    begin: int  # in the file
    num_bytes: int
    target: torch.Tensor  # flat


def num_readers() -> int:
    """How many threads read at once on this machine."""
    return min(MAX_READERS, max(MIN_READERS, len(os.sched_getaffinity(0))))


def stream(placements: Sequence[Placement]) -> None:
    """Read all placements; returns when the tensors are whole.

    Raises:
        LoadError: a file was changed since its header was read, ends early or can't be read. The targets then
            hold anything.
    """
    work = _Work(_in_turn(placements))
    devices = {p.target.device for p in placements if p.target.device.type == "cuda"}
    # What was allocated in these streams' order may still be in use there.
    before = {device: torch.cuda.current_stream(device) for device in devices}
    with contextlib.ExitStack() as files:
        descriptors = {path: _open(path, files) for path in {p.stored.path: None for p in placements}}
        for placement in placements:
            _check_unchanged(placement.stored, descriptors)
        count = num_readers()
        readers = ThreadPoolExecutor(count, "footplate-weights")
        try:
            ends = [readers.submit(_Reader(work, descriptors, before).run) for _ in range(count)]
            for end in ends:
                end.result()
        finally:
            work.give_up()
            readers.shutdown(wait=True)
    if devices:
        _unpin()


class _Work:
    """Slices for whoever is free; nothing more once somebody failed."""

    def __init__(self, slices: Iterator[_Slice]) -> None:
        self._slices = slices
        self._lock = threading.Lock()
        self._is_over = False

    def next(self) -> _Slice | None:
        with self._lock:
            return None if self._is_over else next(self._slices, None)

    def give_up(self) -> None:
        self._is_over = True


class _Reader:
    """One thread's work."""

    def __init__(
        self, work: _Work, descriptors: dict[Path, int], before: dict[torch.device, torch.cuda.Stream]
    ) -> None:
        self._work = work
        self._descriptors = descriptors
        self._before = before
        self._buffers: list[_Buffer] = []
        self._turn = 0

    def run(self) -> None:
        streams = {device: torch.cuda.Stream(device) for device in self._before}  # type: ignore[no-untyped-call]
        for device, side in streams.items():
            side.wait_stream(self._before[device])
        try:
            while (part := self._work.next()) is not None:
                self._carry(part, streams)
            for side in streams.values():
                side.synchronize()
        except BaseException:
            self._work.give_up()
            raise

    def _carry(self, part: _Slice, streams: dict[torch.device, torch.cuda.Stream]) -> None:
        placement, target = part.placement, part.target
        descriptor = self._descriptors[placement.stored.path]
        if placement.is_plain and target.device.type == "cpu":
            _read(descriptor, target.view(torch.uint8), part)
            return
        buffer = self._next_buffer()
        _read(descriptor, buffer.memory[: part.num_bytes], part)
        values = buffer.memory[: part.num_bytes].view(FLOAT_TYPES[placement.stored.dtype])
        if target.device.type == "cpu":
            target.copy_(_converted(values, placement))
            return
        with torch.cuda.stream(streams[target.device]):
            if placement.is_plain:
                target.copy_(values, non_blocking=True)
            else:
                # Types change on the device: a copy between both would convert on the host, by one thread.
                moved = values.to(target.device, non_blocking=True)
                target.copy_(_converted(moved, placement))
            buffer.mark_used(streams[target.device])

    def _next_buffer(self) -> _Buffer:
        if len(self._buffers) < 2:
            self._buffers.append(_Buffer(is_pinned=bool(self._before)))
        self._turn = (self._turn + 1) % len(self._buffers)
        buffer = self._buffers[self._turn]
        buffer.wait()
        return buffer


class _Buffer:
    def __init__(self, *, is_pinned: bool) -> None:
        self.memory = torch.empty(SLICE, dtype=torch.uint8, pin_memory=is_pinned)
        self._used: torch.cuda.Event | None = None

    def mark_used(self, side: torch.cuda.Stream) -> None:
        self._used = side.record_event()

    def wait(self) -> None:
        """Until the copy that reads this buffer has run."""
        if self._used is not None:
            self._used.synchronize()


def _converted(values: torch.Tensor, placement: Placement) -> torch.Tensor:
    if placement.rounded_to is not None:
        values = values.to(placement.rounded_to)
    return values.float() + placement.added if placement.added else values


def _in_turn(placements: Iterable[Placement]) -> Iterator[_Slice]:
    """Slices of every file in the order of its bytes, the files in turn: so several are read at once."""
    of_file: dict[Path, list[Placement]] = {}
    for placement in sorted(placements, key=lambda p: p.stored.begin):
        of_file.setdefault(placement.stored.path, []).append(placement)
    waiting = [_slices(found) for found in of_file.values()]
    while waiting:
        for slices in list(waiting):
            part = next(slices, None)
            if part is None:
                waiting.remove(slices)
            else:
                yield part


def _slices(placements: Iterable[Placement]) -> Iterator[_Slice]:
    for placement in placements:
        stored, flat = placement.stored, placement.target.view(-1)
        size = ELEMENT_BYTES[stored.dtype]
        for begin in range(0, stored.num_bytes, SLICE):
            num_bytes = min(SLICE, stored.num_bytes - begin)
            target = flat[begin // size : (begin + num_bytes) // size]
            yield _Slice(placement, stored.begin + begin, num_bytes, target)


def _unpin() -> None:
    """Hand the buffers back; torch would keep them pinned for ever."""
    release = getattr(torch.accelerator, "empty_host_cache", None)  # not in our oldest torch
    if release is not None:
        release()


def _open(path: Path, files: contextlib.ExitStack) -> int:
    return files.enter_context(open_regular(path)).fileno()


def _check_unchanged(stored: StoredTensor, descriptors: dict[Path, int]) -> None:
    if FileState.of(descriptors[stored.path]) != stored.state:
        raise LoadError(f"{stored.path}: was changed while it was being loaded; load it again")


def _read(descriptor: int, into: torch.Tensor, part: _Slice) -> None:
    view, done = into.numpy().data, 0
    while done < part.num_bytes:
        try:
            count = os.preadv(descriptor, [view[done:]], part.begin + done)
        except OSError as error:
            raise LoadError(f"{part.placement.stored.path}: can't be read ({error.strerror})") from None
        if count == 0:
            raise LoadError(
                f"{part.placement.stored.path}: ends at byte {part.begin + done} while it is being loaded"
            )
        done += count
