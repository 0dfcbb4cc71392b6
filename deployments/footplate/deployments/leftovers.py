"""Processes of this installation: how they are found and ended. Standard library only, for the keeper."""

from __future__ import annotations

import os
import signal
import stat
import time
from collections.abc import Callable, Iterable
from pathlib import Path


def find_processes(mark: str, run_dir: str, *, program: str | None = None) -> list[int]:
    """Process ids that carry the installation's mark in their environment, or else hold on to its run folder.

    `program`: only those that run a file of this name.

    The caller and its ancestors are left out, and so is PostgreSQL: only `stop_postgres` ends it in a way
    that keeps its data folder clean. Ray's agents write a title over their command and their environment, how
    much of it depends on how long both are; so a run folder in the command line counts too, and files in it
    that are open for writing. Both count for our kinds of program only, not for someone's `tail -f`.
    """
    needle, folder = f"FOOTPLATE_INSTANCE={mark}".encode(), os.fsencode(run_dir) + b"/"
    spared = _lineage(os.getpid())
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdecimal() or int(entry) in spared:
            continue
        process = Path("/proc") / entry
        if _read(process / "comm").strip() == b"postgres":
            continue
        if program is not None and _program(process) != program:
            continue
        if needle in _read(process / "environ").split(b"\0") or (
            _is_our_kind(process)
            and (folder in _read(process / "cmdline") or is_writing_under(folder, int(entry)))
        ):
            found.append(int(entry))
    return found


def end_processes(pids: Iterable[int], *, grace_s: float) -> None:
    """Ask the processes to end, and kill those that are still there after `grace_s`."""
    waiting = [pid for pid in pids if send_signal(pid, signal.SIGTERM)]
    wait_until(lambda: not any(map(is_alive, waiting)), grace_s)
    for pid in waiting:
        if is_alive(pid):
            send_signal(pid, signal.SIGKILL)
    wait_until(lambda: not any(map(is_alive, waiting)), 2.0)


def end_installation(mark: str, run_dir: str, *, grace_s: float, spared: Iterable[int] = ()) -> None:
    """End every process of an installation but its database and those that are spared.

    Ray's node daemon replaces helpers that end before it does, so what comes up meanwhile is looked for too.
    """
    for _ in range(5):
        found = set(find_processes(mark, run_dir)) - set(spared)
        if not found:
            return
        end_processes(found, grace_s=grace_s)


def postmaster_pid(postgres_dir: Path) -> int | None:
    """The process id of the PostgreSQL server that runs on a data folder, or None."""
    first_line = _read(postgres_dir / "postmaster.pid").split(b"\n", 1)[0]
    if not first_line.strip().isdigit():
        return None
    pid = int(first_line)
    # A process id is used again after a crash: only a program of that name is the server.
    return pid if _read(Path(f"/proc/{pid}/comm")).strip() == b"postgres" and is_alive(pid) else None


def stop_postgres(postgres_dir: Path, *, grace_s: float = 5.0) -> None:
    """Shut the server of a data folder down: fast (clients cut, a checkpoint), then immediate, then kill."""
    pid = postmaster_pid(postgres_dir)
    for number, wait_s in ((signal.SIGINT, grace_s), (signal.SIGQUIT, 2.0), (signal.SIGKILL, 2.0)):
        if pid is None or not send_signal(pid, number):
            return
        if wait_until(lambda: not is_alive(pid), wait_s):
            return


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that has ended but was not collected by its parent does not."""
    state = _read(Path(f"/proc/{pid}/stat")).rpartition(b")")[2].split()
    return bool(state) and state[0] not in (b"Z", b"X")


def is_writing_under(folder: bytes, pid: int) -> bool:
    """Whether the process has a file open for writing whose path starts with `folder`."""
    descriptors = os.fsencode(f"/proc/{pid}/fd")
    try:
        names = os.listdir(descriptors)
    except OSError:
        return False
    for name in names:
        link = os.path.join(descriptors, name)
        try:
            # The link's own mode says how the file was opened.
            if os.readlink(link).startswith(folder) and os.lstat(link).st_mode & stat.S_IWUSR:
                return True
        except OSError:
            continue
    return False


def send_signal(pid: int, number: int) -> bool:
    """Whether the process was there to get the signal."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def wait_until(claim: Callable[[], object], timeout_s: float, *, every_s: float = 0.02) -> bool:
    """Look again and again until the claim holds; False when it doesn't within `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not claim():
        if time.monotonic() > deadline:
            return False
        time.sleep(every_s)
    return True


def _is_our_kind(process: Path) -> bool:
    program = _program(process)
    return program in ("raylet", "gcs_server", "haproxy", "valkey-server") or program.startswith("python")


def _program(process: Path) -> str:
    """The name of the file that a process runs; empty when it can't be told, as of one that has ended."""
    try:
        return os.path.basename(os.readlink(process / "exe"))
    except OSError:
        return ""


def _lineage(pid: int) -> set[int]:
    """A process and all its ancestors."""
    seen: set[int] = set()
    while pid > 1 and pid not in seen:
        seen.add(pid)
        fields = _read(Path(f"/proc/{pid}/stat")).rpartition(b")")[2].split()
        pid = int(fields[1]) if len(fields) > 1 else 0
    return seen


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
