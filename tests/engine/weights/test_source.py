"""A source string becomes files, or an error that says what to write instead."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import pytest

from footplate.engine.errors import LoadError
from footplate.engine.weights.source import resolve_source

CHUNKED = """
from pathlib import Path
EXPECTED_SHA256 = "{checksum}"
def chunk_paths():
    return [Path(__file__).parent / "one.part", Path(__file__).parent / "two.part"]
"""


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    return folder


def _package(folder: Path, name: str, files: dict[str, bytes]) -> Path:
    (folder / name).mkdir()
    for file, content in files.items():
        (folder / name / file).write_bytes(content)
    return folder / name


def test_a_package_with_a_file_is_found_without_running_it(packages: Path) -> None:
    source = b"raise RuntimeError('imported')"
    folder = _package(packages, "whole_model", {"__init__.py": source, "m.gguf": b"GGUF"})
    found = resolve_source("package:whole_model")
    assert (found.kind, found.path, found.package_dir) == ("gguf", folder / "m.gguf", folder)
    assert "whole_model" not in sys.modules


def _chunked(packages: Path, name: str, checksum: str) -> None:
    init = CHUNKED.format(checksum=checksum).encode()
    _package(packages, name, {"__init__.py": init, "one.part": b"GG", "two.part": b"UF"})


def test_a_package_in_chunks_is_put_together_once(packages: Path, tmp_path: Path) -> None:
    _chunked(packages, "chunked_model", hashlib.sha256(b"GGUF").hexdigest())
    models = tmp_path / "models"
    first = resolve_source("package:chunked_model", models)
    assert first.path.read_bytes() == b"GGUF"
    written = first.path.stat().st_mtime_ns
    assert resolve_source("package:chunked_model", models) == first
    assert first.path.stat().st_mtime_ns == written
    assert list(models.iterdir()) == [first.path]


def test_chunks_that_do_not_verify_leave_nothing(packages: Path, tmp_path: Path) -> None:
    _chunked(packages, "damaged_model", "0" * 64)
    with pytest.raises(LoadError, match="do not verify"):
        resolve_source("package:damaged_model", tmp_path / "models")
    assert list((tmp_path / "models").iterdir()) == []


def test_a_package_without_a_model_and_one_with_two_are_refused(packages: Path, tmp_path: Path) -> None:
    _package(packages, "no_model", {"__init__.py": b""})
    with pytest.raises(LoadError, match=r"no \.gguf file"):
        resolve_source("package:no_model", tmp_path)
    _package(packages, "two_models", {"__init__.py": b"", "a.gguf": b"", "b.gguf": b""})
    with pytest.raises(LoadError, match=r"2 \.gguf files"):
        resolve_source("package:two_models", tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model.gguf", "no scheme"),
        ("s3:bucket", "unknown scheme"),
        ("package:not_installed_model", "pip install not-installed-model"),
        ("package:../etc", "no package name"),
        ("gguf:/nowhere/m.gguf", "/nowhere/m.gguf"),
        ("hf:/nowhere", "config.json"),
        ("dummy:/nowhere/config.json", "config.json"),
    ],
)
def test_sources_that_lead_nowhere_say_why(text: str, message: str) -> None:
    with pytest.raises(LoadError, match=message):
        resolve_source(text)
