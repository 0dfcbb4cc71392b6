"""What stands in each column of an export, as expressions over one class of tokens of one posting."""

from __future__ import annotations

from footplate.billing.adapters.postgres.tables import SCHEMA
from footplate.billing.exports.columns import PROVIDER, SERVICE

_CLASSES = """
cross join lateral (values
    (1, 'input', 'Input tokens', f.requests, f.input_uncached, m.input, f.gross_input, f.discount_input),
    (2, 'cached_input', 'Cached input tokens', 0, f.input_cached, m.cached_input, f.gross_cached_input,
     f.discount_cached_input),
    (3, 'output', 'Output tokens', 0, f.output, m.output, f.gross_output, f.discount_output)
) as c (n, class, meter, requests, quantity, unit, gross, discount)
where f.effective_at >= %(begin)s and f.effective_at < %(end)s and (c.requests <> 0 or c.quantity <> 0)
order by f.effective_at, f.event_seq, f.seq, c.n
"""


def _from(source: str, join: str) -> str:
    return f"""
from {SCHEMA}.{source} f
join export_dimensions d on d.id = f.dimension_id
join {SCHEMA}.events e on e.seq = f.event_seq
left join {SCHEMA}.recounts r on r.event_seq = f.event_seq and f.seq > 0
{join} join export_prices m
    on m.version_id = f.price_version and m.model = d.price_model and m.is_batch = d.is_batch
{_CLASSES}"""


# Everything, and what has a price.
FROM_FACTS = _from("usage_facts", "left")
FROM_PRICED = _from("postings", "")


def _moment(expression: str, fraction: str = ".US") -> str:
    return f"to_char({expression} at time zone 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS{fraction}\"Z\"')"


# Twelve digits behind the point, always.
_PICO = "0.000000000001"
_COST = f"(c.gross - c.discount) * {_PICO}"
_UNIT = f"c.unit * {_PICO}"
_BATCH_ID = (
    """case when left(e.batch_id, 1) in ('=', '+', '-', '@') then '''' || e.batch_id else e.batch_id end"""
)
_SKU = "d.model || '/' || c.class || case when d.is_batch then '/batch' else '' end"

USAGE = {
    "event_id": "e.event_id",
    "part": "f.seq",
    "kind": "f.kind",
    "counted_at": _moment("f.effective_at"),
    "day": "(%(day_names)s::text[])[width_bucket(f.effective_at, %(day_begins)s::timestamptz[])]",
    "started_at": _moment("e.started_at"),
    "ended_at": _moment("coalesce(r.ended_at, e.ended_at)"),
    "tenant_id": "d.tenant_id",
    "key_id": "d.key_id",
    "cost_center": "d.cost_center",
    "labels": "d.labels",
    "requested_model": "d.requested_model",
    "model": "d.model",
    "endpoint": "e.endpoint",
    "batch_id": _BATCH_ID,
    "state": "coalesce(r.state, e.state)",
    "is_estimated": "case when coalesce(r.is_estimated, e.is_estimated) then 'true' else 'false' end",
    "token_class": "c.class",
    "requests": "c.requests",
    "quantity": "c.quantity",
    "unit_price": _UNIT,
    "cost": f"case when m.version_id is not null then {_COST} end",
    "list_cost": f"case when m.version_id is not null then c.gross * {_PICO} end",
    "currency": "%(currency)s::text",
    "price_version": "nullif(f.price_version, 0)",
}

_BUCKET = "date_bin('15 minutes', f.effective_at, timestamptz '2000-01-01 00:00:00+00')"
_PROVIDER = f"'{PROVIDER}'"
# Columns that are not here are null.
FOCUS = {
    **dict.fromkeys(
        ("ProviderName", "PublisherName", "ServiceProviderName", "HostProviderName", "InvoiceIssuerName"),
        _PROVIDER,
    ),
    "InvoiceId": "%(invoice)s::text || d.tenant_id",
    "BillingAccountId": "d.tenant_id",
    "BillingAccountType": "'Tenant'",
    "SubAccountId": "d.key_id",
    "SubAccountType": "'API key'",
    "BillingPeriodStart": "%(period_begin)s::text",
    "BillingPeriodEnd": "%(period_end)s::text",
    # A quarter of an hour lies in one day and one month of every zone.
    "ChargePeriodStart": _moment(_BUCKET, ""),
    "ChargePeriodEnd": _moment(f"({_BUCKET} + interval '15 minutes')", ""),
    "ChargeCategory": "'Usage'",
    # Of a month that was invoiced before.
    "ChargeClass": (
        "case when f.kind <> 'usage' and e.started_at < %(period_begins_at)s then 'Correction' end"
    ),
    "ChargeDescription": (
        "c.meter || ' of ' || d.model || case when d.is_batch then ' in batches' else '' end"
    ),
    "ChargeFrequency": "'Usage-Based'",
    # A batch has a price of its own in the list, so all four are one.
    **dict.fromkeys(
        ("BilledCost", "EffectiveCost", "ListCost", "ContractedCost", "PricingCurrencyEffectiveCost"), _COST
    ),
    **dict.fromkeys(
        (
            "ListUnitPrice",
            "ContractedUnitPrice",
            "PricingCurrencyContractedUnitPrice",
            "PricingCurrencyListUnitPrice",
        ),
        _UNIT,
    ),
    "PricingCategory": "'Standard'",
    **dict.fromkeys(("PricingQuantity", "ConsumedQuantity"), "c.quantity"),
    **dict.fromkeys(("PricingUnit", "ConsumedUnit"), "'Tokens'"),
    **dict.fromkeys(("PricingCurrency", "BillingCurrency"), "%(currency)s::text"),
    "ServiceName": f"'{SERVICE}'",
    "ServiceCategory": "'AI and Machine Learning'",
    "ServiceSubcategory": "'Generative AI'",
    "SkuId": _SKU,
    "SkuMeter": "c.meter",
    "SkuPriceId": f"{_SKU} || '@' || f.price_version",
    "SkuPriceDetails": (
        '\'{"x_TokenClass": "\' || c.class || \'", "x_IsBatch": \' || d.is_batch || '
        "', \"x_PriceVersion\": ' || f.price_version || '}'"
    ),
    "ResourceId": "d.model",
    "ResourceName": "d.model",
    "ResourceType": "'Model'",
    "Tags": "d.labels",
    "x_EventId": "e.event_id",
    "x_Part": "f.seq",
    "x_Kind": "f.kind",
    "x_StartedAt": _moment("e.started_at"),
    "x_CostCenter": "d.cost_center",
    "x_RequestedModel": "d.requested_model",
    "x_Endpoint": "e.endpoint",
    "x_BatchId": _BATCH_ID,
    "x_State": "coalesce(r.state, e.state)",
    "x_IsEstimated": "case when coalesce(r.is_estimated, e.is_estimated) then 'true' else 'false' end",
    "x_TokenClass": "c.class",
    "x_Requests": "c.requests",
    "x_PriceVersion": "f.price_version",
    "x_BatchDiscount": f"c.discount * {_PICO}",
}
