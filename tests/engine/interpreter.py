"""Triton's interpreter without a search that it makes anew at every call.

At each call of a kernel, and of each function in it, it looks through all members of `triton.language` for
those that it puts its own in place of: a third of the time of a kernel that calls functions. Which members
these are is the same each time. All else is Triton's own, of the one minor version that pyproject.toml names.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from triton.language.core import is_builtin
from triton.runtime import interpreter


@functools.cache
def _builtin_names(package: Any) -> list[str]:
    return [name for name, member in inspect.getmembers(package) if is_builtin(member)]


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    for name in _builtin_names(package):
        member = getattr(package, name)
        # In a function that a kernel calls they are already in place.
        if is_builtin(member):
            interpreter._patch_attr(package, name, member, builder, scope)


def install() -> None:
    """Put the kept search in place, for this process."""
    interpreter._patch_builtin = _patch_builtin
