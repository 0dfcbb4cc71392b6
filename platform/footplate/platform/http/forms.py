"""Values of several forms: what a field takes, and what it was given, in words and without any content."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError

WRONG_FORM = "wrong_form"  # the kind of error that says so

_ONE_AND_MANY = {
    str: ("a string", "strings"),
    bool: ("a boolean", "booleans"),
    int: ("an integer", "integers"),
    float: ("a number with a fraction", "numbers with a fraction"),
    dict: ("an object", "objects"),
    type(None): ("null", "nulls"),
}


def one_of(forms: str) -> WrapValidator:
    """Let a union's fault name all its forms; pydantic would tell of the first form alone."""

    def check(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise PydanticCustomError(
                WRONG_FORM, "This must be {forms}; it is {given}.", {"forms": forms, "given": describe(value)}
            ) from None

    return WrapValidator(check)


def describe(value: Any) -> str:
    """A JSON value's form, down to lists of lists: `a list of integers and strings`."""
    if isinstance(value, list):
        return f"a list of {_many(value, depth=1)}" if value else "an empty list"
    return _ONE_AND_MANY[type(value)][0]


def _many(values: Sequence[Any], depth: int) -> str:
    names = {_ONE_AND_MANY[type(value)][1] for value in values if not isinstance(value, list)}
    lists = [value for value in values if isinstance(value, list)]
    if lists:
        inner = [item for items in lists for item in items] if depth > 0 else []
        names.add(f"lists of {_many(inner, depth - 1)}" if inner else "lists")
    return " and ".join(sorted(names))
