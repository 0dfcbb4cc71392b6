"""`POST /v1/tokenize` and `/v1/detokenize`: no model works, and what a prompt may not be no text may be."""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response

from footplate.engine.errors import InvalidRequest, RequestTooLarge
from footplate.engine.text.pipeline import TextPipeline
from footplate.engine.types import ModelCard
from footplate.platform.http.chat import is_large_chat, refuse_absurd, render
from footplate.platform.http.frames import encode
from footplate.platform.http.gateway import Gateway
from footplate.platform.http.parameters import LARGE_TEXT_CHARACTERS
from footplate.platform.http.schemas import DetokenizeBody, TokenizeBody, parse_body, plain_messages
from footplate.platform.ports import Principal


async def tokenize(gateway: Gateway, request: Request) -> Response:
    """Ids of a prompt or of a conversation, as the engine would see them."""
    principal = await _caller(gateway, request)
    body = parse_body(TokenizeBody, await request.body())
    _check(body)
    card, pipeline = await gateway.model(request, principal, body.model)
    if body.messages is not None:
        plain = plain_messages(body.messages)
        is_large = is_large_chat(plain)

        def ids() -> list[int]:
            rendered = render(pipeline, card, plain, body.add_generation_prompt is not False)
            return pipeline.encode_rendered_chat(rendered)
    else:
        text = body.prompt or ""
        is_large = len(text) > LARGE_TEXT_CHARACTERS

        def ids() -> list[int]:
            refuse_absurd(pipeline, card, text, "prompt")
            return pipeline.encode(text, body.add_special_tokens is not False)

    return await _answer(gateway, principal, is_large, lambda: _counted(ids(), card, pipeline, body))


def _check(body: TokenizeBody) -> None:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("Give either prompt or messages.", "prompt")
    if body.messages is not None and body.add_special_tokens is not None:
        raise InvalidRequest("The chat template decides about special tokens here.", "add_special_tokens")
    if body.messages is None and body.add_generation_prompt is not None:
        raise InvalidRequest("add_generation_prompt needs messages.", "add_generation_prompt")


def _counted(ids: list[int], card: ModelCard, pipeline: TextPipeline, body: TokenizeBody) -> bytes:
    texts = [pipeline.token_text(token_id) for token_id in ids] if body.return_token_strs else None
    return encode(
        {"count": len(ids), "max_model_len": card.max_model_len, "tokens": ids, "token_strs": texts}
    )


async def detokenize(gateway: Gateway, request: Request) -> Response:
    """The text of ids, control tokens included unless they are to be left out."""
    principal = await _caller(gateway, request)
    body = parse_body(DetokenizeBody, await request.body())
    card, pipeline = await gateway.model(request, principal, body.model)
    tokens = body.tokens
    if len(tokens) > card.max_model_len:
        raise RequestTooLarge(
            f"This model's context length is {card.max_model_len} tokens; these are {len(tokens)}.", "tokens"
        )
    if tokens and not (min(tokens) >= 0 and max(tokens) < card.vocab_size):
        raise InvalidRequest(f"tokens holds an id outside 0 to {card.vocab_size - 1}.", "tokens")

    def work() -> bytes:
        return encode({"prompt": pipeline.decode(tokens, bool(body.skip_special_tokens))})

    return await _answer(gateway, principal, len(tokens) > LARGE_TEXT_CHARACTERS, work)


async def _caller(gateway: Gateway, request: Request) -> Principal:
    """Who asks. Raises LimitRefused for whoever may use nothing at all."""
    principal = await gateway.authenticate(request)
    gateway.admission.refuse_at_once(principal)
    return principal


async def _answer(
    gateway: Gateway, principal: Principal, is_large: bool, work: Callable[[], bytes]
) -> Response:
    # Not in the threads in which prompts of requests for models are tokenised.
    data = await gateway.tokens.run(principal.tenant_id, work) if is_large else work()
    return Response(data, media_type="application/json")
