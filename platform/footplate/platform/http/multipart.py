"""Forms of several parts, taken as they come: nothing is kept but what may be the beginning of a boundary."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto

from footplate.engine.errors import InvalidRequest

MAX_HEADER_BYTES = 8_192
MAX_PARTS = 20
MAX_BOUNDARY = 70  # as the standard has it
_BROKEN = "The body is not a form of several parts (multipart/form-data) as its Content-Type says."
_PARAMETER = re.compile(r';\s*([A-Za-z0-9*_-]+)\s*=\s*("(?:[^"\\]|\\.)*"|[^;"\s]+)')


@dataclass(frozen=True, slots=True)
class PartBegin:
    """A part begins; `filename` None: it is a plain field."""

    name: str
    filename: str | None


@dataclass(frozen=True, slots=True)
class PartEnd:
    """The part that began last has ended."""


PartEvent = PartBegin | bytes | PartEnd


class _State(Enum):
    BOUNDARY = auto()  # before the first, or behind one
    HEADERS = auto()
    BODY = auto()
    END = auto()


def boundary_of(content_type: str) -> bytes:
    """The boundary that a form's Content-Type names. Raises InvalidRequest."""
    kind, _, rest = content_type.partition(";")
    if kind.strip().lower() != "multipart/form-data":
        raise InvalidRequest("Send the file as multipart/form-data.", None)
    found = {name.lower(): value for name, value in _parameters(";" + rest)}.get("boundary", "")
    if not (1 <= len(found) <= MAX_BOUNDARY and found.isascii() and found.isprintable()):
        raise InvalidRequest(_BROKEN, None)
    return found.encode()


class MultipartParser:
    """Feed it the body; it gives parts' beginnings, pieces of their bytes, and their ends, in that order."""

    def __init__(self, boundary: bytes) -> None:
        self._delimiter = b"\r\n--" + boundary
        # As if a line had ended before the first boundary.
        self._rest = b"\r\n"
        self._state = _State.BODY
        self._is_preamble = True
        self._num_parts = 0

    def feed(self, data: bytes) -> Iterator[PartEvent]:
        """What the next piece of the body brings. Raises InvalidRequest for what is no such form."""
        self._rest += data
        while True:
            before = (self._state, len(self._rest))
            if self._state is _State.BODY:
                yield from self._take_body()
            elif self._state is _State.BOUNDARY:
                self._take_boundary()
            elif self._state is _State.HEADERS:
                yield from self._take_headers()
            else:
                self._rest = b""
            if (self._state, len(self._rest)) == before:
                return

    def close(self) -> None:
        """The body has ended. Raises InvalidRequest unless the form has."""
        if self._state is not _State.END:
            raise InvalidRequest("The form ends in the middle; send all of it.", None)

    def _take_body(self) -> Iterator[PartEvent]:
        at = self._rest.find(self._delimiter)
        # What may be the beginning of a boundary waits for what comes next.
        end = at if at >= 0 else max(0, len(self._rest) - len(self._delimiter) + 1)
        piece, self._rest = self._rest[:end], self._rest[end:]
        if piece and self._is_preamble:
            raise InvalidRequest(_BROKEN, None)
        if piece:
            yield piece
        if at >= 0:
            self._rest = self._rest[len(self._delimiter) :]
            self._state = _State.BOUNDARY
            if not self._is_preamble:
                yield PartEnd()
            self._is_preamble = False

    def _take_boundary(self) -> None:
        bare = self._rest.lstrip(b" \t")
        if len(bare) < 2:
            if len(self._rest) > MAX_BOUNDARY:
                raise InvalidRequest(_BROKEN, None)
            return
        if bare.startswith(b"--"):
            self._state = _State.END
        elif bare.startswith(b"\r\n"):
            # The line's end stays: headers are looked for behind one, and there may be none.
            self._rest = bare
            self._state = _State.HEADERS
        else:
            raise InvalidRequest(_BROKEN, None)

    def _take_headers(self) -> Iterator[PartEvent]:
        at = self._rest.find(b"\r\n\r\n")
        if at < 0:
            if len(self._rest) > MAX_HEADER_BYTES:
                raise InvalidRequest("A part of the form has too long a head.", None)
            return
        head, self._rest = self._rest[:at], self._rest[at + 4 :]
        self._num_parts += 1
        if at > MAX_HEADER_BYTES or self._num_parts > MAX_PARTS:
            raise InvalidRequest(
                f"The form has a part with too long a head, or over {MAX_PARTS} parts.", None
            )
        self._state = _State.BODY
        yield _part(head)


def _part(head: bytes) -> PartBegin:
    for line in head.decode("utf-8", "replace").split("\r\n"):
        name, _, value = line.partition(":")
        if name.strip().lower() != "content-disposition":
            continue
        kind, _, _ = value.partition(";")
        found = dict(_parameters(value[len(kind) :]))
        if kind.strip().lower() == "form-data" and "name" in found:
            return PartBegin(found["name"], found.get("filename"))
    raise InvalidRequest("A part of the form has no name.", None)


def _parameters(text: str) -> Iterator[tuple[str, str]]:
    for name, value in _PARAMETER.findall(text):
        if value.startswith('"'):
            value = value[1:-1].replace('\\"', '"').replace("\\\\", "\\").replace("%22", '"')
        yield name, value
