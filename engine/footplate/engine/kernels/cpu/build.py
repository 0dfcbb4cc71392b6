"""Compile the C sources of this folder once per machine, with the clang inside the `ziglang` wheel.

No system compiler is needed. The library's name holds a hash of sources, processor and compiler, so an
upgrade of any of them builds anew and processes of different versions share the cache folder.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

from footplate.engine.errors import LoadError

DEFAULT_CACHE_DIR = Path("~/.cache/footplate/kernels")
BUILD_TIMEOUT_S = 300
_SOURCE_DIR = Path(__file__).parent
_FLAGS = (
    "-shared",
    "-fPIC",
    "-O3",
    "-march=native",
    "-std=c11",
    "-ffp-contract=off",  # sums must not depend on what the compiler chose to fuse
    "-fno-math-errno",
    "-fno-sanitize=all",
    "-fvisibility=default",
    "-Wall",
    "-Wextra",
)


def build_library(cache_dir: str | Path | None = None, defines: tuple[str, ...] = ()) -> Path:
    """The compiled library's path; compiles when this machine has none for these sources yet.

    `defines` are preprocessor names for tests of other code paths, such as FOOTPLATE_PORTABLE.
    Safe from several processes at once: each builds into a file of its own and renames it into place.

    Raises:
        LoadError: the ziglang wheel is missing, the folder can't be written, or the compiler failed.
    """
    folder = Path(cache_dir or DEFAULT_CACHE_DIR).expanduser()
    sources = sorted(_SOURCE_DIR.glob("*.c"))
    target = folder / f"footplate-kernels-{_build_key(sources, defines)}.so"
    if target.is_file():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=".building-", suffix=".so", dir=folder)
        os.close(handle)
    except OSError as error:
        raise LoadError(f"CPU kernels: the cache folder {folder} can't be written ({error})") from None
    building = Path(name)
    try:
        _compile(sources, defines, building)
        building.chmod(0o755)
        building.replace(target)
    finally:
        building.unlink(missing_ok=True)
    return target


def _build_key(sources: list[Path], defines: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for path in [*sources, *sorted(_SOURCE_DIR.glob("*.h"))]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    digest.update(repr((_FLAGS, defines, _compiler_version(), _processor())).encode())
    return digest.hexdigest()[:20]


def _compiler_version() -> str:
    try:
        return importlib.metadata.version("ziglang")
    except importlib.metadata.PackageNotFoundError:
        raise LoadError("CPU kernels: the compiler is missing; pip install ziglang") from None


def _processor() -> tuple[str, ...]:
    """Model and instruction sets: `-march=native` means something else on another processor."""
    wanted = ("model name", "flags", "features", "cpu part")
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return (platform.machine(), platform.processor())
    found = dict.fromkeys(line for line in lines if line.lower().startswith(wanted))
    return (platform.machine(), *found)


def _compile(sources: list[Path], defines: tuple[str, ...], output: Path) -> None:
    options = [*_FLAGS, *(f"-D{name}" for name in defines), "-o", str(output)]
    command = [sys.executable, "-m", "ziglang", "cc", *options, *map(str, sources), "-lpthread"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LoadError(f"CPU kernels: the compiler did not run ({error})") from None
    if result.returncode != 0:
        raise LoadError(
            f"CPU kernels: compiling failed ({result.returncode}): {result.stderr.strip()[-2000:]}"
        )
