"""`GET /v1/models` and `/v1/models/{id}`."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from footplate.engine.types import ModelCard
from footplate.platform.admission import authorise, may_use
from footplate.platform.errors import ModelNotFound
from footplate.platform.http.gateway import Gateway
from footplate.platform.models import NO_SUCH_MODEL, find_model
from footplate.platform.routes import usable_targets


async def list_models(gateway: Gateway, request: Request) -> Response:
    """All models that the caller may use, aliases included."""
    principal = await gateway.authenticate(request)
    cards = [card for card in gateway.client.models().values() if may_use(principal, card)]
    data = [_entry(name, card) for card in cards for name in (card.name, *card.aliases)]
    for name, cascade in gateway.cascades.items():
        found = usable_targets(cascade, principal, gateway.client.models())
        if found is not None:
            data.append(_route_entry(name, *found))
    return JSONResponse({"object": "list", "data": data})


async def show_model(gateway: Gateway, request: Request, model_id: str) -> Response:
    """One model by name or alias, or a route."""
    principal = await gateway.authenticate(request)
    if model_id in gateway.cascades:
        found = usable_targets(gateway.cascades[model_id], principal, gateway.client.models())
        if found is None:
            raise ModelNotFound(NO_SUCH_MODEL)
        return JSONResponse(_route_entry(model_id, *found))
    card = find_model(gateway.client.models(), model_id)
    authorise(principal, card)
    return JSONResponse(_entry(model_id, card))


def _route_entry(name: str, small: ModelCard, large: ModelCard) -> dict[str, Any]:
    """A route as a model: what the small one can't take goes to the large one."""
    return {**_entry(name, large), "created": max(small.created, large.created), "root": name}


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
