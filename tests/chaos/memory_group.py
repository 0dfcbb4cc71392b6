"""A control group with a memory limit of its own, for one process: the kernel kills what passes it, alone."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from footplate.deployments.leftovers import wait_until

ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class MemoryGroup:
    """Made by `make`; `remove` once its process is gone."""

    folder: Path
    limit_file: str
    events_file: str

    @staticmethod
    def make(name: str) -> MemoryGroup:
        """Skips where this machine lets nobody make one."""
        is_second = (ROOT / "cgroup.controllers").exists()
        folder = (ROOT if is_second else ROOT / "memory") / name
        try:
            if is_second and "memory" not in (ROOT / "cgroup.subtree_control").read_text().split():
                pytest.skip(
                    "a memory limit for one process needs the memory controller in cgroup.subtree_control"
                )
            folder.mkdir()
        except OSError as error:
            pytest.skip(
                f"a memory limit for one process needs a control group, and {folder} can't be made: {error}"
            )
        if is_second:
            with suppress(OSError):  # without swap there is none to forbid
                (folder / "memory.swap.max").write_text("0")
            return MemoryGroup(folder, "memory.max", "memory.events")
        return MemoryGroup(folder, "memory.limit_in_bytes", "memory.oom_control")

    def hold(self, pid: int, num_bytes: int) -> None:
        """What the process takes from now on counts here; what it had counts where it was."""
        (self.folder / self.limit_file).write_text(str(num_bytes))
        (self.folder / "cgroup.procs").write_text(str(pid))

    def num_killed(self) -> int:
        """How many processes the kernel has killed for this limit."""
        pairs = dict(line.split() for line in (self.folder / self.events_file).read_text().splitlines())
        return int(pairs["oom_kill"])

    def remove(self) -> None:
        def is_removed() -> bool:
            with suppress(OSError):
                os.rmdir(self.folder)
            return not self.folder.exists()

        assert wait_until(is_removed, 10, every_s=0.1), self.folder
