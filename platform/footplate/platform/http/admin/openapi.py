"""What `/openapi.json` says of the admin API: parameters, bodies, answers, and every error."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from footplate.platform.http.admin.exchange import AdminRoute
from footplate.platform.http.admin.schemas import ErrorAnswer
from footplate.platform.http.openapi import inlined_schema

_ERRORS = {
    400: "A value or parameter can't be so: `invalid_value`, `unsupported_parameter`, `invalid_json`, "
    "`missing_required_parameter`.",
    401: "No key, or not a live one: `invalid_api_key`.",
    403: "The key's role may not do this: `permission_denied`.",
    404: "No such thing, or another tenant's: `not_found`.",
    408: "The body did not arrive in time: `request_timeout`.",
    409: "It does not fit what is there: `name_taken`, `conflict`, `idempotency_key_reused`, "
    "`price_in_force`, `period_closed`, `period_not_closable`.",
    413: "The body is too large: `request_too_large`.",
    415: "The body is compressed: `unsupported_media_type`.",
    500: "The server failed: `server_error`.",
    503: "The database can't be asked now; try again: `server_is_overloaded`.",
}
_PARAMETERS: dict[str, dict[str, Any]] = {
    "limit": {"type": "integer", "minimum": 1, "maximum": 1000, "default": 100},
    "after": {"type": "string", "description": "The `next` of the page before."},
    "order": {"type": "string", "enum": ["asc", "desc"], "default": "asc"},
    "name": {"type": "string"},
    "tenant_id": {"type": "string"},
    "target_id": {"type": "string"},
    "key_id": {"type": "string"},
    "model": {"type": "string"},
    "from": {"type": "string", "description": "A date in the time zone, or an RFC 3339 time; included."},
    "to": {"type": "string", "description": "A date in the time zone, or an RFC 3339 time; not included."},
    "timezone": {
        "type": "string",
        "description": "Of the IANA database; if left out that of the one tenant that is asked for, "
        "else the billing time zone.",
    },
    "group_by": {
        "type": "string",
        "description": "A list with commas of tenant, key, model, requested_model, class, day, hour, "
        "cost_center, label:NAME.",
    },
}
_IDEMPOTENCY_KEY = {
    "name": "Idempotency-Key",
    "in": "header",
    "schema": {"type": "string", "minLength": 1, "maxLength": 255},
    "description": "A repeated request with the same key and body within 24 h is answered as the first time "
    "and changes nothing; a new key's text is then null.",
}


def describe(route: AdminRoute) -> dict[str, Any]:
    """The operation's parameters, body and answers."""
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in (
            "tenant_id",
            "key_id",
            "price_id",
            "period_id",
            "export_id",
            "route_name",
            "model_name",
            "capture_id",
        )
        if f"{{{name}" in route.path
    ]
    parameters += [{"name": name, "in": "query", "schema": _PARAMETERS[name]} for name in route.parameters]
    if route.is_change:
        parameters.append(_IDEMPOTENCY_KEY)
    found: dict[str, Any] = {"parameters": parameters, "responses": _responses(route), "tags": ["admin"]}
    if route.body is not None:
        required = any(info.is_required() for info in route.body.model_fields.values())
        found["requestBody"] = {"required": required, "content": _json(inlined_schema(route.body))}
    return found


def _responses(route: AdminRoute) -> dict[str, Any]:
    schema = inlined_schema(route.answer)
    if route.media_types:
        text = {"schema": {"type": "string", "format": "binary"}}
        content = dict.fromkeys(route.media_types, text)
        return {"200": {"description": "The file.", "content": content}, **described_errors(_statuses(route))}
    if route.is_list:
        schema = {
            "type": "object",
            "required": ["object", "data", "has_more", "next"],
            "properties": {
                "object": {"const": "list"},
                "data": {"type": "array", "items": schema},
                "has_more": {"type": "boolean"},
                "next": {"type": ["string", "null"], "description": "The `after` of the next page."},
            },
        }
    return {"200": {"description": "Done.", "content": _json(schema)}, **described_errors(_statuses(route))}


def described_errors(statuses: Iterable[int]) -> dict[str, Any]:
    """The errors of an operation, all in the one shape."""
    content = _json(inlined_schema(ErrorAnswer))
    return {str(status): {"description": _ERRORS[status], "content": content} for status in statuses}


def _statuses(route: AdminRoute) -> list[int]:
    found = {400, 401, 403, 500, 503}
    if "{" in route.path:
        found.add(404)
    if route.body is not None:
        found |= {408, 413, 415}
    if route.is_change:
        found.add(409)
    return sorted(found)


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
