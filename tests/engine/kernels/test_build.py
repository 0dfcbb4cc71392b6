"""The native library is built once, safely, and says clearly why it could not be."""

from __future__ import annotations

import importlib.metadata
import subprocess
from pathlib import Path

import pytest

from footplate.engine.errors import LoadError
from footplate.engine.kernels.cpu import build


def test_a_built_library_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[list[str]] = []
    monkeypatch.setattr(build.subprocess, "run", lambda command, **_: _succeed(command, runs))
    first, second = build.build_library(tmp_path), build.build_library(tmp_path)
    assert first == second and len(runs) == 1
    assert [path.name for path in tmp_path.iterdir()] == [first.name]


def test_another_processor_or_compiler_builds_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.subprocess, "run", lambda command, **_: _succeed(command, []))
    names = {build.build_library(tmp_path).name}
    monkeypatch.setattr(build, "_processor", lambda: ("other",))
    names.add(build.build_library(tmp_path).name)
    monkeypatch.setattr(build, "_compiler_version", lambda: "0.0.1")
    names.add(build.build_library(tmp_path).name)
    assert len(names) == 3


def test_a_failed_build_shows_the_compiler_message_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "unknown target")
    monkeypatch.setattr(build.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(LoadError, match="unknown target"):
        build.build_library(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(build.importlib.metadata, "version", missing)
    with pytest.raises(LoadError, match="pip install ziglang"):
        build.build_library(tmp_path)


def test_an_unwritable_cache_folder_is_named(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(LoadError, match="can't be written"):
        build.build_library(blocked / "kernels")


def _succeed(command: list[str], runs: list[list[str]]) -> subprocess.CompletedProcess[str]:
    runs.append(command)
    Path(command[command.index("-o") + 1]).write_bytes(b"library")
    return subprocess.CompletedProcess(command, 0, "", "")
