"""`GET /v1/models` and `/v1/models/{id}`."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from footplate.engine.types import ModelCard
from footplate.platform.admission import authorise, may_use
from footplate.platform.http.gateway import Gateway
from footplate.platform.models import find_model


async def list_models(gateway: Gateway, request: Request) -> Response:
    """All models that the caller may use, aliases included."""
    principal = await gateway.authenticate(request)
    cards = [card for card in gateway.client.models().values() if may_use(principal, card)]
    data = [_entry(name, card) for card in cards for name in (card.name, *card.aliases)]
    return JSONResponse({"object": "list", "data": data})


async def show_model(gateway: Gateway, request: Request, model_id: str) -> Response:
    """One model by name or alias."""
    principal = await gateway.authenticate(request)
    card = find_model(gateway.client.models(), model_id)
    authorise(principal, card)
    return JSONResponse(_entry(model_id, card))


def _entry(name: str, card: ModelCard) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": card.created,
        "owned_by": "footplate",
        "root": card.name,
        "parent": None,
        "max_model_len": card.max_model_len,
    }
