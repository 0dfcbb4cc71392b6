"""What stands in each column of an export: what a group of rows has in common, or what differs in it. Pure.

Most of a row is the same for every request of one key, model and price. So that is made into a template
once, and a row is that template with a few values put in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from operator import itemgetter

from footplate.billing.exports.cells import LineForm, decimal_12
from footplate.billing.exports.columns import PROVIDER, SERVICE, Column
from footplate.billing.usage import TokenClass

METERS = {
    TokenClass.INPUT: "Input tokens",
    TokenClass.CACHED_INPUT: "Cached input tokens",
    TokenClass.OUTPUT: "Output tokens",
}


class Varying(IntEnum):
    """What differs from row to row; its number is its place among a row's values."""

    EVENT_ID = 0
    PART = 1
    KIND = 2
    COUNTED_AT = 3
    DAY = 4
    STARTED_AT = 5
    ENDED_AT = 6
    ENDPOINT = 7
    BATCH_ID = 8
    STATE = 9
    IS_ESTIMATED = 10
    CHARGE_BEGIN = 11
    CHARGE_END = 12
    CHARGE_CLASS = 13
    REQUESTS = 14
    QUANTITY = 15
    COST = 16
    LIST_COST = 17
    DISCOUNT = 18


@dataclass(frozen=True, slots=True)
class Dimension:
    """Whom usage belongs to, with its texts as the file shows them; `price_model` is the model's own name."""

    tenant_id: str
    key_id: str
    cost_center: str
    requested_model: str
    model: str
    labels: str
    is_batch: bool
    price_model: str


@dataclass(frozen=True, slots=True)
class Frame:
    """What all rows of a part of one month have in common."""

    currency: str
    # As the file shows them.
    period_begin: str
    period_end: str
    # In front of the tenant's id; None while the month is open.
    invoice: str | None


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows that differ only in `Varying` things. `unit_price` is in pico; None: there is no price."""

    frame: Frame
    dimension: Dimension
    token_class: TokenClass
    price_version: int
    unit_price: int | None

    @property
    def sku(self) -> str:
        """A class of tokens of a model, in batches or not."""
        batch = "/batch" if self.dimension.is_batch else ""
        return f"{self.dimension.model}/{self.token_class.value}{batch}"

    @property
    def unit(self) -> str | None:
        """The price of one token."""
        return None if self.unit_price is None else decimal_12(str(self.unit_price))


Cell = str | Varying | None
Source = Cell | Callable[[RowGroup], Cell]


def _if_priced(varying: Varying) -> Callable[[RowGroup], Cell]:
    return lambda group: None if group.unit_price is None else varying


def _unit(group: RowGroup) -> Cell:
    return group.unit


def _invoice(group: RowGroup) -> Cell:
    invoice = group.frame.invoice
    return None if invoice is None else invoice + group.dimension.tenant_id


def _description(group: RowGroup) -> Cell:
    batches = " in batches" if group.dimension.is_batch else ""
    return f"{METERS[group.token_class]} of {group.dimension.model}{batches}"


def _price_details(group: RowGroup) -> Cell:
    is_batch = "true" if group.dimension.is_batch else "false"
    token_class, version = group.token_class.value, group.price_version
    return f'{{"x_TokenClass": "{token_class}", "x_IsBatch": {is_batch}, "x_PriceVersion": {version}}}'


USAGE: Mapping[str, Source] = {
    "event_id": Varying.EVENT_ID,
    "part": Varying.PART,
    "kind": Varying.KIND,
    "counted_at": Varying.COUNTED_AT,
    "day": Varying.DAY,
    "started_at": Varying.STARTED_AT,
    "ended_at": Varying.ENDED_AT,
    "tenant_id": lambda group: group.dimension.tenant_id,
    "key_id": lambda group: group.dimension.key_id,
    "cost_center": lambda group: group.dimension.cost_center,
    "labels": lambda group: group.dimension.labels,
    "requested_model": lambda group: group.dimension.requested_model,
    "model": lambda group: group.dimension.model,
    "endpoint": Varying.ENDPOINT,
    "batch_id": Varying.BATCH_ID,
    "state": Varying.STATE,
    "is_estimated": Varying.IS_ESTIMATED,
    "token_class": lambda group: group.token_class.value,
    "requests": Varying.REQUESTS,
    "quantity": Varying.QUANTITY,
    "unit_price": _unit,
    "cost": _if_priced(Varying.COST),
    "list_cost": _if_priced(Varying.LIST_COST),
    "currency": lambda group: group.frame.currency,
    "price_version": lambda group: str(group.price_version) if group.price_version else None,
}

# Columns that are not here are null.
FOCUS: Mapping[str, Source] = {
    **dict.fromkeys(
        ("ProviderName", "PublisherName", "ServiceProviderName", "HostProviderName", "InvoiceIssuerName"),
        PROVIDER,
    ),
    "InvoiceId": _invoice,
    "BillingAccountId": lambda group: group.dimension.tenant_id,
    "BillingAccountType": "Tenant",
    "SubAccountId": lambda group: group.dimension.key_id,
    "SubAccountType": "API key",
    "BillingPeriodStart": lambda group: group.frame.period_begin,
    "BillingPeriodEnd": lambda group: group.frame.period_end,
    # A quarter of an hour lies in one day and one month of every zone.
    "ChargePeriodStart": Varying.CHARGE_BEGIN,
    "ChargePeriodEnd": Varying.CHARGE_END,
    "ChargeCategory": "Usage",
    "ChargeClass": Varying.CHARGE_CLASS,
    "ChargeDescription": _description,
    "ChargeFrequency": "Usage-Based",
    # A batch has a price of its own in the list, so all of these are one.
    **dict.fromkeys(
        ("BilledCost", "EffectiveCost", "ListCost", "ContractedCost", "PricingCurrencyEffectiveCost"),
        Varying.COST,
    ),
    **dict.fromkeys(
        (
            "ListUnitPrice",
            "ContractedUnitPrice",
            "PricingCurrencyContractedUnitPrice",
            "PricingCurrencyListUnitPrice",
        ),
        _unit,
    ),
    "PricingCategory": "Standard",
    **dict.fromkeys(("PricingQuantity", "ConsumedQuantity"), Varying.QUANTITY),
    **dict.fromkeys(("PricingUnit", "ConsumedUnit"), "Tokens"),
    **dict.fromkeys(("PricingCurrency", "BillingCurrency"), lambda group: group.frame.currency),
    "ServiceName": SERVICE,
    "ServiceCategory": "AI and Machine Learning",
    "ServiceSubcategory": "Generative AI",
    "SkuId": lambda group: group.sku,
    "SkuMeter": lambda group: METERS[group.token_class],
    "SkuPriceId": lambda group: f"{group.sku}@{group.price_version}",
    "SkuPriceDetails": _price_details,
    "ResourceId": lambda group: group.dimension.model,
    "ResourceName": lambda group: group.dimension.model,
    "ResourceType": "Model",
    "Tags": lambda group: group.dimension.labels,
    "x_EventId": Varying.EVENT_ID,
    "x_Part": Varying.PART,
    "x_Kind": Varying.KIND,
    "x_StartedAt": Varying.STARTED_AT,
    "x_CostCenter": lambda group: group.dimension.cost_center,
    "x_RequestedModel": lambda group: group.dimension.requested_model,
    "x_Endpoint": Varying.ENDPOINT,
    "x_BatchId": Varying.BATCH_ID,
    "x_State": Varying.STATE,
    "x_IsEstimated": Varying.IS_ESTIMATED,
    "x_TokenClass": lambda group: group.token_class.value,
    "x_Requests": Varying.REQUESTS,
    "x_PriceVersion": lambda group: str(group.price_version),
    "x_BatchDiscount": Varying.DISCOUNT,
}


# What no text holds.
_PLACE = "\0"


@dataclass(frozen=True, slots=True)
class RowTemplate:
    """A row in pieces: every second one is empty, and takes a value.

    `pick` takes those out of a row's values, which are everything of `Varying` in its order.
    """

    pieces: list[str]
    pick: Callable[[Sequence[str]], tuple[str, ...]]


def make_template(
    columns: Sequence[Column], sources: Mapping[str, Source], group: RowGroup, form: LineForm
) -> RowTemplate:
    """All that rows of a group have in common, ready to be filled in."""
    cells, places = [], []
    for column in columns:
        source = sources.get(column.name)
        cell = source(group) if callable(source) else source
        if isinstance(cell, Varying):
            places.append(int(cell))
            cells.append(form.place(column, _PLACE))
        else:
            cells.append(form.constant(column, cell))
    pieces = []
    for piece in form.line(columns, cells).split(_PLACE):
        pieces += [piece, ""]
    return RowTemplate(pieces[:-1], itemgetter(*places))
