"""`POST /v1/tokenize` and `/v1/detokenize`."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from footplate.engine.errors import InvalidRequest
from footplate.platform.http.chat import LARGE_TEXT_CHARACTERS, encode_messages
from footplate.platform.http.gateway import Gateway
from footplate.platform.http.schemas import DetokenizeBody, TokenizeBody, parse_body


async def tokenize(gateway: Gateway, request: Request) -> Response:
    """Ids of a prompt or of a conversation, as the engine would see them."""
    await gateway.authenticate(request)
    body = parse_body(TokenizeBody, await request.body())
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("Give either prompt or messages.", "prompt")
    card, pipeline = await gateway.model(body.model)
    if body.messages is not None:
        if body.add_special_tokens is not None:
            raise InvalidRequest("The chat template decides about special tokens here.", "add_special_tokens")
        ids = await encode_messages(pipeline, card, body.messages, body.add_generation_prompt is not False)
    else:
        if body.add_generation_prompt is not None:
            raise InvalidRequest("add_generation_prompt needs messages.", "add_generation_prompt")
        text = body.prompt or ""
        arguments = (text, body.add_special_tokens is not False)
        is_large = len(text) > LARGE_TEXT_CHARACTERS
        ids = (
            await asyncio.to_thread(pipeline.encode, *arguments) if is_large else pipeline.encode(*arguments)
        )
    shown: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": card.max_model_len,
        "tokens": ids,
        "token_strs": [pipeline.token_text(token_id) for token_id in ids] if body.return_token_strs else None,
    }
    return JSONResponse(shown)


async def detokenize(gateway: Gateway, request: Request) -> Response:
    """The text of ids, control tokens included unless they are to be left out."""
    await gateway.authenticate(request)
    body = parse_body(DetokenizeBody, await request.body())
    card, pipeline = await gateway.model(body.model)
    if body.tokens and not (min(body.tokens) >= 0 and max(body.tokens) < card.vocab_size):
        raise InvalidRequest(f"tokens holds an id outside 0 to {card.vocab_size - 1}.", "tokens")
    text = pipeline.decode(body.tokens, skip_special_tokens=bool(body.skip_special_tokens))
    return JSONResponse({"prompt": text})
