"""`POST /v1/chat/completions`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from footplate.engine.errors import InvalidRequest, RequestTooLarge
from footplate.engine.text.choice import TextPiece
from footplate.engine.text.pipeline import TextPipeline
from footplate.engine.types import ModelCard, TokenUsage
from footplate.platform.generation import Choice, PromptRun
from footplate.platform.http.frames import (
    LARGE_ANSWER_ENTRIES,
    EventEnds,
    Head,
    chat_logprobs,
    details_part,
    encode,
    finish_name,
    finish_part,
    prompt_logprob_fields,
    usage_event,
    usage_fields,
)
from footplate.platform.http.gateway import Gateway
from footplate.platform.http.parameters import (
    LARGE_TEXT_CHARACTERS,
    allowed_tokens,
    bad_words_ids,
    check_stream_options,
    engine_request,
    engine_request_id,
    sampling_params,
)
from footplate.platform.http.routed import Leg, Prepared, chat_facts, check_routable, prepared
from footplate.platform.http.schemas import ChatCompletionBody, ChatMessage, parse_body, plain_messages
from footplate.platform.http.streaming import BodyResponse, StreamResponse
from footplate.platform.ports import Principal


async def create_chat_completion(gateway: Gateway, request: Request) -> Response:
    """The steps of one request: authenticate, parse, resolve, authorise, tokenise, validate; then its run."""
    principal = await gateway.caller(request)
    body = parse_body(ChatCompletionBody, await request.body())
    check_stream_options(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true.", "top_logprobs")
    plan = await gateway.plan(request, principal, body.model, partial(chat_facts, body))
    check_routable(plan, body)
    plan, legs = await prepared(plan, partial(_prepare, body, request, principal))
    run = gateway.run(request, principal, plan, legs)
    sinks = {each.leg.card.name: each.sink for each in legs}
    apart = partial(gateway.answers.run, principal.tenant_id)
    return StreamResponse(run, sinks, apart) if body.stream else BodyResponse(run, sinks, apart)


async def _prepare(body: ChatCompletionBody, request: Request, principal: Principal, leg: Leg) -> Prepared:
    """One model's prompt and its answer's form."""
    card, pipeline, terms = leg.card, leg.pipeline, leg.terms
    ids = await encode_messages(pipeline, card, body.messages)
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if asked == 0:
        raise InvalidRequest("max_completion_tokens must be at least 1.", "max_completion_tokens")
    max_tokens = allowed_tokens(card, terms, len(ids), asked, "messages", body.n or 1)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    bad_words = await bad_words_ids(pipeline, body.bad_words)
    params = leg.params(sampling_params(body, card, max_tokens, logprobs, body.prompt_logprobs, bad_words))
    head = Head.new(
        "chatcmpl-", "chat.completion.chunk" if body.stream else "chat.completion", card, body.service_tier
    )
    choices = [Choice(index, pipeline.choice_decoder(params)) for index in range(params.n)]
    name = engine_request_id(request, leg.first_number)
    prompt = PromptRun(engine_request(name, ids, params, body, principal, terms), choices)
    if body.stream:
        return Prepared([prompt], ChatStream(head, body, pipeline, params.n))
    return Prepared([prompt], ChatAnswer(head, body, pipeline, prompt))


async def encode_messages(pipeline: TextPipeline, card: ModelCard, messages: list[ChatMessage]) -> list[int]:
    """A conversation's ids; a large one is worked on in a thread.

    Raises:
        InvalidRequest: the template refuses the messages, or there is none.
        RequestTooLarge: the text alone shows that it can't fit.
    """
    plain = plain_messages(messages)

    def work() -> list[int]:
        return pipeline.encode_rendered_chat(render(pipeline, card, plain))

    ids = await asyncio.to_thread(work) if is_large_chat(plain) else work()
    if not ids:
        raise InvalidRequest("The messages make an empty prompt; it needs at least one token.", "messages")
    return ids


def is_large_chat(plain: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a conversation is too large to be worked on while others wait."""
    return sum(len(message["content"]) for message in plain) > LARGE_TEXT_CHARACTERS or len(plain) > 50


def render(
    pipeline: TextPipeline,
    card: ModelCard,
    plain: list[dict[str, Any]],
    add_generation_prompt: bool = True,
) -> str:
    """A conversation as its template writes it. Raises as `encode_messages`."""
    rendered = pipeline.apply_chat_template(plain, add_generation_prompt)
    refuse_absurd(pipeline, card, rendered, "messages")
    return rendered


def refuse_absurd(pipeline: TextPipeline, card: ModelCard, text: str, param: str) -> None:
    """Raises RequestTooLarge, before tokenising, for a text that can't fit even in the longest tokens."""
    least = pipeline.least_tokens(text)
    if least > card.max_model_len:
        raise RequestTooLarge(
            f"This model's context length is {card.max_model_len} tokens; the prompt has at least {least}.",
            param,
        )


class ChatStream:
    """Chat chunks: a role chunk for each choice, content, one finish chunk for each choice, usage."""

    def __init__(
        self, head: Head, body: ChatCompletionBody, pipeline: TextPipeline, num_choices: int
    ) -> None:
        self.out: list[bytes] = []
        self.late: list[Callable[[], bytes]] = []
        self._start = head.event_start()
        self._pipeline = pipeline
        self._includes_usage = body.include_usage
        self._shows_ids = bool(body.return_token_ids)
        self._shows_logprobs = bool(body.logprobs)
        self._ends = EventEnds(includes_usage=self._includes_usage, is_continuous=body.shows_continuous_usage)
        self._is_plain = not (self._shows_ids or self._shows_logprobs) and self._ends.fixed is not None
        # A content chunk is three parts: what stands before the text, the text, what stands after it.
        self._before = [
            self._start + b',"choices":[{"index":%d,"delta":{"content":' % index
            for index in range(num_choices)
        ]
        self._after = b'},"logprobs":null,"finish_reason":null}' + (self._ends.fixed or b"")
        self._left_over: dict[int, TextPiece] = {}

    def begin(self, prompt: PromptRun) -> None:
        self._ends.begin(prompt)
        extra = b""
        if self._shows_ids:
            extra = b',"prompt_token_ids":' + encode(list(prompt.request.prompt_token_ids))
        for choice in prompt.choices:
            self.out.append(
                self._start
                + extra
                + b',"choices":[{"index":%d,"delta":{"role":"assistant","content":""},' % choice.index
                + b'"logprobs":null,"finish_reason":null}'
                + self._ends.of(choice)
            )

    def piece(self, choice: Choice, piece: TextPiece) -> None:
        if not piece.text:
            self._left_over[choice.index] = piece
        elif self._is_plain:
            self.out += (self._before[choice.index], encode(piece.text), self._after)
        else:
            self.out += (self._before[choice.index], encode(piece.text), b"}", self._details(piece))
            self.out += (b',"finish_reason":null}', self._ends.of(choice))

    def end(self, choice: Choice) -> None:
        left_over = self._left_over.pop(choice.index, None)
        details = self._details(left_over) if left_over is not None else b',"logprobs":null'
        self.out.append(
            self._start
            + b',"choices":[{"index":%d,"delta":{}' % choice.index
            + details
            + finish_part(choice.decoder)
            + self._ends.of(choice)
        )

    def last(self, usage: TokenUsage) -> None:
        if self._includes_usage:
            self.out.append(usage_event(self._start, usage))

    def _details(self, piece: TextPiece) -> bytes:
        logprobs = b"null"
        if self._shows_logprobs and piece.logprobs:
            logprobs = encode({"content": chat_logprobs(self._pipeline, piece.logprobs), "refusal": None})
        return details_part(logprobs, piece, shows_ids=self._shows_ids)


class ChatAnswer:
    """One chat completion body."""

    def __init__(
        self, head: Head, body: ChatCompletionBody, pipeline: TextPipeline, prompt: PromptRun
    ) -> None:
        self._head = head
        self._body = body
        self._pipeline = pipeline
        self._prompt = prompt
        self._pieces: list[list[TextPiece]] = [[] for _ in prompt.choices]

    def begin(self, prompt: PromptRun) -> None:
        pass

    def piece(self, choice: Choice, piece: TextPiece) -> None:
        self._pieces[choice.index].append(piece)

    def end(self, choice: Choice) -> None:
        pass

    @property
    def is_large(self) -> bool:
        prompt, body = self._prompt, self._body
        num_tokens = sum(choice.decoder.num_tokens for choice in prompt.choices)
        num_entries = num_tokens * (1 + (body.top_logprobs or 0))
        if body.prompt_logprobs is not None:
            num_entries += len(prompt.request.prompt_token_ids) * (1 + body.prompt_logprobs)
        return num_entries > LARGE_ANSWER_ENTRIES

    def body(self, usage: TokenUsage) -> dict[str, Any]:
        body = self._head.fields()
        body["choices"] = [self._choice(choice) for choice in self._prompt.choices]
        body["usage"] = usage_fields(usage)
        if self._body.return_token_ids:
            body["prompt_token_ids"] = list(self._prompt.request.prompt_token_ids)
        if self._body.prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_logprob_fields(self._pipeline, self._prompt.prompt_logprobs)
        return body

    def _choice(self, choice: Choice) -> dict[str, Any]:
        pieces = self._pieces[choice.index]
        text = "".join(piece.text for piece in pieces)
        shown: dict[str, Any] = {
            "index": choice.index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": None,
            "finish_reason": finish_name(choice.decoder.finish_reason),
            "stop_reason": choice.decoder.stop_reason,
        }
        if self._body.logprobs:
            entries = [entry for piece in pieces for entry in piece.logprobs]
            shown["logprobs"] = {"content": chat_logprobs(self._pipeline, entries), "refusal": None}
        if self._body.return_token_ids:
            shown["token_ids"] = [token_id for piece in pieces for token_id in piece.token_ids]
        return shown
