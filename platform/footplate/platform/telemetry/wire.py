"""OTLP in protobuf's wire format, written directly: lengths, tags and little-endian numbers.

Making the generated classes costs four times as much a span, and importing them a seventh of a second; a
request may cost neither. Tests read what comes out with the generated classes.
Source: opentelemetry-proto 1.5, https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

from footplate.platform.telemetry.allow_list import Value

_fixed64 = struct.Struct("<Q").pack
_double = struct.Struct("<d").pack
_SMALL = tuple(bytes((number,)) for number in range(128))
_BYTES_TAGS = tuple(bytes((number << 3 | 2,)) for number in range(16))


def varint(number: int) -> bytes:
    """A number from 0 to 2**64 - 1, seven bits a byte."""
    if number < 128:
        return _SMALL[number]
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)


def tag(number: int, wire_type: int) -> bytes:
    """What stands before a field: 0 varint, 1 eight bytes, 2 a length and bytes."""
    return varint(number << 3 | wire_type)


def of_bytes(number: int, data: bytes) -> bytes:
    """A field of bytes, text in UTF-8, or another message."""
    length = len(data)
    return _BYTES_TAGS[number] + (_SMALL[length] if length < 128 else varint(length)) + data


def of_integer(number: int, value: int) -> bytes:
    """A field of a varint; negative ones take ten bytes, as protobuf wants it."""
    return tag(number, 0) + varint(value & 0xFFFF_FFFF_FFFF_FFFF)


def of_fixed64(number: int, value: int) -> bytes:
    """A field of eight bytes."""
    return tag(number, 1) + _fixed64(value & 0xFFFF_FFFF_FFFF_FFFF)


def of_double(number: int, value: float) -> bytes:
    """A field of a double."""
    return tag(number, 1) + _double(value)


def packed_fixed64(number: int, values: Sequence[int]) -> bytes:
    """A list of eight-byte numbers."""
    return of_bytes(number, struct.pack(f"<{len(values)}Q", *values))


def packed_double(number: int, values: Sequence[float]) -> bytes:
    """A list of doubles."""
    return of_bytes(number, struct.pack(f"<{len(values)}d", *values))


def any_value(value: Value | Iterable[str]) -> bytes:
    """An `AnyValue` message."""
    if isinstance(value, str):
        return of_bytes(1, value.encode())
    if isinstance(value, bool):
        return of_integer(2, value)
    if isinstance(value, int):
        return of_integer(3, value)
    if isinstance(value, float):
        return of_double(4, value)
    return of_bytes(5, b"".join(of_bytes(1, any_value(item)) for item in value))


def key_value(name: str, value: Value | Iterable[str]) -> bytes:
    """A `KeyValue` message."""
    return of_bytes(1, name.encode()) + of_bytes(2, any_value(value))
