"""Files that a model's settings name, opened and read so that none of them can harm the reader.

Whoever adds a model names its files. A device has no end, a pipe nobody at its other side, and a file that
says it is short may grow: so only regular files are opened, and no more is read than a limit allows.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from footplate.engine.errors import LoadError

MAX_CONFIG_BYTES = 16 << 20  # of any JSON file but the tokenizer's
MAX_TOKENIZER_BYTES = 256 << 20  # that of Gemma 3, with 262,144 tokens, has 33 MB


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for unbuffered reading; links are followed.

    Raises:
        LoadError: it can't be opened, or is a device, a pipe, a socket or a folder.
    """
    try:
        # Looked at before it is opened: the opening alone may start what a device does.
        _refuse_irregular(path, path.stat())
        # A pipe that has come meanwhile must not wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        file = os.fdopen(descriptor, "rb", buffering=0)
    except ValueError:
        raise LoadError(f"{path}: is no path") from None
    except OSError as error:
        raise LoadError(f"{path}: can't be read ({error.strerror})") from None
    try:
        _refuse_irregular(path, os.fstat(descriptor))
    except LoadError:
        file.close()
        raise
    return file


def read_bounded(path: Path, limit: int) -> bytes:
    """All bytes of a regular file.

    Raises:
        LoadError: as `open_regular`; or it holds more than `limit` bytes, whatever its size is said to be.
    """
    with open_regular(path) as file:
        parts, left = [], limit + 1
        try:
            while left and (part := file.read(min(left, 1 << 22))):
                parts.append(part)
                left -= len(part)
        except OSError as error:
            raise LoadError(f"{path}: can't be read ({error.strerror})") from None
    if not left:
        raise LoadError(f"{path}: more than {limit} bytes of such a file are not read")
    return b"".join(parts)


def read_json_object(
    path: Path, limit: int = MAX_CONFIG_BYTES, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None
) -> dict[str, Any]:
    """The JSON object of a file. `pairs` as `object_pairs_hook` of `json.loads`.

    Raises:
        LoadError: as `read_bounded`; or it is no JSON object.
    """
    return parse_json_object(path, read_bounded(path, limit), pairs)


def parse_json_object(
    path: Path, text: bytes, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None
) -> dict[str, Any]:
    """As `read_json_object`, of bytes that were read."""
    try:
        value = json.loads(text, object_pairs_hook=pairs)
    except RecursionError:
        raise LoadError(f"{path}: can't be read as JSON (it is nested too deeply)") from None
    except ValueError as error:
        raise LoadError(f"{path}: can't be read as JSON ({error})") from None
    if not isinstance(value, dict):
        raise LoadError(f"{path}: holds no JSON object")
    return value


def _refuse_irregular(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise LoadError(f"{path}: is no regular file; devices, pipes, sockets and folders are not read")
