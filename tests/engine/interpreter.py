"""Triton's interpreter without a search that it makes anew at every call, and with products of no surprise.

A row of a product in numpy has other last bits in another place of the matrix on some processors, which
no GPU does. Products here are made in float64 and rounded, so that they depend on the row alone.

At each call of a kernel, and of each function in it, it looks through all members of `triton.language` for
those that it puts its own in place of: a third of the time of a kernel that calls functions. Which members
these are is the same each time. All else is Triton's own, of the one minor version that pyproject.toml names.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import numpy as np
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


def _create_dot(
    builder: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any
) -> Any:
    product = np.matmul(a.data, b.data, dtype=np.float64)
    return interpreter.TensorHandle(product.astype(d.data.dtype) + d.data, d.dtype.scalar)


def install() -> None:
    """Put both in place, for this process."""
    interpreter._patch_builtin = _patch_builtin
    interpreter.InterpreterBuilder.create_dot = _create_dot
