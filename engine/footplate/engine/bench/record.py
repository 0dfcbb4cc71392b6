"""What every benchmark writes down beside its figures: commit, hardware, versions, load."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def environment() -> dict[str, Any]:
    """Facts of this run. The load is the last minute's average: above the number of cores it is noise."""
    return {
        "commit": _commit(),
        "hardware": _hardware(),
        "versions": _versions("torch", "triton", "footplate") | {"python": platform.python_version()},
        "load_1min": round(os.getloadavg()[0], 2),
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, lowest and highest of repeated figures."""
    digits = 1 if max(values) >= 100 else 3
    return {
        "median": round(statistics.median(values), digits),
        "min": round(min(values), digits),
        "max": round(max(values), digits),
    }


def _hardware() -> str:
    cpu = "unknown processor"
    flags: set[str] = set()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            cpu = value.strip()
        if key.strip() == "flags":
            flags = set(value.split())
    vector = [f for f in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8") if f in flags]
    gpu = _output("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")
    parts = [cpu, f"{os.cpu_count()} cores", " ".join(vector), *gpu.splitlines()]
    return ", ".join(part for part in parts if part)


def _versions(*names: str) -> dict[str, str]:
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _commit() -> str:
    """The checkout this file is part of, with a + when tracked files differ; `installed` without one."""
    if not _git("ls-files", "--error-unmatch", __file__):
        return "installed"
    return _git("rev-parse", "--short", "HEAD") + ("+" if _git("status", "--porcelain", "-uno") else "")


def _git(*args: str) -> str:
    return _output("git", "-C", str(Path(__file__).parent), *args)


def _output(*command: str) -> str:
    """What a program prints; nothing when it is not there or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
