"""A watcher process: when `footplate serve` dies without cleaning up, this ends what it has started.

Run as `python -m footplate.deployments.keeper MARK RUN_DIR POSTGRES_DIR`, with a pipe from the watched
process as standard input. A byte through the pipe means a clean stop; the end of the pipe without one means
that the process was killed. It imports nothing outside the standard library and stays idle until then.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from footplate.deployments.leftovers import end_installation, stop_postgres
from footplate.deployments.run_paths import RunPaths

GRACE_S = 2.0


class Keeper:
    """The watched process's end of the pipe."""

    def __init__(self, paths: RunPaths) -> None:
        # A session of its own: Ctrl-C in the terminal must not reach it.
        arguments = [paths.mark, str(paths.run_dir), str(paths.postgres_dir)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "footplate.deployments.keeper", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def dismiss(self) -> None:
        """Say that the stop was clean, and wait until the keeper is gone."""
        try:
            self._process.communicate(b"x", timeout=5)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()


def watch(mark: str, run_dir: str, postgres_dir: str) -> None:
    """Block until the pipe ends; then end the installation's processes, the database last."""
    if os.read(sys.stdin.fileno(), 1):
        return
    end_installation(mark, run_dir, grace_s=GRACE_S)
    stop_postgres(Path(postgres_dir))


if __name__ == "__main__":
    watch(*sys.argv[1:4])
