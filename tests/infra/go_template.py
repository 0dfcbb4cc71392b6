"""Renders the part of Helm's templates that our chart keeps to, so that it is checked where there is no helm.

That part: values by path, `include` of what `define` names, `if`/`else`/`range`/`end`, and pipelines of the
functions below. Anything else is an error here, so that the chart can't grow past it unseen.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

_ACTION = re.compile(r"\{\{(-?)\s*(.*?)\s*(-?)\}\}", re.DOTALL)
_WORD = re.compile(r'"(?:[^"\\]|\\.)*"|\S+')


class TemplateError(Exception):
    """The template asks for what is not there, or for more than this renderer knows."""


@dataclass
class _Block:
    """A piece of a template: text, an action, or a block with what is inside."""

    kind: str
    text: str = ""
    body: list[_Block] = field(default_factory=list)
    otherwise: list[_Block] = field(default_factory=list)


def to_yaml(value: Any) -> str:
    """As Helm's toYaml: keys sorted, no closing line feed."""
    return yaml.safe_dump(value, default_flow_style=False, width=1 << 20).rstrip("\n").removesuffix("\n...")


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return "" if value is None else str(value)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "quote": lambda value: json.dumps(_text(value)),
    "toYaml": to_yaml,
    "toJson": lambda value: json.dumps(value, separators=(",", ":")),
    "nindent": lambda spaces, text: "\n" + _indented(spaces, text),
    "indent": lambda spaces, text: _indented(spaces, text),
    "sha256sum": lambda text: hashlib.sha256(text.encode()).hexdigest(),
}


def _indented(spaces: int, text: str) -> str:
    return "\n".join(" " * spaces + line for line in text.split("\n"))


def _tokens(text: str) -> Iterator[_Block]:
    position, trims = 0, False
    for match in _ACTION.finditer(text):
        piece = text[position : match.start()]
        piece = piece.lstrip() if trims else piece
        yield _Block("text", piece.rstrip() if match[1] else piece)
        if not match[2].startswith("/*"):
            yield _Block("action", match[2])
        position, trims = match.end(), bool(match[3])
    yield _Block("text", text[position:].lstrip() if trims else text[position:])


def _parse(tokens: Iterator[_Block]) -> tuple[list[_Block], str]:
    """Blocks up to `end` or `else`, and which of them it was."""
    blocks: list[_Block] = []
    for token in tokens:
        word = token.text.split(maxsplit=1)[0] if token.kind == "action" and token.text else ""
        if word in ("end", "else"):
            return blocks, word
        if word in ("if", "range", "define"):
            token.kind, token.text = word, token.text.split(maxsplit=1)[1]
            token.body, ending = _parse(tokens)
            if ending == "else":
                token.otherwise, _ = _parse(tokens)
        blocks.append(token)
    return blocks, ""


class Chart:
    """A chart's templates and values."""

    def __init__(self, folder: Path, release: str = "footplate", namespace: str = "footplate") -> None:
        self.values: dict[str, Any] = yaml.safe_load((folder / "values.yaml").read_text())
        self._release = {"Name": release, "Namespace": namespace}
        self._defined: dict[str, list[_Block]] = {}
        self._templates: dict[str, list[_Block]] = {}
        for path in sorted((folder / "templates").iterdir()):
            blocks, _ = _parse(_tokens(path.read_text()))
            self._templates[path.name] = blocks
            for block in blocks:
                if block.kind == "define":
                    self._defined[json.loads(block.text)] = block.body

    def render(self, **values: Any) -> list[dict[str, Any]]:
        """All objects, with some sections of the values overlaid."""
        objects = []
        for name, text in self.texts(**values).items():
            try:
                objects += [one for one in yaml.safe_load_all(text) if one]
            except yaml.YAMLError as error:
                raise TemplateError(f"{name}: {error}") from error
        return objects

    def texts(self, **values: Any) -> dict[str, str]:
        """Each template's text."""
        root = {"Values": _overlaid(self.values, values), "Release": self._release}
        return {
            name: self._write(blocks, root, root)
            for name, blocks in self._templates.items()
            if not name.startswith("_")
        }

    def _write(self, blocks: list[_Block], dot: Any, root: Any) -> str:
        written = []
        for block in blocks:
            if block.kind == "text":
                written.append(block.text)
            elif block.kind == "action":
                written.append(_text(self._evaluate(block.text, dot, root)))
            elif block.kind == "if":
                chosen = block.body if self._evaluate(block.text, dot, root) else block.otherwise
                written.append(self._write(chosen, dot, root))
            elif block.kind == "range":
                written += [
                    self._write(block.body, item, root) for item in self._evaluate(block.text, dot, root)
                ]
        return "".join(written)

    def _evaluate(self, pipeline: str, dot: Any, root: Any) -> Any:
        value: Any = None
        for position, command in enumerate(pipeline.split(" | ")):
            words = _WORD.findall(command)
            if words[0] == "include":
                value = self._write(
                    self._defined[json.loads(words[1])], self._term(words[2], dot, root), root
                )
            elif words[0] in FUNCTIONS:
                arguments = [self._term(word, dot, root) for word in words[1:]]
                value = FUNCTIONS[words[0]](*arguments, *([value] if position else []))
            elif position == 0 and len(words) == 1:
                value = self._term(words[0], dot, root)
            else:
                raise TemplateError(f"{pipeline!r} is more than this renderer knows")
        return value

    def _term(self, word: str, dot: Any, root: Any) -> Any:
        if word.startswith('"'):
            return json.loads(word)
        if word.isdecimal():
            return int(word)
        if not word.startswith((".", "$")):
            raise TemplateError(f"{word!r} is more than this renderer knows")
        value = root if word.startswith("$") else dot
        for part in word.lstrip("$").split("."):
            if part:
                if part not in value:
                    raise TemplateError(f"there is no {word}")
                value = value[part]
        return value


def _overlaid(base: Any, over: Any) -> Any:
    if isinstance(base, dict) and isinstance(over, dict):
        return {
            key: _overlaid(base.get(key), over[key]) if key in over else base[key] for key in {**base, **over}
        }
    return base if over is None else over
