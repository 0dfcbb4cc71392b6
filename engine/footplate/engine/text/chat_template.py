"""Chat templates: Jinja2 in a sandbox that bounds time, output and values, with the names templates expect.

Templates come with weights or from an operator; messages come from clients. Neither may hang or fill the
process.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from footplate.engine.errors import InvalidRequest, LoadError

MAX_SECONDS = 2.0
MAX_OUTPUT_CHARACTERS = 1_000_000  # beyond eight times what the messages hold
MAX_VALUE_LENGTH = 16_000_000  # of one string or list that an operator builds
MAX_EXPONENT = 64

_deadline: ContextVar[float] = ContextVar("chat_template_deadline", default=0.0)

Message = Mapping[str, Any]


class _Bounded(TemplateError):
    """The template went over one of the limits above."""


class _Raised(TemplateError):
    """The template itself refused the messages, with a sentence of its own."""


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's words for training; here its body is all that counts."""

    tags = {"generation"}  # noqa: RUF012 - the library reads it as a plain class attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Guard(NodeTransformer):
    """Makes each loop turn and each macro call look at the clock, and each `~` at the size of its result."""

    def _with_clock(self, node: Any) -> Any:
        self.generic_visit(node)
        check = nodes.Call(nodes.EnvironmentAttribute("check_deadline"), [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(check, lineno=node.lineno))
        return node

    visit_For = _with_clock
    visit_Macro = _with_clock

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Call(nodes.EnvironmentAttribute("join_bounded"), node.nodes, [], None, None)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template: nodes.Template = super()._parse(source, name, filename)
        template = _Guard().visit(template)
        template.set_environment(self)
        for node in template.find_all(nodes.Node):
            if "lineno" in node.attributes and node.lineno is None:
                node.lineno = 1
        return template

    def check_deadline(self) -> str:
        if time.monotonic() > _deadline.get():
            raise _Bounded(f"the chat template ran for more than {MAX_SECONDS:g} s")
        return ""

    def join_bounded(self, *values: Any) -> str:
        texts = [str(value) for value in values]
        _check_length(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            if not all(isinstance(value, int | float) for value in (left, right)) or right > MAX_EXPONENT:
                raise _Bounded(f"the chat template raises to a power above {MAX_EXPONENT}")
        elif operator == "*":
            _check_length(_sized(left, right) or _sized(right, left))
        elif operator == "+":
            if isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
                _check_length(len(left) + len(right))
        elif isinstance(left, str):
            raise _Bounded("the chat template formats with '%', which is not supported; use '~' or filters")
        return super().call_binop(context, operator, left, right)


def _sized(sequence: Any, count: Any) -> int:
    if isinstance(sequence, str | list | tuple) and isinstance(count, int):
        return len(sequence) * max(count, 0)
    # A product of huge integers is bounded by the length of its factors.
    return sequence.bit_length() if isinstance(sequence, int) else 0


def _check_length(length: int) -> None:
    if length > MAX_VALUE_LENGTH:
        raise _Bounded(f"the chat template builds a value of more than {MAX_VALUE_LENGTH} elements")


def _raise_exception(message: Any) -> NoReturn:
    raise _Raised(str(message)[:2000])


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes: the text goes to a model, not to a browser."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _pad_refused(*_: Any, **__: Any) -> NoReturn:
    raise _Bounded("the chat template uses a padding filter, which is not supported")


def _environment(now: Callable[[], datetime]) -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock], cache_size=0
    )
    environment.filters["tojson"] = _to_json
    # These make long texts out of short ones, and no chat needs them.
    environment.filters["center"] = environment.filters["format"] = _pad_refused
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda style: now().strftime(str(style)[:200])
    environment.globals.pop("lipsum", None)
    return environment


class ChatTemplate:
    """A compiled chat template. Rendering is safe in any thread.

    Args:
        source: the template's text.
        origin: where it came from, for errors.
        special_tokens: names such as `bos_token` and their texts.
        now: the clock that `strftime_now` reads.

    Raises:
        LoadError: the template is no valid Jinja2.
    """

    def __init__(
        self,
        source: str,
        origin: str,
        special_tokens: Mapping[str, str],
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        try:
            self._template = _environment(now).from_string(source)
        except TemplateSyntaxError as error:
            raise LoadError(
                f"{origin}: the chat template is not valid, line {error.lineno}: {error.message}"
            ) from None
        self._special_tokens = dict(special_tokens)
        # A template that never heard of developers would refuse or mangle them; they are its systems.
        self._knows_developer = "developer" in source

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """The prompt text for `messages`, whose contents are texts.

        Raises:
            InvalidRequest: the template refused them (in its own words) or failed on them; `param` is
                `messages`.
        """
        prepared = [self._prepared(message) for message in messages]
        characters = sum(len(str(value)) for message in prepared for value in message.values())
        token = _deadline.set(time.monotonic() + MAX_SECONDS)
        try:
            return self._bounded_output(
                characters * 8 + MAX_OUTPUT_CHARACTERS,
                messages=prepared,
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self._special_tokens,
            )
        except (_Raised, _Bounded) as error:
            raise InvalidRequest(str(error), param="messages") from None
        except (
            TemplateError,
            ArithmeticError,
            LookupError,
            TypeError,
            ValueError,
            RecursionError,
            AttributeError,
        ):
            # The library's own sentences can quote values, that is, content.
            raise InvalidRequest(
                "the model's chat template can't be applied to these messages", param="messages"
            ) from None
        finally:
            _deadline.reset(token)

    def _prepared(self, message: Message) -> dict[str, Any]:
        prepared = dict(message)
        if prepared.get("role") == "developer" and not self._knows_developer:
            prepared["role"] = "system"
        return prepared

    def _bounded_output(self, max_characters: int, **variables: Any) -> str:
        parts: list[str] = []
        length = 0
        for part in self._template.generate(**variables):
            length += len(part)
            if length > max_characters:
                raise _Bounded("the chat template writes far more text than the messages hold")
            parts.append(part)
        return "".join(parts)
