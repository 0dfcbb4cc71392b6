"""`POST /v1/completions`: plain prompts, as texts or ids, one or many."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from footplate.engine.errors import InvalidRequest
from footplate.engine.text.choice import ChoiceDecoder, TextPiece
from footplate.engine.text.detokenizer import Detokenizer, TokenTexts
from footplate.engine.text.pipeline import TextPipeline
from footplate.engine.types import ModelCard, SamplingParams, TokenLogprob, TokenUsage
from footplate.platform.errors import UnsupportedParameter
from footplate.platform.generation import Choice, PromptRun
from footplate.platform.http.chat import refuse_absurd
from footplate.platform.http.frames import (
    LARGE_ANSWER_ENTRIES,
    EventEnds,
    Head,
    details_part,
    encode,
    finish_name,
    finish_part,
    finite,
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
from footplate.platform.http.routed import Leg, Prepared, check_routable, completion_facts, prepared
from footplate.platform.http.schemas import MAX_CHOICES, CompletionBody, parse_body
from footplate.platform.http.streaming import BodyResponse, StreamResponse
from footplate.platform.ports import Principal

DEFAULT_MAX_TOKENS = 16
# Of prompts, in one answer: each token for each choice, and as many candidates for it as were asked for.
MAX_PROMPT_ENTRIES = 2**20


@dataclass(frozen=True, slots=True)
class _Prompt:
    ids: list[int]
    text: str | None  # None when the client sent ids


@dataclass(frozen=True, slots=True)
class _Caller:
    principal: Principal
    http: Request


async def create_completion(gateway: Gateway, request: Request) -> Response:
    """The steps of one request: authenticate, parse, resolve, authorise, tokenise, validate; then its run."""
    principal = await gateway.caller(request)
    body = parse_body(CompletionBody, await request.body())
    _check(body)
    plan = await gateway.plan(request, principal, body.model, partial(completion_facts, body))
    check_routable(plan, body)
    plan, legs = await prepared(plan, partial(_prepare, body, _Caller(principal, request)))
    run = gateway.run(request, principal, plan, legs)
    sinks = {each.leg.card.name: each.sink for each in legs}
    apart = partial(gateway.answers.run, principal.tenant_id)
    return StreamResponse(run, sinks, apart) if body.stream else BodyResponse(run, sinks, apart)


async def _prepare(body: CompletionBody, caller: _Caller, leg: Leg) -> Prepared:
    """One model's prompts and its answer's form."""
    head = Head.new("cmpl-", "text_completion", leg.card, body.service_tier)
    runs = await _prompt_runs(await _read_prompts(leg.pipeline, leg.card, body), body, leg, caller)
    if body.stream:
        return Prepared(runs, CompletionStream(head, body, leg.pipeline))
    return Prepared(runs, CompletionAnswer(head, body, leg.pipeline, runs))


def _check(body: CompletionBody) -> None:
    _check_choices(body.num_prompts, body.n or 1)
    check_stream_options(body)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise UnsupportedParameter("best_of is not supported; it may only equal n.", "best_of")
    if body.max_tokens == 0 and not body.echo:
        raise InvalidRequest("max_tokens may be 0 only with echo.", "max_tokens")
    if body.echo and body.prompt_logprobs is not None:
        raise InvalidRequest(
            "Use logprobs with echo; prompt_logprobs is for answers without it.", "prompt_logprobs"
        )


def _check_choices(num_prompts: int, num_each: int) -> None:
    if num_prompts * num_each > MAX_CHOICES:
        raise InvalidRequest(
            f"{num_prompts} prompts with {num_each} choices each make {num_prompts * num_each} choices; "
            f"one request may have {MAX_CHOICES}. Send fewer prompts at once, or a smaller n.",
            "prompt" if num_each == 1 else "n",
        )


async def _read_prompts(pipeline: TextPipeline, card: ModelCard, body: CompletionBody) -> list[_Prompt]:
    given = body.prompt
    if isinstance(given, str):
        texts: list[str] = [given]
    elif given and isinstance(given[0], str):
        texts = [text for text in given if isinstance(text, str)]
    else:
        return _prompts_of_ids(pipeline, card, given)
    if not all(texts):
        raise InvalidRequest("The prompt is empty; it needs at least one token.", "prompt")
    add_special_tokens = body.add_special_tokens is not False

    def work() -> list[_Prompt]:
        prompts = []
        for text in texts:
            refuse_absurd(pipeline, card, text, "prompt")
            prompts.append(_Prompt(pipeline.encode(text, add_special_tokens), text))
        return prompts

    # Each text costs something, however short it is.
    is_large = sum(map(len, texts)) + 100 * len(texts) > LARGE_TEXT_CHARACTERS
    prompts = await asyncio.to_thread(work) if is_large else work()
    if not all(prompt.ids for prompt in prompts):
        raise InvalidRequest("The prompt makes no tokens; it needs at least one.", "prompt")
    return prompts


def _prompts_of_ids(pipeline: TextPipeline, card: ModelCard, given: Sequence[Any]) -> list[_Prompt]:
    lists: list[list[int]] = list(given) if given and isinstance(given[0], list) else [list(given)]
    for ids in lists:
        if not ids:
            raise InvalidRequest("The prompt is empty; it needs at least one token.", "prompt")
        if not (min(ids) >= 0 and max(ids) < card.vocab_size):
            raise InvalidRequest(f"The prompt holds a token id outside 0 to {card.vocab_size - 1}.", "prompt")
    return [_Prompt(ids, None) for ids in lists]


async def _prompt_runs(
    prompts: Sequence[_Prompt], body: CompletionBody, leg: Leg, caller: _Caller
) -> list[PromptRun]:
    card, pipeline = leg.card, leg.pipeline
    asked = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    prompt_logprobs = body.logprobs if body.echo else body.prompt_logprobs
    num_choices = body.n or 1
    for prompt in prompts:
        allowed_tokens(card, leg.terms, len(prompt.ids), asked, "prompt")
    _check_shown(body, sum(len(prompt.ids) for prompt in prompts))
    bad_words = await bad_words_ids(pipeline, body.bad_words)
    params = leg.params(sampling_params(body, card, asked, body.logprobs, prompt_logprobs, bad_words))
    runs = []
    for number, prompt in enumerate(prompts):
        name = engine_request_id(caller.http, leg.first_number + number)
        request = engine_request(name, prompt.ids, params, body, caller.principal, leg.terms)
        choices = [
            Choice(number * num_choices + index, _decoder(pipeline, params, body))
            for index in range(num_choices)
        ]
        runs.append(PromptRun(request, choices, prompt.text))
    return runs


def _check_shown(body: CompletionBody, num_prompt_tokens: int) -> None:
    num_entries = _num_shown(body, num_prompt_tokens)
    if num_entries > MAX_PROMPT_ENTRIES:
        raise InvalidRequest(
            f"{num_prompt_tokens} prompt tokens, shown for each of {body.n or 1} choices with the "
            f"log-probabilities asked for, make {num_entries} entries; one answer may hold "
            f"{MAX_PROMPT_ENTRIES}. Send fewer prompts at once, a smaller n, or ask for fewer logprobs.",
            "n" if (body.n or 1) > 1 else "prompt",
        )


def _num_shown(body: CompletionBody, num_prompt_tokens: int) -> int:
    """How many entries of prompts an answer holds, as `MAX_PROMPT_ENTRIES` counts them."""
    asked = body.logprobs if body.echo else body.prompt_logprobs
    if not (body.echo or body.return_token_ids or asked is not None):
        return 0
    return num_prompt_tokens * (body.n or 1) * (1 + (asked or 0))


def _decoder(pipeline: TextPipeline, params: SamplingParams, body: CompletionBody) -> ChoiceDecoder:
    # Evaluation harnesses score the echoed prompt by cutting the last entry off as the one generated token's,
    # so that token has an entry even when it is a hidden EOS.
    return pipeline.choice_decoder(params, keeps_end_entry=bool(body.echo))


class _Logprobs:
    """Logprob lists of tokens that follow one another, with the place of each in the text."""

    def __init__(self, pipeline: TextPipeline, texts: TokenTexts, position: int = 0) -> None:
        self._pipeline = pipeline
        self._decoder = Detokenizer(texts)
        self._position = position

    def prompt(self, prompt: PromptRun, num_prefix_tokens: int) -> dict[str, Any]:
        """Entries of the prompt; the first has no logprob, since nothing comes before it.

        The first `num_prefix_tokens` stand in front of the client's own text and take no place in it.
        """
        lists = _empty_lists()
        entries = prompt.prompt_logprobs or (None,) * len(prompt.request.prompt_token_ids)
        for number, (token_id, entry) in enumerate(
            zip(prompt.request.prompt_token_ids, entries, strict=True)
        ):
            self._append(lists, token_id, entry, takes_place=number >= num_prefix_tokens)
        return lists

    def answer(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        lists = _empty_lists()
        for entry in entries:
            self._append(lists, entry.token_id, entry, takes_place=True)
        return lists

    def _append(
        self, lists: dict[str, Any], token_id: int, entry: TokenLogprob | None, takes_place: bool
    ) -> None:
        text = self._token_name
        lists["tokens"].append(text(token_id))
        shown = self._decoder.push(token_id) if takes_place else ""
        # A token of whole characters may bring out the broken one before it, and begins after that.
        own = text(token_id)
        before = len(shown) - len(own) if own and shown.endswith(own) else 0
        lists["text_offset"].append(self._position + before)
        self._position += len(shown)
        if entry is None:
            lists["token_logprobs"].append(None)
            lists["top_logprobs"].append(None)
            return
        lists["token_logprobs"].append(finite(entry.logprob))
        top = {text(other): finite(logprob) for other, logprob in reversed(entry.top)}
        lists["top_logprobs"].append({**top, text(token_id): finite(entry.logprob)})

    def _token_name(self, token_id: int) -> str:
        """A token's text; bytes that are no characters are spelled out, so that names stay apart."""
        data = self._pipeline.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _empty_lists() -> dict[str, Any]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


class _Echo:
    """A prompt that is shown again: made once, however many choices begin with it."""

    def __init__(self, body: CompletionBody, pipeline: TextPipeline, prompt: PromptRun) -> None:
        self.text = ""
        # Where the answer begins in the text that tokens have places in.
        self.num_characters = 0
        self._pipeline = pipeline
        self._prompt = prompt
        self._has_lists = bool(body.echo) and body.logprobs is not None
        # An echoed prompt shows its special tokens, whatever the answer does.
        self._texts = pipeline.token_texts(skip_special_tokens=False)
        ids = prompt.request.prompt_token_ids
        if body.echo:
            self.text = prompt.text if prompt.text is not None else self._texts.decode(ids)
        if self._has_lists:
            self._num_prefix_tokens = self._count_prefix_tokens()
            self.num_characters = len(self._texts.decode(ids[self._num_prefix_tokens :]))

    def lists(self) -> dict[str, Any] | None:
        """The logprob lists of its tokens, where they are asked for."""
        if not self._has_lists:
            return None
        return _Logprobs(self._pipeline, self._texts).prompt(self._prompt, self._num_prefix_tokens)

    def _count_prefix_tokens(self) -> int:
        prompt, prefix = self._prompt, self._pipeline.prefix_ids
        ids = list(prompt.request.prompt_token_ids[: len(prefix)])
        written = self._texts.decode(prefix)
        stands_in_text = prompt.text is None or (bool(written) and prompt.text.startswith(written))
        return 0 if stands_in_text or ids != list(prefix) else len(prefix)


def _answer_logprobs(body: CompletionBody, pipeline: TextPipeline, echo: _Echo) -> _Logprobs:
    texts = pipeline.token_texts(skip_special_tokens=body.skip_special_tokens is not False)
    return _Logprobs(pipeline, texts, echo.num_characters)


class CompletionStream:
    """Text completion chunks."""

    def __init__(self, head: Head, body: CompletionBody, pipeline: TextPipeline) -> None:
        self.out: list[bytes] = []
        self.late: list[Callable[[], bytes]] = []
        self._body = body
        self._pipeline = pipeline
        self._start = head.event_start() + b',"choices":['
        self._usage_start = head.event_start()
        self._includes_usage = body.include_usage
        self._shows_ids = bool(body.return_token_ids)
        self._ends = EventEnds(includes_usage=self._includes_usage, is_continuous=body.shows_continuous_usage)
        self._is_plain = body.logprobs is None and not self._shows_ids and self._ends.fixed is not None
        self._after = b',"logprobs":null,"finish_reason":null}' + (self._ends.fixed or b"")
        self._before: dict[int, bytes] = {}
        self._logprobs: dict[int, _Logprobs] = {}
        self._left_over: dict[int, TextPiece] = {}

    def begin(self, prompt: PromptRun) -> None:
        self._ends.begin(prompt)
        echo = _Echo(self._body, self._pipeline, prompt)
        for choice in prompt.choices:
            self._before[choice.index] = self._start + b'{"index":%d,"text":' % choice.index
            if self._body.logprobs is not None:
                self._logprobs[choice.index] = _answer_logprobs(self._body, self._pipeline, echo)
        if not (echo.text or self._shows_ids):
            return
        make = partial(self._first_events, prompt, echo)
        if _num_shown(self._body, len(prompt.request.prompt_token_ids)) > LARGE_ANSWER_ENTRIES:
            self.late.append(make)
        else:
            self.out.append(make())

    def _first_events(self, prompt: PromptRun, echo: _Echo) -> bytes:
        """What each choice's answer stands behind: the same for all but the choice's number."""
        shown = encode(echo.text) + b',"logprobs":' + encode(echo.lists())
        if self._shows_ids:
            shown += b',"prompt_token_ids":' + encode(list(prompt.request.prompt_token_ids))
        shown += b',"finish_reason":null}'
        return b"".join(
            self._before[choice.index] + shown + self._ends.of(choice) for choice in prompt.choices
        )

    def piece(self, choice: Choice, piece: TextPiece) -> None:
        if not piece.text:
            self._left_over[choice.index] = piece
        elif self._is_plain:
            self.out += (self._before[choice.index], encode(piece.text), self._after)
        else:
            self._event(choice, piece.text, self._details(choice, piece) + b',"finish_reason":null}')

    def end(self, choice: Choice) -> None:
        left_over = self._left_over.pop(choice.index, None)
        details = self._details(choice, left_over) if left_over is not None else b',"logprobs":null'
        self._event(choice, "", details + finish_part(choice.decoder))

    def last(self, usage: TokenUsage) -> None:
        if self._includes_usage:
            self.out.append(usage_event(self._usage_start, usage))

    def _event(self, choice: Choice, text: str, rest: bytes) -> None:
        self.out += (self._before[choice.index], encode(text), rest, self._ends.of(choice))

    def _details(self, choice: Choice, piece: TextPiece) -> bytes:
        logprobs = self._logprobs.get(choice.index)
        shown = encode(logprobs.answer(piece.logprobs)) if logprobs and piece.logprobs else b"null"
        return details_part(shown, piece, shows_ids=self._shows_ids)


class CompletionAnswer:
    """One text completion body."""

    def __init__(
        self, head: Head, body: CompletionBody, pipeline: TextPipeline, prompts: Sequence[PromptRun]
    ) -> None:
        self._head = head
        self._body = body
        self._pipeline = pipeline
        self._prompts = prompts
        self._pieces: dict[int, list[TextPiece]] = {
            choice.index: [] for prompt in prompts for choice in prompt.choices
        }

    def begin(self, prompt: PromptRun) -> None:
        pass

    def piece(self, choice: Choice, piece: TextPiece) -> None:
        self._pieces[choice.index].append(piece)

    def end(self, choice: Choice) -> None:
        pass

    @property
    def is_large(self) -> bool:
        num_tokens = sum(choice.decoder.num_tokens for prompt in self._prompts for choice in prompt.choices)
        num_entries = num_tokens * (1 + (self._body.logprobs or 0))
        num_prompt_tokens = sum(len(prompt.request.prompt_token_ids) for prompt in self._prompts)
        num_entries += _num_shown(self._body, num_prompt_tokens)
        return num_entries > LARGE_ANSWER_ENTRIES

    def body(self, usage: TokenUsage) -> dict[str, Any]:
        body = self._head.fields()
        body["choices"] = [choice for prompt in self._prompts for choice in self._choices(prompt)]
        body["usage"] = usage_fields(usage)
        return body

    def _choices(self, prompt: PromptRun) -> list[dict[str, Any]]:
        echo = _Echo(self._body, self._pipeline, prompt)
        lists = {name: encode(values)[1:-1] for name, values in (echo.lists() or _empty_lists()).items()}
        of_prompt: dict[str, msgspec.Raw] = {}
        if self._body.return_token_ids:
            of_prompt["prompt_token_ids"] = msgspec.Raw(encode(list(prompt.request.prompt_token_ids)))
        if self._body.prompt_logprobs is not None:
            fields = prompt_logprob_fields(self._pipeline, prompt.prompt_logprobs)
            of_prompt["prompt_logprobs"] = msgspec.Raw(encode(fields))
        return [{**self._choice(choice, echo, lists), **of_prompt} for choice in prompt.choices]

    def _choice(self, choice: Choice, echo: _Echo, lists: dict[str, bytes]) -> dict[str, Any]:
        pieces = self._pieces[choice.index]
        logprobs = None
        if self._body.logprobs is not None:
            entries = [entry for piece in pieces for entry in piece.logprobs]
            answer = _answer_logprobs(self._body, self._pipeline, echo).answer(entries)
            logprobs = {name: _joined(lists[name], encode(values)[1:-1]) for name, values in answer.items()}
        shown: dict[str, Any] = {
            "index": choice.index,
            "text": echo.text + "".join(piece.text for piece in pieces),
            "logprobs": logprobs,
            "finish_reason": finish_name(choice.decoder.finish_reason),
            "stop_reason": choice.decoder.stop_reason,
        }
        if self._body.return_token_ids:
            shown["token_ids"] = [token_id for piece in pieces for token_id in piece.token_ids]
        return shown


def _joined(first: bytes, second: bytes) -> msgspec.Raw:
    """One JSON list of the insides of two."""
    return msgspec.Raw(b"[" + first + (b"," if first and second else b"") + second + b"]")
