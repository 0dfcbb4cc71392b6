"""Endpoints of `/admin/v1` for routes: what they do, what they saved, and what one would decide."""

from __future__ import annotations

from typing import Any, Literal

from starlette.responses import JSONResponse, Response

from footplate.billing.errors import NotFound
from footplate.billing.money import decimal_text
from footplate.billing.route_savings import RouteSaving, saving_of
from footplate.billing.time_ranges import parse_range
from footplate.billing.usage import ModelName
from footplate.engine.errors import InvalidRequest
from footplate.platform.http.admin.exchange import (
    PAGE_PARAMETERS,
    PREFIX,
    AdminExchange,
    AdminRoute,
    listed_by_name,
)
from footplate.platform.http.admin.schemas import Answer
from footplate.platform.http.routed import message_texts, prompt_texts
from footplate.platform.http.schemas import Body, ChatMessage
from footplate.routing.cascade import Cascade, Policy, Target, decide
from footplate.routing.prompt_facts import MAX_TAGS, PromptFacts, prompt_facts, tags_in
from footplate.tenancy.access import Action
from footplate.tenancy.tenants import refuse_keys

RANGE = ("from", "to", "timezone")


class ExplainBody(Body):
    """`POST /routes/{name}/explain`: a conversation or a prompt. Nothing of it is kept or said again."""

    messages: list[ChatMessage] | None = None
    prompt: str | list[str] | None = None
    # As in a request, of which a body can be pasted so; `model` says nothing that the address does not.
    model: str | None = None
    metadata: dict[str, str] | None = None
    has_tools: bool | None = None
    tags: list[str] | None = None


class RouteSavingAnswer(Answer):
    """Decimal texts, in the billing currency; `saved` is net of `attempts`."""

    currency: str
    billed: str
    at_large: str
    attempts: str
    saved: str
    requests_without_price: int


class RouteAnswer(Answer):
    """`id` is the name that clients send as the model. The rest is of the range, null without books."""

    id: str
    object: Literal["route"]
    policy: Policy
    small: str
    large: str
    threshold: float
    after_tokens: int | None
    requests: int | None
    requests_by_model: dict[str, int] | None
    escalated_share: float | None
    attempts_left: int | None
    saving: RouteSavingAnswer | None


class RouteExplanation(Answer):
    """What the route would do. `model` is null while the small model's own answer is to decide."""

    object: Literal["route.explanation"]
    route: str
    policy: Policy
    target: Target
    model: str | None
    reason: str
    score: float | None
    threshold: float
    after_tokens: int | None
    language: str
    features: dict[str, float]
    # Of the classifier's sum, by feature; empty for other policies.
    contributions: dict[str, float]


async def list_routes(exchange: AdminExchange) -> Response:
    """Every route, who answered in a range (this month), and what that saved net of what was thrown away."""
    cascades, page = exchange.gateway.cascades, exchange.page()
    given = {name: value for name in RANGE if (value := exchange.query(name)) is not None}
    refuse_keys(given)
    billing = exchange.desk.billing
    if billing is None or billing.routes is None:
        return listed_by_name([_route_fields(cascade, None, None) for cascade in cascades.values()], page)
    zone = given.get("timezone") or billing.calendar.timezone
    span = parse_range(given.get("from"), given.get("to"), zone, billing.now())
    reader = billing.routes
    usage = await billing.ask(lambda: reader.usage(span, list(cascades)))
    book = await billing.ask(billing.prices.book)
    return listed_by_name(
        [
            _route_fields(cascade, saving_of(name, ModelName(cascade.large), usage, book), billing.currency)
            for name, cascade in cascades.items()
        ],
        page,
    )


async def explain_route(exchange: AdminExchange) -> Response:
    """What a route would decide for a prompt, by numbers alone. No model is asked and nothing is billed."""
    cascade = exchange.gateway.cascades.get(str(exchange.request.path_params["route_name"]))
    if cascade is None:
        raise NotFound("there is no such route; GET /admin/v1/routes lists them")
    body = exchange.body
    assert isinstance(body, ExplainBody)
    facts = _facts(body)
    decision = decide(cascade, facts)
    models = {Target.SMALL: cascade.small, Target.LARGE: cascade.large, Target.SMALL_FIRST: None}
    weights = cascade.classifier
    return JSONResponse(
        {
            "object": "route.explanation",
            "route": cascade.name,
            "policy": cascade.policy.value,
            "target": decision.target.value,
            "model": models[decision.target],
            "reason": decision.reason.value,
            "score": None if decision.score is None else round(decision.score, 6),
            "threshold": cascade.threshold,
            "after_tokens": _after_tokens(cascade),
            "language": facts.language,
            "features": {name: round(value, 6) for name, value in facts.numbers().items()},
            "contributions": {}
            if weights is None
            else {name: round(value, 6) for name, value in weights.contributions(facts).items()},
        }
    )


def route_routes() -> tuple[AdminRoute, ...]:
    """The table of these endpoints."""
    every, action = f"{PREFIX}/routes", Action.READ_MODELS
    return (
        AdminRoute(
            "GET",
            every,
            Action.READ_ROUTES,
            list_routes,
            RouteAnswer,
            None,
            (*PAGE_PARAMETERS, *RANGE),
            is_list=True,
        ),
        # A route's name may hold slashes, as a model's.
        AdminRoute(
            "POST",
            f"{every}/{{route_name:path}}/explain",
            action,
            explain_route,
            RouteExplanation,
            ExplainBody,
            is_question=True,
        ),
    )


def _facts(body: ExplainBody) -> PromptFacts:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("Give either prompt or messages.", "prompt")
    if len(body.tags or ()) > MAX_TAGS:
        raise InvalidRequest(f"At most {MAX_TAGS} tags are looked at.", "tags")
    texts = message_texts(body.messages) if body.messages is not None else prompt_texts(body.prompt or "")
    given = tags_in((body.metadata or {}).get("tags", ""))
    tags = given.union(*(tags_in(tag) for tag in body.tags or ()))
    return prompt_facts(texts, has_tools=bool(body.has_tools), tags=tags)


def _after_tokens(cascade: Cascade) -> int | None:
    return cascade.after_tokens if cascade.policy is Policy.CONFIDENCE else None


def _route_fields(cascade: Cascade, found: RouteSaving | None, currency: str | None) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "id": cascade.name,
        "object": "route",
        "policy": cascade.policy.value,
        "small": cascade.small,
        "large": cascade.large,
        "threshold": cascade.threshold,
        "after_tokens": _after_tokens(cascade),
    }
    if found is None:
        names = ("requests", "requests_by_model", "escalated_share", "attempts_left", "saving")
        return shown | dict.fromkeys(names)
    at_large = found.by_model.get(cascade.large, 0)
    return shown | {
        "requests": found.requests,
        "requests_by_model": dict(sorted(found.by_model.items())),
        "escalated_share": round(at_large / found.requests, 6) if found.requests else None,
        "attempts_left": found.attempts_left,
        "saving": {
            "currency": currency,
            "billed": decimal_text(found.billed),
            "at_large": decimal_text(found.at_large),
            "attempts": decimal_text(found.attempts_cost),
            "saved": decimal_text(found.saved),
            "requests_without_price": found.unpriced,
        },
    }
