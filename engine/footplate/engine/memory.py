"""Memory of the process that no engine needs any more."""

from __future__ import annotations

import ctypes


def give_back_memory() -> None:
    """Hand freed memory to the system: an engine on a CPU tells glibc to keep what its steps free."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return  # another C library, which was told nothing
    trim(0)
