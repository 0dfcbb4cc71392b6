"""What is wrong with a configuration: one fault for each place, with file, line, field, and a close name."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

Location = tuple[str | int, ...]

_SENTENCES = {
    "extra_forbidden": "there is no such setting",
    "missing": "must be given",
    "tuple_type": "must be a list",
    "list_type": "must be a list",
    "model_type": "must hold settings, each as `name: value`",
    "dict_type": "must hold settings, each as `name: value`",
}
# YAML makes something else of these words where no quotes stand around them.
_NO_TEXT = "Input should be a valid string"
_QUOTES = "must be text; quote numbers, and words such as no, yes and null"
_EXPECTED = "Input should be "


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing wrong with a configuration. `line` is 0 where none is to blame."""

    file: str
    line: int
    field: str
    message: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        return f"{place}: {self.field}: {self.message}" if self.field else f"{place}: {self.message}"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def faults_of(
    error: ValidationError, root: type[BaseModel], file: str, lines: Mapping[Location, int]
) -> list[Fault]:
    """A fault for each place; what pydantic says of a union's branches becomes one sentence."""
    messages: dict[tuple[int, str], list[str]] = {}
    for detail in error.errors(include_input=False, include_url=False, include_context=False):
        location = detail["loc"]
        message = _SENTENCES.get(detail["type"], detail["msg"].removeprefix("Value error, "))
        if detail["type"] == "extra_forbidden":
            message += close_name(root, location)
        # A sentence of a whole section begins with the name of the field to blame.
        inner = (*location, message.partition(" ")[0])
        location = inner if inner in lines else location
        messages.setdefault((line_of(location, lines), field_name(location)), []).append(message)
    return [Fault(file, line, field, _joined(said)) for (line, field), said in messages.items()]


def _joined(messages: Sequence[str]) -> str:
    first, *others = dict.fromkeys(messages)
    if all(message.startswith(_EXPECTED) for message in (first, *others)):
        said = " or ".join((first, *(message.removeprefix(_EXPECTED) for message in others)))
        return _QUOTES if said == _NO_TEXT else said
    return "; ".join((first, *others))


def close_name(root: type[BaseModel], location: Sequence[str | int]) -> str:
    """`, did you mean 'port'?` when the section around `location` has a name much like it, else nothing."""
    section: type[BaseModel] | None = root
    for part in location[:-1]:
        if isinstance(part, str):
            field = section.model_fields.get(part) if section is not None else None
            section = _section_in(field.annotation) if field is not None else None
    names = list(section.model_fields) if section is not None else []
    found = difflib.get_close_matches(str(location[-1]), names, n=1)
    return f", did you mean {found[0]!r}?" if found else ""


def _section_in(annotation: Any) -> type[BaseModel] | None:
    """The section that a field holds, by itself or in a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_section_in, typing.get_args(annotation))), None)


def line_of(location: Sequence[str | int], lines: Mapping[Location, int]) -> int:
    """The line of a field, or of the nearest thing around it that is written down."""
    for length in range(len(location), 0, -1):
        line = lines.get(tuple(location[:length]))
        if line is not None:
            return line
    return 0


def field_name(location: Sequence[str | int]) -> str:
    """A field as it is written in sentences: `models[0].engine.seed`; branches of types are left out."""
    name = ""
    for part in location:
        if isinstance(part, int):
            name += f"[{part}]"
        elif not part.startswith(("function-", "constrained-", "literal[")) and part not in (
            "int",
            "float",
            "str",
        ):
            name += f".{part}" if name else part
    return name
