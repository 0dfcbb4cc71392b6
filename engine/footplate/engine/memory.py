"""Memory of the machine that an engine may take, and memory of the process that none needs any more."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
# Files of a group's limit and use, and how its statistics are named, by the version of control groups.
_V2 = ("memory.max", "memory.current", "")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


def available_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """What this process can have without swapping: of the machine, and within every limit above it.

    In a container the limit is the group's, and whoever passes it is killed. Files that the kernel holds for
    the group, as weights that were read, go before anybody is, and so don't count as used.
    """
    found = [_machine_bytes(proc)]
    for folder, (limit_file, used_file, prefix) in _groups(proc, cgroups):
        try:
            limit, used = ((folder / name).read_text().strip() for name in (limit_file, used_file))
            files = _of_files(folder / "memory.stat", prefix)
        except OSError:
            continue
        if limit != "max":
            found.append(max(0, int(limit) - max(0, int(used) - files)))
    return min(found)


def _of_files(stat: Path, prefix: str) -> int:
    names = {f"{prefix}inactive_file", f"{prefix}active_file"}
    pairs = (line.split() for line in stat.read_text().splitlines())
    return sum(int(value) for name, value in pairs if name in names)


def give_back_memory() -> None:
    """Hand freed memory to the system: an engine on a CPU tells glibc to keep what its steps free."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return  # another C library, which was told nothing
    trim(0)


def _machine_bytes(proc: Path) -> int:
    for line in (proc / "meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _groups(proc: Path, cgroups: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """The groups of this process and those above them, as far as they are to be seen from here."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = cgroups, _V2
        elif "memory" in controllers.split(","):
            root, names = cgroups / "memory", _V1
        else:
            continue
        # Within a container the path is the host's, while the folder shows the container's own group.
        group = root / path.lstrip("/")
        while group != root:
            yield group, names
            group = group.parent
        yield root, names
