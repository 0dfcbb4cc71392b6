"""What stands beside an exported file, so that anybody can check that the file is whole and adds up. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from footplate.billing.exports.columns import columns_of
from footplate.billing.exports.request import ExportRequest
from footplate.billing.periods import ClosedPeriod, Period
from footplate.billing.prices import PriceVersion
from footplate.billing.reports import UsageSums


@dataclass(frozen=True, slots=True)
class ExportTotals:
    """What the rows of a file sum to, and what is left out of it for want of a price."""

    num_rows: int
    sums: UsageSums
    left_out: UsageSums


def sidecar_fields(
    request: ExportRequest,
    totals: ExportTotals,
    *,
    sha256: str,
    num_bytes: int,
    currency: str,
    versions: Sequence[PriceVersion],
    periods: Sequence[tuple[Period, ClosedPeriod | None]],
) -> dict[str, Any]:
    """As JSON. It holds no time of its making: that of a closed month is the same for ever."""
    return {
        "schema": request.schema,
        "format": request.format.value,
        **request.span.fields(),
        "filter": request.filter.fields(),
        "currency": currency,
        "rows": totals.num_rows,
        "bytes": num_bytes,
        "sha256": sha256,
        "control_totals": totals.sums.fields(),
        "left_out_for_want_of_a_price": totals.left_out.fields(),
        "price_versions": [
            {
                "id": str(version.id),
                "effective_from": version.effective_from.isoformat().replace("+00:00", "Z"),
            }
            for version in versions
        ],
        "periods": [
            {
                "id": period.id,
                "state": "open" if closed is None else "closed",
                "closed_at": None if closed is None else closed.closed_at.isoformat().replace("+00:00", "Z"),
            }
            for period, closed in periods
        ],
        "columns": [column.name for column in columns_of(request)],
    }
