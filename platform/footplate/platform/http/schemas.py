"""Bodies of requests. Each parameter is honoured or refused: see `REFUSED` for those that only mean nothing.

Types are strict (no text for numbers, no NaN), and lists stop at their first fault.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, field_validator

from footplate.engine.errors import InvalidRequest
from footplate.platform.errors import UnsupportedParameter
from footplate.platform.http.complexity import MAX_KEYS, check_complexity
from footplate.platform.http.forms import one_of

MAX_STOPS = 4
MAX_STOP_CHARACTERS = 1_000
MAX_CHOICES = 128  # of one request, over all its prompts
MAX_LOGPROBS = 20
MAX_LOGIT_BIASES = 1_024
MAX_BAD_WORDS = 256
MAX_BAD_WORD = 1_000  # characters
MAX_ALLOWED_IDS = 300_000  # no vocabulary is larger

_Tokens = Annotated[int, Field(ge=0, le=2**31)]
_Penalty = Annotated[float, Field(ge=-2, le=2)]
_Ids = Annotated[list[int], Field(fail_fast=True)]
_Texts = Annotated[list[str], Field(fail_fast=True)]
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]
_ShortText = Annotated[str, Field(max_length=512)]


class Body(BaseModel):
    """Base of all request bodies."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)
    # How many keys one object in it may have.
    max_keys: ClassVar[int] = MAX_KEYS


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(Body):
    """What chat and text completions have in common. None is the same as not given."""

    model: Annotated[str, Field(min_length=1, max_length=256)]
    max_tokens: _Tokens | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: Annotated[str | _Texts | None, one_of("a string or a list of strings")] = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    logit_bias: (
        Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_LOGIT_BIASES)]
        | None
    ) = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Hints and marks that change no answer.
    user: _ShortText | None = None
    safety_identifier: Annotated[str, Field(max_length=128)] | None = None
    prompt_cache_key: _ShortText | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "default"] | None = None
    # What peers add.
    top_k: Annotated[int, Field(ge=-1, le=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=1e-4, le=1e4)] | None = None
    ignore_eos: bool | None = None
    min_tokens: _Tokens | None = None
    stop_token_ids: Annotated[_Ids, Field(max_length=1_024)] | None = None
    allowed_token_ids: Annotated[_Ids, Field(max_length=MAX_ALLOWED_IDS)] | None = None
    bad_words: (
        Annotated[
            list[Annotated[str, Field(max_length=MAX_BAD_WORD)]],
            Field(max_length=MAX_BAD_WORDS, fail_fast=True),
        ]
        | None
    ) = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    return_token_ids: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    # Lower runs first; a client may step back in the line, not forward.
    priority: Annotated[int, Field(ge=0, le=2**31)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1_024)] | None = None
    # Refused unless they mean nothing.
    structured_outputs: Any = None
    logits_processors: Any = None
    kv_transfer_params: Any = None

    @field_validator("stop")
    @classmethod
    def _few_stops(cls, value: str | list[str] | None) -> str | list[str] | None:
        stops = [value] if isinstance(value, str) else value or []
        if len(stops) > MAX_STOPS:
            raise ValueError(f"at most {MAX_STOPS} stop strings are allowed")
        if any(len(stop) > MAX_STOP_CHARACTERS for stop in stops):
            raise ValueError(f"a stop string may have at most {MAX_STOP_CHARACTERS} characters")
        return value

    def stops(self) -> tuple[str, ...]:
        """The stop strings; empty ones mean nothing."""
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(stop for stop in given if stop)

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def shows_continuous_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)


class ContentPart(BaseModel):
    """A part of a message; only text parts are read, others are refused by their type."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    type: str
    text: str | None = None


class ChatMessage(Body):
    role: Literal["developer", "system", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = None
    name: _ShortText | None = None
    refusal: str | None = None
    tool_calls: Any = None
    tool_call_id: Any = None
    function_call: Any = None
    audio: Any = None


class ChatCompletionBody(GenerationBody):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1), Field(fail_fast=True)]
    max_completion_tokens: _Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    parallel_tool_calls: bool | None = None
    # Refused unless they mean nothing.
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    response_format: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    store: Any = None
    web_search_options: Any = None
    chat_template: Any = None
    chat_template_kwargs: Any = None
    documents: Any = None
    add_generation_prompt: Any = None
    continue_final_message: Any = None
    add_special_tokens: Any = None
    echo: Any = None


class CompletionBody(GenerationBody):
    """`POST /v1/completions`."""

    prompt: Annotated[
        str | _Texts | _Ids | Annotated[list[_Ids], Field(fail_fast=True)],
        one_of("a string, a list of strings, a list of token ids, or a list of lists of token ids"),
    ]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    add_special_tokens: bool | None = None
    # Refused unless they mean nothing.
    suffix: Any = None
    response_format: Any = None

    @property
    def num_prompts(self) -> int:
        is_many = isinstance(self.prompt, list) and self.prompt and not isinstance(self.prompt[0], int)
        return len(self.prompt) if is_many else 1


class TokenizeBody(Body):
    """`POST /v1/tokenize`: a prompt or a conversation."""

    model: Annotated[str, Field(min_length=1, max_length=256)]
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1), Field(fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """`POST /v1/detokenize`."""

    model: Annotated[str, Field(min_length=1, max_length=256)]
    tokens: _Ids
    skip_special_tokens: bool | None = None


# Values, beside null, that ask for nothing. Any other value of these parameters is refused.
REFUSED: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "structured_outputs": ({},),
        "logits_processors": ([],),
        "kv_transfer_params": ({},),
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "response_format": ({"type": "text"},),
        "reasoning_effort": (),
        "verbosity": ("medium",),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "store": (False,),
        "web_search_options": (),
        "chat_template": (),
        "chat_template_kwargs": ({},),
        "documents": ([],),
        "add_generation_prompt": (True,),
        "continue_final_message": (False,),
        "add_special_tokens": (False,),
        "echo": (False,),
        "suffix": ("",),
        "tool_calls": ([],),
        "tool_call_id": (),
    }
)

AnyBody = TypeVar("AnyBody", bound=Body)


def parse_body(kind: type[AnyBody], data: bytes) -> AnyBody:
    """A request's body as a model.

    Raises:
        ValidationError: no JSON, or not of this form.
        UnsupportedParameter: a parameter asks for what this version doesn't do.
        BodyTooComplex: it holds more lists, objects, values or keys than a request can need.
    """
    check_complexity(data, kind.max_keys)
    body = kind.model_validate_json(data)
    _refuse_unsupported(body, "")
    for index, message in enumerate(getattr(body, "messages", None) or ()):
        _refuse_unsupported(message, f"messages[{index}].")
        if message.role in ("tool", "function"):
            raise UnsupportedParameter(
                f"Messages of the role {message.role!r} are not supported in this version.",
                f"messages[{index}].role",
            )
    return body


def _refuse_unsupported(body: Body, prefix: str) -> None:
    for name in body.model_fields_set:
        harmless = REFUSED.get(name)
        # A typed field of the same name is honoured where it stands.
        if harmless is None or type(body).model_fields[name].annotation is not Any:
            continue
        value = getattr(body, name)
        if value is not None and not any(type(value) is type(other) and value == other for other in harmless):
            raise UnsupportedParameter(
                f"The parameter {name!r} is not supported in this version with this value.", prefix + name
            )


def plain_messages(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as chat templates take them: role, text, and a name where one was given.

    Raises:
        UnsupportedParameter: a part is not text.
        InvalidRequest: a message that needs a text has none.
    """
    plain: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        text = _plain_content(message, f"messages[{index}].content")
        entry: dict[str, Any] = {"role": message.role, "content": text}
        if message.name is not None:
            entry["name"] = message.name
        plain.append(entry)
    return plain


def _plain_content(message: ChatMessage, param: str) -> str:
    if isinstance(message.content, str):
        return message.content
    if message.content is None:
        if message.role == "assistant":
            return message.refusal or ""
        raise InvalidRequest("This message needs a text as its content.", param)
    texts = []
    for part in message.content:
        if part.type != "text":
            raise UnsupportedParameter("Only text parts are supported in messages.", param)
        if part.text is None:
            raise InvalidRequest("A text part needs a text.", param)
        texts.append(part.text)
    return "\n".join(texts)
