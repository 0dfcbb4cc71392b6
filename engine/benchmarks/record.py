"""What every benchmark writes down beside its figures: commit, hardware, versions, load."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def environment() -> dict[str, Any]:
    """Facts of this run. The load is the last minute's average: above the number of cores it is noise."""
    cpu = "unknown"
    flags: set[str] = set()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            cpu = value.strip()
        if key.strip() == "flags":
            flags = set(value.split())
    vector = [f for f in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8") if f in flags]
    return {
        "commit": _git("rev-parse", "--short", "HEAD")
        + ("+" if _git("status", "--porcelain", "-uno") else ""),
        "hardware": f"{cpu}, {os.cpu_count()} cores, {' '.join(vector)}",
        "versions": {name: version(name) for name in ("torch", "footplate")}
        | {"python": platform.python_version()},
        "load_1min": round(os.getloadavg()[0], 2),
    }


def _git(*args: str) -> str:
    out = subprocess.run(["git", *args], capture_output=True, text=True, check=False, cwd=RESULTS.parent)
    return out.stdout.strip()


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, lowest and highest of repeated figures."""
    digits = 1 if max(values) >= 100 else 3
    return {
        "median": round(statistics.median(values), digits),
        "min": round(min(values), digits),
        "max": round(max(values), digits),
    }


def write(name: str, content: Mapping[str, Any]) -> Path:
    """Write results/NAME.json."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path
