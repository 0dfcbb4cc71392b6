"""Whether a file can be a batch, found while its bytes come by. Pure; no fault quotes what it is about."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from footplate.platform.batches.values import (
    MAX_FILE_BYTES,
    MAX_LINE_BYTES,
    MAX_LINES,
    MAX_SHOWN_FAULTS,
    LineFault,
    LineSpan,
)
from footplate.platform.errors import BodyTooComplex
from footplate.platform.http.complexity import check_complexity

MAX_CUSTOM_ID = 512
MAX_MODEL_NAME = 256
_BOM = b"\xef\xbb\xbf"
_SPACES = b" \t\r\n"


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    custom_id: msgspec.Raw = msgspec.Raw(b"")
    method: msgspec.Raw = msgspec.Raw(b"")
    url: msgspec.Raw = msgspec.Raw(b"")
    body: msgspec.Raw = msgspec.Raw(b"")


class _Body(msgspec.Struct):
    """The few of a body's fields that are the batch's matter; the endpoint looks at all of it."""

    model: msgspec.Raw = msgspec.Raw(b"")
    stream: msgspec.Raw = msgspec.Raw(b"")


_LINE = msgspec.json.Decoder(_Line)
_BODY = msgspec.json.Decoder(_Body)
_TEXT = msgspec.json.Decoder(str)
_FLAG = msgspec.json.Decoder(bool | None)


@dataclass(frozen=True, slots=True)
class ReadLine:
    """What running a line needs of it."""

    custom_id: str
    body: bytes


@dataclass(frozen=True, slots=True)
class Limits:
    """How large a batch may be; smaller ones are for tests."""

    max_lines: int = MAX_LINES
    max_file_bytes: int = MAX_FILE_BYTES
    max_line_bytes: int = MAX_LINE_BYTES


class _Faulty(Exception):
    """A line is not what it should be."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(code)
        self.code, self.message, self.param = code, message, param


def read_line(data: bytes) -> ReadLine:
    """A line that was accepted before. Raises msgspec.DecodeError when it is none any more."""
    line = _LINE.decode(data.removeprefix(_BOM))
    return ReadLine(_TEXT.decode(line.custom_id), bytes(line.body))


class LineScanner:
    """Takes a file piece by piece, and keeps of it where its lines are and what is wrong with them.

    `feed` all of it, then `close`; after that `spans`, `model` and `faults` say what was found. It stops
    looking once so many faults are known that no more are shown.
    """

    def __init__(self, endpoint: str, limits: Limits | None = None) -> None:
        self.spans: list[LineSpan] = []
        # As the lines name it.
        self.model: str | None = None
        self.faults: list[LineFault] = []
        self._endpoint = endpoint
        self._limits = limits or Limits()
        self._number = 0
        self._offset = 0
        self._num_bytes = 0
        self._rest = b""
        # Of the names so far: names themselves can be long.
        self._names: set[bytes] = set()
        self._is_over = False

    def feed(self, data: bytes) -> None:
        """Take the next piece, of any length."""
        if self._is_over:
            return
        self._num_bytes += len(data)
        if self._num_bytes > self._limits.max_file_bytes:
            limit = f"{self._limits.max_file_bytes} bytes"
            self._end_with(LineFault("file_too_large", f"The file is larger than {limit}; split it."))
            return
        for line in self._cut(data):
            self._take(line)
            if self._is_over:
                return
        if len(self._rest) > self._limits.max_line_bytes:
            self._number += 1
            self._end_with(self._too_long())

    def close(self) -> None:
        """There is no more of it."""
        if not self._is_over and self._rest:
            line, self._rest = self._rest, b""
            self._take(line)
        if not self.spans and not self.faults:
            self._add(LineFault("empty_file", "The file holds no request."))
        self._is_over = True

    def _cut(self, data: bytes) -> Iterator[bytes]:
        *whole, last = data.split(b"\n")
        for line in whole:
            yield self._rest + line
            self._rest = b""
        self._rest += last

    def _take(self, line: bytes) -> None:
        offset, self._offset = self._offset, self._offset + len(line) + 1
        self._number += 1
        bare = line.removeprefix(_BOM) if offset == 0 else line
        if not bare.strip(_SPACES):
            return
        if len(self.spans) >= self._limits.max_lines:
            message = f"The file holds more than {self._limits.max_lines} requests; split it."
            self._end_with(LineFault("too_many_requests", message))
            return
        # Its place in the file is its number, so that a fault names what an editor shows.
        self.spans.append(LineSpan(self._number, offset, len(line)))
        try:
            self._check(bare)
        except _Faulty as fault:
            self._add(LineFault(fault.code, fault.message, self._number, fault.param))

    def _check(self, line: bytes) -> None:
        if len(line) > self._limits.max_line_bytes:
            fault = self._too_long()
            raise _Faulty(fault.code, fault.message)
        try:
            check_complexity(line)
            line.decode()  # what is taken out of it raw is not looked at yet
            read = _LINE.decode(line)
        except BodyTooComplex:
            message = "This line holds more lists, objects or values than a request may."
            raise _Faulty("request_too_complex", message) from None
        except msgspec.ValidationError:
            message = "This line must be an object of custom_id, method, url and body, and of nothing else."
            raise _Faulty("invalid_request", message) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise _Faulty("invalid_json_line", "This line is not valid JSON in UTF-8.") from None
        self._check_name(read.custom_id)
        if _text(read.method, "method") != "POST":
            raise _Faulty("invalid_method", "The method must be POST.", "method")
        if _text(read.url, "url") != self._endpoint:
            message = f"The url must be the batch's endpoint, {self._endpoint}."
            raise _Faulty("mismatched_endpoint", message, "url")
        self._check_body(read.body)

    def _check_name(self, raw: msgspec.Raw) -> None:
        name = _text(raw, "custom_id")
        if not 1 <= len(name) <= MAX_CUSTOM_ID:
            message = f"The custom_id must have 1 to {MAX_CUSTOM_ID} characters."
            raise _Faulty("invalid_custom_id", message, "custom_id")
        digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if digest in self._names:
            message = "Another line before this one has the same custom_id."
            raise _Faulty("duplicate_custom_id", message, "custom_id")
        self._names.add(digest)

    def _check_body(self, raw: msgspec.Raw) -> None:
        if not bytes(raw):
            raise _Faulty("missing_required_parameter", "This line has no body.", "body")
        try:
            body = _BODY.decode(raw)
        except msgspec.DecodeError:
            raise _Faulty("invalid_request", "The body must be an object.", "body") from None
        try:
            is_stream = bytes(body.stream) != b"" and _FLAG.decode(body.stream)
        except msgspec.DecodeError:
            raise _Faulty("invalid_request", "stream must be true or false.", "body.stream") from None
        if is_stream:
            raise _Faulty("streaming_not_supported", "A batch's requests can't be streamed.", "body.stream")
        model = _text(body.model, "body.model")
        if not 1 <= len(model) <= MAX_MODEL_NAME:
            raise _Faulty("model_not_found", "There is no model of that name.", "body.model")
        if self.model is None:
            self.model = model
        elif model != self.model:
            message = (
                "All requests of a batch must name the same model; this one names another than the first."
            )
            raise _Faulty("mismatched_model", message, "body.model")

    def _too_long(self) -> LineFault:
        message = f"This line is longer than {self._limits.max_line_bytes} bytes."
        return LineFault("request_too_large", message, self._number)

    def _add(self, fault: LineFault) -> None:
        self.faults.append(fault)
        if len(self.faults) >= MAX_SHOWN_FAULTS:
            self._is_over = True

    def _end_with(self, fault: LineFault) -> None:
        self.faults.append(fault)
        self._is_over = True


def _text(raw: msgspec.Raw, param: str) -> str:
    if not bytes(raw):
        raise _Faulty("missing_required_parameter", f"This line has no {param}.", param)
    try:
        return _TEXT.decode(raw)
    except msgspec.DecodeError:
        raise _Faulty("invalid_request", f"The {param} must be a string.", param) from None
