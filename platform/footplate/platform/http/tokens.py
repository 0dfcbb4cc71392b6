"""`POST /v1/tokenize` and `/v1/detokenize`."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from footplate.engine.errors import InvalidRequest
from footplate.engine.text.pipeline import TextPipeline
from footplate.engine.types import ModelCard
from footplate.platform.http.chat import encode_messages
from footplate.platform.http.frames import encode
from footplate.platform.http.gateway import Gateway
from footplate.platform.http.parameters import LARGE_TEXT_CHARACTERS
from footplate.platform.http.schemas import DetokenizeBody, TokenizeBody, parse_body


async def tokenize(gateway: Gateway, request: Request) -> Response:
    """Ids of a prompt or of a conversation, as the engine would see them."""
    principal = await gateway.authenticate(request)
    body = parse_body(TokenizeBody, await request.body())
    _check(body)
    card, pipeline = await gateway.model(request, principal, body.model)
    if body.messages is not None:
        ids = await encode_messages(pipeline, card, body.messages, body.add_generation_prompt is not False)
        return _json(_counted(ids, card, pipeline, body))
    text = body.prompt or ""

    def work() -> bytes:
        ids = pipeline.encode(text, body.add_special_tokens is not False)
        return _counted(ids, card, pipeline, body)

    return _json(await asyncio.to_thread(work) if len(text) > LARGE_TEXT_CHARACTERS else work())


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
    principal = await gateway.authenticate(request)
    body = parse_body(DetokenizeBody, await request.body())
    card, pipeline = await gateway.model(request, principal, body.model)
    if body.tokens and not (min(body.tokens) >= 0 and max(body.tokens) < card.vocab_size):
        raise InvalidRequest(f"tokens holds an id outside 0 to {card.vocab_size - 1}.", "tokens")

    def work() -> bytes:
        return encode({"prompt": pipeline.decode(body.tokens, bool(body.skip_special_tokens))})

    return _json(await asyncio.to_thread(work) if len(body.tokens) > LARGE_TEXT_CHARACTERS else work())


def _json(data: bytes) -> Response:
    return Response(data, media_type="application/json")
