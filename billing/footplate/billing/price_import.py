"""Price lists from files and from the API's JSON. Pure: text in, a `PriceList` out.

The YAML form is the API's: prices are decimal texts for a million tokens, best in quotes.

    effective_from: 2026-12-01T00:00:00Z
    currency: USD
    batch_multiplier: "0.5"
    models:
      smollm2-135m: {input: "0.02", cached_input: "0.002", output: "0.08"}

CSV has one row for each model, and the other fields as options of the import:

    model,input,cached_input,output
    smollm2-135m,0.02,0.002,0.08
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from datetime import UTC, datetime
from fractions import Fraction
from typing import Any

import yaml

from footplate.billing.errors import InvalidPrice
from footplate.billing.prices import ModelPrices, PriceList, parse_multiplier, parse_price
from footplate.billing.usage import ModelName, TokenClass

_FIELDS = ("effective_from", "currency", "models", "batch_multiplier")
_CLASSES = tuple(token_class.value for token_class in TokenClass)
MAX_FILE_CHARS = 8_000_000


class _TextLoader(yaml.BaseLoader):
    """Scalars stay text: a float would already have lost what was written. No name may stand twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value]
        if len(names) != len(set(map(str, names))):
            raise yaml.MarkedYAMLError(problem="a name stands twice", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep)


def from_fields(fields: object) -> PriceList:
    """A list from the API's JSON form.

    Raises:
        InvalidPrice: a field is missing, unknown, or can't be as given; names it.
    """
    if not isinstance(fields, Mapping):
        raise InvalidPrice("a price book is an object with effective_from, currency and models", "")
    unknown = sorted(str(name) for name in fields.keys() - set(_FIELDS))
    if unknown:
        raise InvalidPrice(
            f"there is no field {unknown[0][:60]!r}; there are {', '.join(_FIELDS)}", unknown[0]
        )
    for name in _FIELDS[:3]:
        if fields.get(name) is None:
            raise InvalidPrice(f"{name} is missing", name)
    models = fields["models"]
    if not isinstance(models, Mapping):
        raise InvalidPrice("models is an object from names of models to their prices", "models")
    multiplier = fields.get("batch_multiplier")
    return PriceList(
        parse_time(fields["effective_from"]),
        _text(fields["currency"], "currency"),
        {ModelName(_text(name, "models")): _model(name, prices) for name, prices in models.items()},
        Fraction(1) if multiplier is None else parse_multiplier(_number(multiplier, "batch_multiplier")),
    )


def from_yaml(text: str) -> PriceList:
    """A list from YAML or JSON text. Raises InvalidPrice."""
    _check_length(text)
    try:
        fields = yaml.load(text, Loader=_TextLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f" in line {mark.line + 1}"
        problem = getattr(error, "problem", None) or "it can't be read"
        raise InvalidPrice(f"the file is not as it must be{where}: {problem}", "") from error
    except RecursionError:
        raise InvalidPrice("the file nests deeper than a price book does", "") from None
    return from_fields(fields)


def from_csv(
    text: str, *, effective_from: str | datetime, currency: str, batch_multiplier: str = "1"
) -> PriceList:
    """A list from CSV text with the columns model, input, cached_input and output, in any order.

    Raises:
        InvalidPrice: a column is missing or unknown, a model stands there twice, or a price can't be.
    """
    _check_length(text)
    reader = csv.DictReader(io.StringIO(text.removeprefix("\ufeff")), strict=True, restkey="")
    models: dict[str, dict[str, str]] = {}
    try:
        columns = [name.strip() for name in reader.fieldnames or ()]
        if sorted(columns) != sorted(("model", *_CLASSES)):
            raise InvalidPrice(f"the columns are model, {', '.join(_CLASSES)}; the file has others", "models")
        reader.fieldnames = columns
        for row in reader:
            if None in row.values() or "" in row:
                raise InvalidPrice(f"line {reader.line_num} has not one value for each column", "models")
            values = {name: value.strip() for name, value in row.items()}
            model = values.pop("model")
            if model in models:
                raise InvalidPrice(
                    f"model {model[:60]!r} is there twice, again in line {reader.line_num}", "models"
                )
            models[model] = values
    except csv.Error as error:
        raise InvalidPrice(f"the file is no CSV: there is a fault in line {reader.line_num}", "") from error
    return from_fields(
        {
            "effective_from": effective_from,
            "currency": currency,
            "models": models,
            "batch_multiplier": batch_multiplier,
        }
    )


def parse_time(value: object) -> datetime:
    """An RFC 3339 time with its offset, as UTC. Raises InvalidPrice."""
    message = "effective_from is a time with its offset, such as 2026-12-01T00:00:00Z"
    try:
        at = value if isinstance(value, datetime) else datetime.fromisoformat(_text(value, "effective_from"))
        if at.tzinfo is None:
            raise InvalidPrice(message, "effective_from")
        return at.astimezone(UTC)
    except (ValueError, OverflowError) as error:
        raise InvalidPrice(message, "effective_from") from error


def _model(name: object, prices: Any) -> ModelPrices:
    field = f"models.{name}"
    if not isinstance(prices, Mapping) or set(prices) != set(_CLASSES):
        raise InvalidPrice(f"a model has exactly the prices {', '.join(_CLASSES)}", field)
    return ModelPrices(
        **{
            each: parse_price(_number(prices[each], f"{field}.{each}"), f"{field}.{each}")
            for each in _CLASSES
        }
    )


def _number(value: object, field: str) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, float):
        raise InvalidPrice("write the number as text, in quotes: floats are not exact", field)
    return _text(value, field)


def _text(value: object, field: str) -> str:
    if not isinstance(value, str):
        raise InvalidPrice(f"{field} is a text, not {type(value).__name__}", field)
    return value


def _check_length(text: str) -> None:
    if len(text) > MAX_FILE_CHARS:
        raise InvalidPrice(f"the file has {len(text)} characters; at most {MAX_FILE_CHARS} are read", "")
