"""The columns of exported files: names, kinds and order never change under one schema. Pure.

A row is one class of tokens of one posting. Cached tokens, and tokens of batches, are rows of their own with
unit prices of their own, so quantity times unit price is the cost, exactly, in every row.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from footplate.billing.exports.request import ExportFormat, ExportRequest, FocusVersion

# Who serves the models: there is no other provider in between.
PROVIDER = "Footplate"
SERVICE = "Footplate inference"


class ColumnKind(StrEnum):
    """What a column holds. Decimals have 12 digits after the point; moments are in UTC."""

    TEXT = "text"
    INTEGER = "integer"
    DECIMAL = "decimal"
    MOMENT = "moment"
    FLAG = "flag"


@dataclass(frozen=True, slots=True)
class Column:
    """One column."""

    name: str
    kind: ColumnKind = ColumnKind.TEXT
    is_nullable: bool = False


_INTEGER, _DECIMAL, _MOMENT, _FLAG = (
    ColumnKind.INTEGER,
    ColumnKind.DECIMAL,
    ColumnKind.MOMENT,
    ColumnKind.FLAG,
)

USAGE = (
    Column("event_id"),
    # 0 is the request itself; more are later counts of it.
    Column("part", _INTEGER),
    Column("kind"),
    # The moment that says its day and month: its start, unless its month was closed before it came.
    Column("counted_at", _MOMENT),
    # The local day of that, in the zone of the export.
    Column("day"),
    Column("started_at", _MOMENT),
    Column("ended_at", _MOMENT),
    Column("tenant_id"),
    Column("key_id"),
    Column("cost_center"),
    Column("labels"),
    Column("requested_model"),
    Column("model"),
    Column("endpoint"),
    Column("batch_id", is_nullable=True),
    Column("state"),
    Column("is_estimated", _FLAG),
    Column("token_class"),
    # 1 in one row of a request and 0 in its others: the column sums to requests.
    Column("requests", _INTEGER),
    Column("quantity", _INTEGER),
    # For one token, with the discount of batches; empty while there is no price.
    Column("unit_price", _DECIMAL, is_nullable=True),
    Column("cost", _DECIMAL, is_nullable=True),
    Column("list_cost", _DECIMAL, is_nullable=True),
    Column("currency"),
    Column("price_version", _INTEGER, is_nullable=True),
)

# Columns of FOCUS in the order of 1.2; those that stay empty here are null in every row.
_FOCUS_DECIMALS = frozenset(
    "BilledCost EffectiveCost ListCost ContractedCost ListUnitPrice ContractedUnitPrice PricingQuantity "
    "PricingCurrencyContractedUnitPrice PricingCurrencyEffectiveCost PricingCurrencyListUnitPrice "
    "ConsumedQuantity CommitmentDiscountQuantity".split()
)
_FOCUS_MOMENTS = frozenset("BillingPeriodStart BillingPeriodEnd ChargePeriodStart ChargePeriodEnd".split())
_ONLY_1_2 = ("ProviderName", "PublisherName")
_ONLY_1_4 = (
    "ServiceProviderName",
    "HostProviderName",
    "InvoiceDetailId",
    "ContractApplied",
    "CommitmentProgramEligibilityDetails",
    "AllocatedMethodId",
    "AllocatedMethodDetails",
    "AllocatedResourceId",
    "AllocatedResourceName",
    "AllocatedTags",
)
_FOCUS = tuple(
    "InvoiceIssuerName InvoiceId BillingAccountId BillingAccountName BillingAccountType SubAccountId "
    "SubAccountName SubAccountType BillingPeriodStart BillingPeriodEnd ChargePeriodStart ChargePeriodEnd "
    "ChargeCategory ChargeClass ChargeDescription ChargeFrequency BilledCost EffectiveCost ListCost "
    "ContractedCost ListUnitPrice ContractedUnitPrice PricingCategory PricingQuantity PricingUnit "
    "PricingCurrency PricingCurrencyContractedUnitPrice PricingCurrencyEffectiveCost "
    "PricingCurrencyListUnitPrice BillingCurrency ConsumedQuantity ConsumedUnit ServiceName ServiceCategory "
    "ServiceSubcategory SkuId SkuMeter SkuPriceId SkuPriceDetails ResourceId ResourceName ResourceType "
    "RegionId RegionName AvailabilityZone CommitmentDiscountId CommitmentDiscountName "
    "CommitmentDiscountCategory CommitmentDiscountType CommitmentDiscountStatus CommitmentDiscountQuantity "
    "CommitmentDiscountUnit CapacityReservationId CapacityReservationStatus Tags".split()
)
_OURS = (
    Column("x_EventId"),
    Column("x_Part", _INTEGER),
    Column("x_Kind"),
    Column("x_StartedAt", _MOMENT),
    Column("x_CostCenter"),
    Column("x_RequestedModel"),
    Column("x_Endpoint"),
    Column("x_BatchId", is_nullable=True),
    Column("x_State"),
    Column("x_IsEstimated", _FLAG),
    Column("x_TokenClass"),
    Column("x_Requests", _INTEGER),
    Column("x_PriceVersion", _INTEGER),
    # What a batch takes off: the price outside batches is this much higher in all.
    Column("x_BatchDiscount", _DECIMAL),
)


def focus_columns(version: FocusVersion) -> tuple[Column, ...]:
    """All columns of a version of FOCUS, and ours behind them as `x_…`."""
    first = _ONLY_1_2 if version is FocusVersion.V1_2 else _ONLY_1_4[:2]
    last = () if version is FocusVersion.V1_2 else _ONLY_1_4[2:]
    return (*(_focus_column(name) for name in (*first, *_FOCUS, *last)), *_OURS)


def _focus_column(name: str) -> Column:
    kind = ColumnKind.DECIMAL if name in _FOCUS_DECIMALS else ColumnKind.TEXT
    return Column(name, ColumnKind.MOMENT if name in _FOCUS_MOMENTS else kind, is_nullable=True)


def columns_of(request: ExportRequest) -> tuple[Column, ...]:
    """What the file of a request has, in order."""
    if request.format is ExportFormat.FOCUS:
        return focus_columns(request.focus_version)
    return USAGE
