"""From a request's body to what the engine is asked for."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from starlette.requests import Request

from footplate.engine.errors import InvalidRequest, RequestTooLarge
from footplate.engine.text.pipeline import TextPipeline
from footplate.engine.types import EngineRequest, ModelCard, SamplingParams
from footplate.platform.admission import Terms
from footplate.platform.http.schemas import GenerationBody
from footplate.platform.ports import Principal

LARGE_TEXT_CHARACTERS = (
    2_000  # from here on texts are tokenised in a thread, at about a microsecond a character
)


def sampling_params(
    body: GenerationBody,
    card: ModelCard,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
    bad_words_ids: tuple[tuple[int, ...], ...] = (),
) -> SamplingParams:
    """The engine's parameters.

    Raises:
        InvalidRequest: a token id is outside the vocabulary, or two parameters contradict each other.
    """
    if body.min_tokens and body.min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens is {body.min_tokens}, above the {max_tokens} tokens allowed.", "min_tokens"
        )
    stop_token_ids = tuple(body.stop_token_ids or ())
    allowed = tuple(body.allowed_token_ids or ())
    _check_ids(stop_token_ids, card.vocab_size, "stop_token_ids")
    _check_ids(allowed, card.vocab_size, "allowed_token_ids")
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=body.min_tokens or 0,
        temperature=_given(body.temperature, 1.0),
        top_p=_given(body.top_p, 1.0),
        # A top-k as wide as the vocabulary cuts nothing off.
        top_k=body.top_k if body.top_k is not None and body.top_k < card.vocab_size else 0,
        min_p=_given(body.min_p, 0.0),
        presence_penalty=_given(body.presence_penalty, 0.0),
        frequency_penalty=_given(body.frequency_penalty, 0.0),
        repetition_penalty=_given(body.repetition_penalty, 1.0),
        logit_bias=_logit_bias(body.logit_bias or {}, card.vocab_size),
        allowed_token_ids=allowed,
        bad_words_ids=bad_words_ids,
        n=body.n or 1,
        seed=body.seed,
        stop_token_ids=stop_token_ids,
        ignore_eos=bool(body.ignore_eos),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        stop=body.stops(),
        skip_special_tokens=body.skip_special_tokens is not False,
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
    )


async def bad_words_ids(pipeline: TextPipeline, words: Sequence[str] | None) -> tuple[tuple[int, ...], ...]:
    """Id sequences of the words that must not be written; empty words mean nothing."""
    given = [word for word in words or () if word]
    if sum(map(len, given)) + 100 * len(given) > LARGE_TEXT_CHARACTERS:
        return await asyncio.to_thread(pipeline.bad_words_ids, given)
    return pipeline.bad_words_ids(given) if given else ()


def allowed_tokens(
    card: ModelCard, terms: Terms, num_prompt_tokens: int, asked: int | None, param: str, num_choices: int = 1
) -> int:
    """How many tokens an answer may have: what was asked, or what context, pool and limits leave.

    Raises:
        RequestTooLarge: prompt and answer don't fit; `param` names the prompt.
    """
    room = min(card.max_model_len, card.kv_tokens)
    limit = "This model's context length" if room == card.max_model_len else "This model's KV cache"
    if terms.max_context_tokens is not None and terms.max_context_tokens < room:
        room, limit = terms.max_context_tokens, "The context length that this key may use"
    wanted = 1 if asked is None else asked
    if num_prompt_tokens + wanted > room:
        raise RequestTooLarge(
            f"{limit} is {room} tokens, but {num_prompt_tokens + wanted} were asked for "
            f"({num_prompt_tokens} in the prompt, {wanted} for the answer). Shorten either.",
            param,
        )
    if asked is not None:
        return asked
    left = room - num_prompt_tokens
    if terms.max_reserved_tokens is not None:
        # All that may be answered is reserved first: more than the whole limit could never be.
        left = min(left, max(1, (terms.max_reserved_tokens - num_prompt_tokens) // num_choices))
    return left


def check_stream_options(body: GenerationBody) -> None:
    """Raises InvalidRequest for options that have no stream to act on."""
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream to be true.", "stream_options")
    options = body.stream_options
    if options is not None and options.include_obfuscation:
        raise InvalidRequest(
            "Obfuscation is not supported; leave it out.", "stream_options.include_obfuscation"
        )
    if options is not None and options.continuous_usage_stats and not options.include_usage:
        raise InvalidRequest(
            "continuous_usage_stats needs include_usage to be true.",
            "stream_options.continuous_usage_stats",
        )
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs can't be streamed.", "prompt_logprobs")


def cache_scope(principal: Principal, cache_salt: str | None) -> bytes:
    """The scope of cached blocks: the tenant's own, or with a salt a part of it, never anything outside."""
    if cache_salt is None:
        return principal.cache_scope
    key = hashlib.blake2b(principal.cache_scope, digest_size=32).digest()
    return hashlib.blake2b(cache_salt.encode("utf-8", "surrogatepass"), key=key, digest_size=16).digest()


def engine_request_id(request: Request, number: int) -> str:
    """What the engines know a prompt by: their journals are joined with the ledger by what it begins with."""
    return f"{request.scope['footplate.request_id']}-{number}"


def engine_request(
    request_id: str,
    ids: Sequence[int],
    params: SamplingParams,
    body: GenerationBody,
    principal: Principal,
    terms: Terms,
) -> EngineRequest:
    """One prompt as the engine is asked for it, in the name of the caller's tenant.

    A client's own priority can only put it behind the class that its tenant has.
    """
    return EngineRequest(
        request_id,
        ids,
        params,
        cache_scope=cache_scope(principal, body.cache_salt),
        tenant=principal.tenant_id,
        weight=terms.weight,
        priority=terms.priority + (body.priority or 0),
        session=session_key(principal, body.prompt_cache_key),
    )


def session_key(principal: Principal, prompt_cache_key: str | None) -> bytes:
    """What keeps requests with one `prompt_cache_key` on one replica: of this tenant, and of no other."""
    if prompt_cache_key is None:
        return b""
    key = hashlib.blake2b(principal.cache_scope, digest_size=32).digest()
    named = prompt_cache_key.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(named, key=key, digest_size=16, person=b"session").digest()


def _given(value: float | None, default: float) -> float:
    return default if value is None else float(value)


def _logit_bias(given: Mapping[str, float], vocab_size: int) -> Mapping[int, float]:
    biases: dict[int, float] = {}
    for text, bias in given.items():
        # At most ten digits: int() of a long text takes quadratic time.
        if not (text.isascii() and text.isdigit() and len(text) <= 10 and int(text) < vocab_size):
            raise InvalidRequest(
                f"A key of logit_bias is no token id; ids go from 0 to {vocab_size - 1}.", "logit_bias"
            )
        biases[int(text)] = float(bias)
    return MappingProxyType(biases) if not biases else biases


def _check_ids(ids: tuple[int, ...], vocab_size: int, param: str) -> None:
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        raise InvalidRequest(f"{param} holds an id outside 0 to {vocab_size - 1}.", param)
