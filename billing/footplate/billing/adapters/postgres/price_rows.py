"""Price versions as rows, there and back."""

from __future__ import annotations

from datetime import UTC
from fractions import Fraction

from footplate.billing.adapters.postgres.bulk import Driver
from footplate.billing.adapters.postgres.tables import SCHEMA
from footplate.billing.prices import ModelPrices, PriceBook, PriceList, PriceVersion, PriceVersionId
from footplate.billing.usage import ModelName

_VERSIONS = f"""
select id, effective_from, currency, multiplier_numerator, multiplier_denominator, imported_at, imported_by
from {SCHEMA}.price_versions order by id
"""
_PRICES = f"select version_id, model, input, cached_input, output from {SCHEMA}.model_prices"


def read_book(driver: Driver) -> PriceBook:
    """All versions. Both queries must see one state: nobody may import between them."""
    models: dict[int, dict[ModelName, ModelPrices]] = {}
    for version_id, model, *prices in driver.execute(_PRICES):
        models.setdefault(version_id, {})[ModelName(model)] = ModelPrices(*prices)
    versions = []
    for number, begins, currency, up, down, imported_at, imported_by in driver.execute(_VERSIONS):
        prices = PriceList(begins.astimezone(UTC), currency, models[number], Fraction(up, down))
        versions.append(
            PriceVersion(PriceVersionId(number), prices, imported_at.astimezone(UTC), imported_by)
        )
    return PriceBook(versions)
