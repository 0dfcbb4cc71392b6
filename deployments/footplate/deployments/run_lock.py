"""Who runs on a data folder: a lock that lasts as long as its process, and a note in it for others."""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass
from typing import IO

from footplate.deployments.errors import StartupError
from footplate.deployments.run_paths import RunPaths

LOCK_FILE = "serve.lock"


@dataclass(frozen=True, slots=True)
class RunningPlatform:
    """A `footplate serve` that holds a data folder. `pid` is 0 and `url` empty while it hasn't said."""

    pid: int
    url: str

    def __str__(self) -> str:
        return f"process {self.pid} at {self.url}" if self.pid else "a process that is just starting"


def take_lock(paths: RunPaths, url: str) -> IO[str]:
    """Hold the folder until the file is closed or this process ends.

    Raises:
        StartupError: another one holds it.
    """
    # Not emptied before it is ours: the holder's note stands in it.
    lock = open(paths.data_dir / LOCK_FILE, "a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = _read(lock)
        lock.close()
        raise StartupError(
            f"another `footplate serve` runs on {paths.data_dir}: {holder}",
            "stop it, or choose another --data-dir",
        ) from error
    lock.truncate(0)
    lock.write(f"{os.getpid()} {url}\n")
    lock.flush()
    return lock


def find_running(paths: RunPaths) -> RunningPlatform | None:
    """The platform that runs on a data folder, if one does. What a killed one has left is none."""
    try:
        lock = open(paths.data_dir / LOCK_FILE)
    except OSError:
        return None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return _read(lock)
    return None


def _read(lock: IO[str]) -> RunningPlatform:
    lock.seek(0)
    pid, _, url = lock.readline().strip().partition(" ")
    return RunningPlatform(int(pid), url) if pid.isdecimal() else RunningPlatform(0, "")
