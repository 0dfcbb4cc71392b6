"""Proves sums against events: rollups, spend, postings and entries of a month, each compared with its source.

Every query counts what differs, so that 0 means that both sides are the same, rows and amounts.
"""

from __future__ import annotations

from datetime import date, datetime, timedelta
from typing import Any

from footplate.billing.adapters.postgres.bulk import Driver
from footplate.billing.adapters.postgres.tables import (
    AMOUNT_COLUMNS,
    MEASURES,
    ROLLUP_KEY,
    SCHEMA,
    TOKEN_COLUMNS,
)
from footplate.billing.periods import BillingCalendar, Period

_IN_PERIOD = "{0}.effective_at >= %(begins)s and {0}.effective_at < %(ends)s"
_NET = " + ".join(AMOUNT_COLUMNS[:3]) + "".join(f" - {name}" for name in AMOUNT_COLUMNS[3:])


def _is_different(left: str, right: str, names: tuple[str, ...]) -> str:
    """Whether two rows, either of which may be missing, differ; a missing row is one of zeros."""
    sides = [", ".join(f"coalesce({side}.{name}, 0)" for name in names) for side in (left, right)]
    return f"({sides[0]}) is distinct from ({sides[1]})"


def _rollup_differences(table: str, bucket: str, limits: str) -> str:
    sums = ", ".join(f"sum({name}) as {name}" for name in MEASURES)
    key = ", ".join(ROLLUP_KEY)
    return f"""
with facts as (
    select {bucket} as bucket, {", ".join(ROLLUP_KEY[1:])}, {sums} from {SCHEMA}.usage_facts f
    where {_IN_PERIOD.format("f")} group by 1, 2, 3, 4
), kept as (select * from {SCHEMA}.{table} where {limits})
select count(*) from facts full join kept using ({key}) where {_is_different("facts", "kept", MEASURES)}
"""


# Days of a zone by this process's own knowledge of zones, which is the one that they were summed by.
_DAY = "(%(days)s::date[])[width_bucket(effective_at, %(midnights)s::timestamptz[])]"
_QUARTER_HOUR = "date_bin('15 minutes', effective_at, timestamptz '2000-01-01 00:00:00+00')"
_ROLLUPS = (
    _rollup_differences("rollups_day", _DAY, "bucket >= %(first_day)s and bucket < %(end_day)s"),
    _rollup_differences("rollups_quarter_hour", _QUARTER_HOUR, "bucket >= %(begins)s and bucket < %(ends)s"),
    f"""
with facts as (
    select d.tenant_id, p.currency, sum({_NET}) as amount
    from {SCHEMA}.postings p join {SCHEMA}.dimensions d on d.id = p.dimension_id
    where {_IN_PERIOD.format("p")} group by 1, 2
), kept as (select * from {SCHEMA}.month_spend where month = %(first_day)s)
select count(*) from facts full join kept using (tenant_id, currency)
where {_is_different("facts", "kept", ("amount",))}
""",
)

_TOKENS = TOKEN_COLUMNS


def _tokens(side: str) -> str:
    return ", ".join(f"{side}.{name}" for name in _TOKENS)


_POSTINGS = (
    # Events whose own posting is missing or says something else.
    f"""
select count(*) from {SCHEMA}.events e
left join {SCHEMA}.postings p on p.event_seq = e.seq and p.seq = 0
left join {SCHEMA}.quarantine q on q.event_seq = e.seq
where {_IN_PERIOD.format("e")} and case
    when p.event_seq is null then q.event_seq is null
    else (p.dimension_id, p.effective_at, 1, {_tokens("p")})
        is distinct from (e.dimension_id, e.effective_at, p.requests, {_tokens("e")})
end
""",
    # Better counts that all postings of their event do not add up to.
    f"""
select count(*) from {SCHEMA}.recounts r
left join {SCHEMA}.quarantine q on q.event_seq = r.event_seq
left join lateral (
    select sum(requests) as requests, {", ".join(f"sum({name}) as {name}" for name in _TOKENS)}
    from {SCHEMA}.postings p where p.event_seq = r.event_seq
) p on true
where {_IN_PERIOD.format("r")} and q.event_seq is null
  and ({_tokens("p")}, p.requests) is distinct from ({_tokens("r")}, 1)
""",
    # Postings of no event, or of a price that is not their version's.
    f"""
select count(*) from {SCHEMA}.postings p
left join {SCHEMA}.events e on e.seq = p.event_seq
left join {SCHEMA}.dimensions d on d.id = p.dimension_id
left join {SCHEMA}.model_prices m on m.version_id = p.price_version and m.model = d.served_model
left join {SCHEMA}.price_versions v on v.id = p.price_version
cross join lateral (
    select case when d.is_batch then 1 - v.multiplier_numerator::numeric / v.multiplier_denominator else 0 end
        as off
) o
where {_IN_PERIOD.format("p")} and (
    e.seq is null
    or (gross_input, gross_cached_input, gross_output) is distinct from
       (p.input_uncached * m.input::numeric, p.input_cached * m.cached_input::numeric,
        p.output * m.output::numeric)
    or (discount_input, discount_cached_input, discount_output) is distinct from
       (round(gross_input * off), round(gross_cached_input * off), round(gross_output * off))
)
""",
    # Postings whose entries are others than the accounts' shares of them.
    f"""
with posted as (select * from {SCHEMA}.postings p where {_IN_PERIOD.format("p")}), due as (
    select p.event_seq, p.seq, account, share, d.tenant_id, p.currency
    from posted p
    join {SCHEMA}.dimensions d on d.id = p.dimension_id
    cross join lateral (values
        ('tenant', {_NET}),
        (case when p.kind = 'usage' then 'revenue' else 'adjustment' end,
            -(gross_input + gross_cached_input + gross_output)),
        ('discount', discount_input + discount_cached_input + discount_output)
    ) as shares (account, share)
    where share <> 0
), made as (
    select n.* from {SCHEMA}.entries n join posted p using (event_seq, seq)
)
select count(*) from due full join made using (event_seq, seq, account)
where (due.share, due.tenant_id, due.currency) is distinct from (made.amount, made.tenant_id, made.currency)
""",
)
_UNBALANCED = f"""
select n.currency, sum(n.amount) from {SCHEMA}.entries n join {SCHEMA}.postings p using (event_seq, seq)
where {_IN_PERIOD.format("p")} group by 1 having sum(n.amount) <> 0
"""


def num_rollup_differences(driver: Driver, period: Period, calendar: BillingCalendar) -> int:
    """Rows of rollups and of the spend of tenants that are not the sums of the month's events."""
    return _count(driver, _ROLLUPS, _arguments(period, calendar))


def num_posting_differences(driver: Driver, period: Period, calendar: BillingCalendar) -> int:
    """Events, better counts, postings and entries of the month that don't fit one another."""
    return _count(driver, _POSTINGS, _arguments(period, calendar))


def unbalanced(driver: Driver, period: Period, calendar: BillingCalendar) -> dict[str, int]:
    """What the entries of the month sum to in each currency where it is not 0."""
    rows = driver.execute(_UNBALANCED, _arguments(period, calendar)).fetchall()
    return {currency: int(amount) for currency, amount in rows}


def _count(driver: Driver, queries: tuple[str, ...], arguments: dict[str, Any]) -> int:
    num_different = 0
    for query in queries:
        row = driver.execute(query, arguments).fetchone()
        num_different += row[0] if row else 0
    return num_different


def _arguments(period: Period, calendar: BillingCalendar) -> dict[str, Any]:
    end_day = calendar.day(period.ends_at)
    days: list[date] = [period.first_day]
    while days[-1] + timedelta(days=1) < end_day:
        days.append(days[-1] + timedelta(days=1))
    midnights: list[datetime] = [calendar.midnight(day) for day in days]
    return {
        "begins": period.begins_at,
        "ends": period.ends_at,
        "first_day": period.first_day,
        "end_day": end_day,
        "days": days,
        "midnights": midnights,
    }
