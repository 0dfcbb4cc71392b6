"""What an engine replica has produced, by request: the other side of the ledger, for reconciliation.

    folder/                          of one replica's place, across its processes
      <process>-000001.ended         a JSON line for each request that has ended
      <process>-000003.steps         binary: what each step added to the requests that run

A step is written before its tokens leave, in one write without a sync: it survives the death of the process,
not that of the machine. Both kinds of file are bounded. A request's journal holds no content, only counts.
"""

from __future__ import annotations

import fcntl
import logging
import os
import struct
import threading
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from footplate.engine.types import SequenceDelta
from footplate.engine.validation import MAX_CHOICES

_LOGGER = logging.getLogger(__name__)
_HEAD = struct.Struct("<BI")  # kind, bytes that follow
_OPEN, _STEP, _CUT = 1, 2, 3
_OPENED = struct.Struct("<II")  # number, choices; then the request's id
_CUT_AT = struct.Struct("<III")  # number, choice, tokens that count
MAX_STEP_BYTES = 4 << 20
MAX_ENDED_BYTES = 8 << 20
# Of all files of what has ended: a million requests and more. Each start of a replica begins a file.
MAX_KEPT_BYTES = 128 << 20
MAX_UNWRITTEN = 10_000  # requests that wait in memory for a disk that takes nothing


@dataclass(slots=True)
class ProducedTokens:
    """Of one request at one engine, by choice. `used` None: all that was produced belongs to the answer."""

    request_id: str
    produced: list[int]
    used: list[int | None]
    # The process was killed while it ran: what it made after its last step is in nobody's count.
    is_cut_off: bool = False
    # That has run it, as its files are named.
    process: str = ""

    @property
    def num_produced(self) -> int:
        """All tokens that the engine made."""
        return sum(self.produced)

    @property
    def num_delivered(self) -> int:
        """Those that belong to the answer: up to a stop string, or until the client was heard to leave."""
        pairs = zip(self.produced, self.used, strict=True)
        return sum(made if used is None else min(made, used) for made, used in pairs)

    @property
    def num_discarded(self) -> int:
        """Those that nobody is billed for."""
        return self.num_produced - self.num_delivered


@dataclass(slots=True)
class _Running:
    number: int
    tokens: ProducedTokens
    open_choices: set[int]


class _Line(msgspec.Struct, omit_defaults=True):
    """One line of an `ended` file; a later line of the same request adds its `used` to the first."""

    id: str
    produced: list[int] = []
    used: list[int | None] = []
    is_cut_off: bool = False


class EngineJournal:
    """The journal of one process. Any thread may call; calls are short, and none raises for a full disk."""

    def __init__(
        self,
        folder: Path,
        *,
        max_step_bytes: int = MAX_STEP_BYTES,
        max_ended_bytes: int = MAX_ENDED_BYTES,
        max_kept_bytes: int = MAX_KEPT_BYTES,
    ) -> None:
        self._folder = folder
        self._max_step_bytes = max_step_bytes
        self._max_ended_bytes = max_ended_bytes
        self._max_kept_bytes = max_kept_bytes
        self._lock = threading.Lock()
        self._running: dict[str, _Running] = {}
        self._unwritten: list[ProducedTokens] = []  # have ended; the disk has not taken them yet
        self._next_number = 0
        self._name = f"{time.time_ns():020d}-{os.getpid()}"
        self._num_files = 0
        self._is_failing = False
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._ended, self._ended_bytes = -1, 0
        self._steps, self._steps_path, self._step_bytes = -1, folder, 0
        self._keep_what_others_left()
        self._begin_steps()

    def open(self, request_id: str, num_choices: int) -> None:
        """A request is about to be given to the engine."""
        tokens = ProducedTokens(request_id, [0] * num_choices, [None] * num_choices)
        with self._lock:
            self._next_number = (self._next_number + 1) & 0xFFFFFFFF
            running = _Running(self._next_number, tokens, set(range(num_choices)))
            self._running[request_id] = running
            self._write_steps(_opened(running))

    def forget(self, request_id: str) -> None:
        """The engine has refused it."""
        with self._lock:
            self._running.pop(request_id, None)

    def note(self, deltas: Sequence[SequenceDelta]) -> None:
        """What one step added, before it is delivered."""
        words = array("I")
        ended: list[ProducedTokens] = []
        with self._lock:
            for delta in deltas:
                running = self._running.get(delta.request_id)
                if running is None:
                    continue
                num_tokens = len(delta.token_ids)
                if num_tokens:
                    running.tokens.produced[delta.index] += num_tokens
                    words.extend((running.number, delta.index, num_tokens))
                if delta.finish_reason is not None:
                    running.open_choices.discard(delta.index)
                    if not running.open_choices:
                        ended.append(self._running.pop(delta.request_id).tokens)
            if words:
                self._write_steps(_record(_STEP, words.tobytes()))
            if ended:
                self._write_ended(ended)

    def cut(self, request_id: str, index: int, num_used: int) -> None:
        """Only so many tokens of a choice belong to the answer, whatever else was or will be made of it."""
        with self._lock:
            running = self._running.get(request_id)
            if index >= (MAX_CHOICES if running is None else len(running.tokens.used)):
                return  # no choice of it
            if running is not None:
                running.tokens.used[index] = num_used
                self._write_steps(_record(_CUT, _CUT_AT.pack(running.number, index, num_used)))
                return
            used: list[int | None] = [None] * index + [num_used]
            self._write_ended([ProducedTokens(request_id, [], used)])

    def close(self) -> None:
        """End of the process in order; what still runs is kept as it is."""
        with self._lock:
            self._write_ended([running.tokens for running in self._running.values()])
            self._running.clear()
            if self._steps >= 0:
                os.close(self._steps)
                self._steps_path.unlink(missing_ok=True)
            if self._ended >= 0:
                os.close(self._ended)
            self._steps = self._ended = -1

    def _write_steps(self, data: bytes) -> None:
        """What has just changed in `_running`."""
        if self._steps < 0 or self._step_bytes + len(data) > self._max_step_bytes:
            # The new file begins with how far everything has come, this included. Should it fail, the next
            # change tries again: nothing is lost by then but for whoever is killed.
            self._begin_steps()
        elif self._write(self._steps, data):
            self._step_bytes += len(data)
        else:
            # The file lacks something: the next change begins a new one.
            self._step_bytes = self._max_step_bytes

    def _begin_steps(self) -> None:
        """A new file that says how far everything that runs has come; only then the old one goes."""
        self._num_files += 1
        path = self._folder / f"{self._name}-{self._num_files:06d}.steps"
        written = path.with_suffix(".new")
        data = b"".join(_so_far(running) for running in self._running.values())
        descriptor = -1
        try:
            descriptor = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            # Held as long as the process lives: who finds it free knows that the process is gone.
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            _write_all(descriptor, data)
            written.rename(path)
        except OSError as error:
            self._note_fault(error)
            if descriptor >= 0:
                os.close(descriptor)
                written.unlink(missing_ok=True)
            return
        before, old_path = self._steps, self._steps_path
        self._steps, self._steps_path, self._step_bytes = descriptor, path, len(data)
        if before >= 0:
            os.close(before)
            old_path.unlink(missing_ok=True)

    def _write_ended(self, ended: Iterable[ProducedTokens]) -> bool:
        """Whether it is written down; else it is kept for the next time."""
        self._unwritten = [*self._unwritten, *ended][-MAX_UNWRITTEN:]
        lines = [
            msgspec.json.encode(_Line(each.request_id, each.produced, _shown(each.used), each.is_cut_off))
            for each in self._unwritten
        ]
        if not lines:
            return True
        data = b"\n".join((*lines, b""))
        if self._ended < 0 or self._ended_bytes + len(data) > self._max_ended_bytes:
            self._begin_ended()
        if not self._write(self._ended, data):
            return False
        self._ended_bytes += len(data)
        self._unwritten = []
        return True

    def _begin_ended(self) -> None:
        if self._ended >= 0:
            os.close(self._ended)
        self._num_files += 1
        path = self._folder / f"{self._name}-{self._num_files:06d}.ended"
        try:
            self._ended = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError as error:
            self._ended = -1
            self._note_fault(error)
        self._ended_bytes = 0
        left = self._max_kept_bytes - self._max_ended_bytes
        for kept in sorted(self._folder.glob("*.ended"), reverse=True):
            with suppress(FileNotFoundError):
                left -= kept.stat().st_size
                if left < 0:
                    kept.unlink()

    def _write(self, descriptor: int, data: bytes) -> bool:
        # Tokens go on without it: a journal that can't be written leaves a difference to explain.
        if descriptor < 0:
            return False
        try:
            _write_all(descriptor, data)
        except OSError as error:
            self._note_fault(error)
            return False
        return True

    def _note_fault(self, error: OSError) -> None:
        if not self._is_failing:
            _LOGGER.error("the engine's journal can't be written: %s", error.strerror)
        self._is_failing = True

    def _keep_what_others_left(self) -> None:
        """Steps of processes that are gone become lines of what has ended."""
        for path in sorted(self._folder.glob("*.steps")):
            with suppress(OSError):
                descriptor = os.open(path, os.O_RDONLY)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    known = self._ended_of(path)
                    left = [each for each in _read_steps(path.read_bytes()) if each.request_id not in known]
                    for tokens in left:
                        tokens.is_cut_off = True
                    with self._lock:
                        is_kept = self._write_ended(left)
                    if is_kept:
                        path.unlink(missing_ok=True)
                finally:
                    os.close(descriptor)
        for path in self._folder.glob("*.new"):
            # Older than any rename takes: its process was killed in the middle.
            if time.time() - path.stat().st_mtime > 60:
                path.unlink(missing_ok=True)

    def _ended_of(self, steps: Path) -> set[str]:
        """What the process of a `steps` file has written down as ended."""
        files = self._folder.glob(f"{_process_of(steps)}-*.ended")
        return {line.id for path in files for line in _read_lines(path.read_bytes()) if line.produced}


def read_journals(root: Path) -> dict[str, ProducedTokens]:
    """Everything under a folder of journals, by request; of running requests what is known so far.

    A request may have run in several processes: in one that died or froze, then elsewhere. One answer of it
    is delivered, the longest; what the others made is discarded.
    """
    found: dict[str, ProducedTokens] = {}
    others: dict[str, list[ProducedTokens]] = {}  # of requests that ran in more than one process
    for path in sorted(root.rglob("*.steps")):
        with suppress(FileNotFoundError):  # it was replaced by a newer one meanwhile
            for each in _read_steps(path.read_bytes()):
                each.process = _process_of(path)
                _keep(found, others, each)
    corrections: list[tuple[str, _Line]] = []
    for path in sorted(root.rglob("*.ended")):
        process = _process_of(path)
        with suppress(FileNotFoundError):
            for line in _read_lines(path.read_bytes()):
                if line.produced:
                    used = line.used or [None] * len(line.produced)
                    run = ProducedTokens(line.id, line.produced, used, line.is_cut_off, process)
                    _keep(found, others, run)
                else:
                    corrections.append((process, line))
    for process, line in corrections:
        if line.id in found:
            runs = [found[line.id], *others.get(line.id, ())]
            # Told to the process that ran it, or to one in its place.
            _cut([run for run in runs if run.process == process] or runs, line.used)
    for request_id, more in others.items():
        found[request_id] = _as_one([found[request_id], *more])
    return found


def _keep(
    found: dict[str, ProducedTokens], others: dict[str, list[ProducedTokens]], run: ProducedTokens
) -> None:
    """In the place of what the same process said before."""
    first = found.setdefault(run.request_id, run)
    if first.process == run.process:
        found[run.request_id] = run
        return
    rest = [each for each in others.get(run.request_id, ()) if each.process != run.process]
    others[run.request_id] = [*rest, run]


def _cut(runs: Iterable[ProducedTokens], used: Sequence[int | None]) -> None:
    for run in runs:
        for index, num_used in enumerate(used[: len(run.used)]):
            run.used[index] = run.used[index] if num_used is None else num_used


def _as_one(runs: list[ProducedTokens]) -> ProducedTokens:
    best = max(runs, key=lambda run: (run.num_delivered, not run.is_cut_off))
    # Of other runs nothing is delivered, so what the best one delivered is said by number.
    pairs = zip(best.produced, best.used, strict=True)
    used: list[int | None] = [made if cut is None else min(made, cut) for made, cut in pairs]
    produced = list(best.produced)
    produced[0] += sum(run.num_produced for run in runs if run is not best)
    return ProducedTokens(best.request_id, produced, used, best.is_cut_off, best.process)


def _process_of(path: Path) -> str:
    return path.name.rpartition("-")[0]


def _read_lines(data: bytes) -> Iterator[_Line]:
    decoder = msgspec.json.Decoder(_Line)
    for text in data.split(b"\n"):
        # The last one may be torn.
        with suppress(msgspec.DecodeError):
            if text:
                yield decoder.decode(text)


def _read_steps(data: bytes) -> Iterator[ProducedTokens]:
    """The requests of a `steps` file. A torn or damaged record ends it: what follows can't be told apart."""
    by_number: dict[int, _Read] = {}
    position = 0
    while position + _HEAD.size <= len(data):
        kind, length = _HEAD.unpack_from(data, position)
        position += _HEAD.size
        payload = data[position : position + length]
        if len(payload) < length:
            break
        position += length
        try:
            _take_record(by_number, kind, payload)
        except (struct.error, ValueError, IndexError):
            _LOGGER.warning(
                "a record of an engine's journal is damaged; what follows in its file is left out"
            )
            break
    for read in by_number.values():
        yield ProducedTokens(read.request_id, read.produced, read.used)


def _take_record(by_number: dict[int, _Read], kind: int, payload: bytes) -> None:
    """Raises struct.error, ValueError or IndexError for a record that this module has not written."""
    if kind == _OPEN:
        number, num_choices = _OPENED.unpack_from(payload)
        if num_choices > MAX_CHOICES:
            raise ValueError("no request has so many choices")
        by_number[number] = _Read(payload[_OPENED.size :].decode(), num_choices)
    elif kind == _STEP:
        words = array("I")
        words.frombytes(payload)
        for number, index, count in zip(words[::3], words[1::3], words[2::3], strict=True):
            if number in by_number:
                by_number[number].produced[index] += count
    elif kind == _CUT:
        number, index, num_used = _CUT_AT.unpack(payload)
        if number in by_number:
            by_number[number].used[index] = num_used


@dataclass(slots=True)
class _Read:
    request_id: str
    num_choices: int
    produced: list[int] = field(init=False)
    used: list[int | None] = field(init=False)

    def __post_init__(self) -> None:
        self.produced = [0] * self.num_choices
        self.used = [None] * self.num_choices


def _write_all(descriptor: int, data: bytes) -> None:
    """All of it, or nothing: what comes next must not stand behind half a record. Raises OSError."""
    num_written = 0
    try:
        while num_written < len(data):
            num_written += os.write(descriptor, data[num_written:])
    except OSError:
        if num_written:
            with suppress(OSError):
                os.ftruncate(descriptor, os.fstat(descriptor).st_size - num_written)
        raise


def _record(kind: int, payload: bytes) -> bytes:
    return _HEAD.pack(kind, len(payload)) + payload


def _opened(running: _Running) -> bytes:
    head = _OPENED.pack(running.number, len(running.tokens.produced))
    return _record(_OPEN, head + running.tokens.request_id.encode())


def _so_far(running: _Running) -> bytes:
    tokens = running.tokens
    words = array("I")
    for index, count in enumerate(tokens.produced):
        words.extend((running.number, index, count))
    cuts = (
        _record(_CUT, _CUT_AT.pack(running.number, index, num_used))
        for index, num_used in enumerate(tokens.used)
        if num_used is not None
    )
    return b"".join((_opened(running), _record(_STEP, words.tobytes()), *cuts))


def _shown(used: list[int | None]) -> list[int | None]:
    return used if any(each is not None for each in used) else []
