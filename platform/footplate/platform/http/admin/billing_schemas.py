"""Bodies of the billing endpoints, and the answers that `/openapi.json` tells readers of."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from footplate.platform.http.admin.schemas import Answer
from footplate.platform.http.schemas import Body

_Text = Annotated[str, Field(max_length=256)]
_MAX_MODELS = 10_000
_Decimal = Annotated[str, Field(max_length=64, examples=["0.25"])]


class ModelPriceBody(Body):
    """For a million tokens, as decimal texts."""

    input: _Decimal
    cached_input: _Decimal
    output: _Decimal


class PriceBody(Body):
    """`POST /prices`: a whole price book, from `effective_from` on."""

    max_keys: ClassVar[int] = _MAX_MODELS
    effective_from: Annotated[str, Field(max_length=64, examples=["2026-12-01T00:00:00Z"])]
    currency: Annotated[str, Field(max_length=16, examples=["USD"])]
    models: Annotated[dict[_Text, ModelPriceBody], Field(min_length=1, max_length=_MAX_MODELS)]
    batch_multiplier: _Decimal | None = None


class PricePreviewBody(Body):
    """`POST /prices/preview`: what a book would change, and what a month would have cost by it."""

    max_keys: ClassVar[int] = _MAX_MODELS
    prices: PriceBody
    period: Annotated[str, Field(max_length=16, examples=["2026-11"])] | None = None


class ExportBody(Body):
    """`POST /exports`: one file."""

    from_: Annotated[_Text | None, Field(alias="from")] = None
    to: _Text | None = None
    timezone: _Text | None = None
    format: Literal["csv", "parquet", "jsonl", "xlsx", "focus"] = "csv"
    focus_version: Literal["1.2", "1.4"] = "1.2"
    tenant_id: _Text | None = None
    key_id: _Text | None = None
    model: _Text | None = None


class UsageTotals(Answer):
    requests: int
    input_tokens: int
    cached_input_tokens: int
    output_tokens: int
    total_tokens: int
    cost: str


class UsageAnswer(Answer):
    """Rows hold the groups that were asked for beside the sums."""

    object: Literal["usage_report"]
    from_: Annotated[str, Field(alias="from")]
    to: str
    timezone: str
    currency: str
    group_by: list[str]
    data: list[dict[str, Any]]
    totals: UsageTotals
    unpriced_requests: int
    has_more: bool
    next: str | None


class PriceAnswer(Answer):
    id: str
    object: Literal["price_version"]
    effective_from: str
    currency: str
    models: dict[str, dict[str, str]]
    batch_multiplier: str
    imported_at: str
    imported_by: str
    is_in_force: bool


class PriceChangeAnswer(Answer):
    kind: Literal["added", "removed", "changed"]
    model: str | None
    token_class: str | None
    before: str | None
    after: str | None


class PricePreviewAnswer(Answer):
    """`simulation` is null without a period."""

    object: Literal["price_preview"]
    against: str | None
    changes: list[PriceChangeAnswer]
    simulation: dict[str, Any] | None


class PeriodAnswer(Answer):
    """`totals` are those that a month was closed with."""

    id: str
    object: Literal["period"]
    state: Literal["open", "closed"]
    begins_at: str
    ends_at: str
    timezone: str
    closed_at: str | None
    closed_by: str | None
    totals: dict[str, Any] | None


class ExportAnswer(Answer):
    """`sidecar` stands beside the file: control totals, rows, checksum. It is there once the file is."""

    id: str
    object: Literal["export"]
    state: Literal["queued", "running", "completed", "failed", "expired"]
    from_: Annotated[str, Field(alias="from")]
    to: str
    timezone: str
    format: str
    focus_version: str | None
    filter: dict[str, str]
    created_at: str
    created_by: str
    rows_done: int
    rows_total: int | None
    file_name: str
    sidecar: dict[str, Any] | None
    error: str | None


class ReconciliationAnswer(Answer):
    """`state` is `balanced`, `explained`, or `differs` when something needs somebody."""

    object: Literal["reconciliation"]
    state: Literal["balanced", "explained", "differs"]
    from_: Annotated[str, Field(alias="from")]
    to: str
    timezone: str
    ledger: dict[str, int]
    engines: dict[str, int] | None
    reservations: dict[str, int] | None
    backlog: dict[str, int] | None
    counts: dict[str, int]
    unexplained: list[dict[str, Any]]
    explained: list[dict[str, Any]]
    sources: dict[str, bool]
