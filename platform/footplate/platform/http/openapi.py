"""Schemas for `/openapi.json`."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel


def inlined_schema(body: type[BaseModel]) -> dict[str, Any]:
    """A model's schema with its definitions in place: OpenAPI looks for references elsewhere."""
    schema = body.model_json_schema()
    definitions = schema.pop("$defs", {})

    def inlined(value: Any) -> Any:
        if isinstance(value, dict):
            reference = value.get("$ref")
            if reference is not None:
                return inlined(definitions[reference.rsplit("/", 1)[1]])
            return {key: inlined(inner) for key, inner in value.items()}
        return [inlined(inner) for inner in value] if isinstance(value, list) else value

    result: dict[str, Any] = inlined(schema)
    return result
