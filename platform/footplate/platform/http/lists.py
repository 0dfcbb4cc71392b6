"""Pages of `/v1/files` and `/v1/batches`, as the OpenAI API has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request

from footplate.engine.errors import InvalidRequest
from footplate.platform.batches.store import ListPage
from footplate.platform.errors import UnsupportedParameter

MAX_ID = 128


def read_page(request: Request, *, default: int, most: int, others: frozenset[str] = frozenset()) -> ListPage:
    """The page that a query asks for. Raises InvalidRequest and UnsupportedParameter."""
    given = request.query_params
    for name in given:
        if name not in {"limit", "after", *others}:
            shown = name if name.isidentifier() and len(name) <= 40 else "query"
            raise UnsupportedParameter("This parameter is not known, or not supported here.", shown)
        if len(given.getlist(name)) > 1:
            raise InvalidRequest(f"{name} is given twice; only one can be meant.", name)
    limit, order = given.get("limit", str(default)), given.get("order", "desc")
    if not (limit.isascii() and limit.isdecimal() and len(limit) <= 6 and 1 <= int(limit) <= most):
        raise InvalidRequest(f"limit must be a whole number from 1 to {most}.", "limit")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order must be asc or desc.", "order")
    after = given.get("after")
    if after is not None and not is_id(after):
        raise InvalidRequest("after must be an id of this list.", "after")
    return ListPage(int(limit), after, order == "asc")


def is_id(text: str) -> bool:
    """Whether a text can be an id at all: others are looked for nowhere."""
    return 1 <= len(text) <= MAX_ID and text.isascii() and text.isprintable()


def shown_list(data: list[dict[str, Any]], has_more: bool) -> Mapping[str, Any]:
    """A page as it goes out."""
    return {
        "object": "list",
        "data": data,
        "has_more": has_more,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
    }
