"""Reports from rollups in PostgreSQL; see `ReportReader`.

One statement in one snapshot reads the parts of a range from the largest sums that fit, joins dimensions once
the parts are summed, and answers with a page and the totals of all pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, text

from footplate.billing.adapters.postgres.books import Books, reading
from footplate.billing.adapters.postgres.tables import SCHEMA, UNPRICED
from footplate.billing.reports import Group, GroupBy, Report, ReportQuery, ReportRow, UsageFilter, UsageSums
from footplate.billing.time_ranges import KeptSums, RangePart, days_of, hours_of, range_parts

REPORT_S = 60
_CLASSES = ("input", "cached_input", "output")
_SUMS = ("requests", "input_uncached", "input_cached", "output", "cost")
_COLUMNS = {
    GroupBy.TENANT: "d.tenant_id",
    GroupBy.KEY: "d.key_id",
    GroupBy.MODEL: "d.served_model",
    GroupBy.REQUESTED_MODEL: "d.requested_model",
    GroupBy.COST_CENTER: "d.cost_center",
    GroupBy.CLASS: "c.class",
    GroupBy.DAY: "p.day",
    GroupBy.HOUR: "p.hour",
}
_SOURCES = {
    KeptSums.DAYS: ("rollups_day", "bucket"),
    KeptSums.QUARTER_HOURS: ("rollups_quarter_hour", "bucket"),
    KeptSums.EVENTS: ("usage_facts", "effective_at"),
}
# A class's own tokens and cost, the others' 0; a request counts with `input`.
_BY_CLASS = """
cross join lateral (values
    ('input', p.requests, p.unpriced, p.input_uncached, 0, 0, p.net_input),
    ('cached_input', 0, 0, 0, p.input_cached, 0, p.net_cached_input),
    ('output', 0, 0, 0, 0, p.output, p.net_output)
) as c (class, requests, unpriced, input_uncached, input_cached, output, cost)
"""
_WHOLE = """
cross join lateral (values
    (p.requests, p.unpriced, p.input_uncached, p.input_cached, p.output,
     p.net_input + p.net_cached_input + p.net_output)
) as c (requests, unpriced, input_uncached, input_cached, output, cost)
"""


class PostgresReportReader:
    """Safe from any thread."""

    def __init__(self, books: Books) -> None:
        self._books = books

    def report(self, query: ReportQuery) -> Report:
        """As `ReportReader.report`."""
        with reading(self._books.engine) as connection:
            connection.execute(text(f"set local statement_timeout = '{REPORT_S}s'"))
            return self.report_on(connection, query)

    def report_on(self, connection: Connection, query: ReportQuery) -> Report:
        """The same, in a snapshot that others read too."""
        driver = connection.connection.driver_connection
        assert driver is not None
        statement, values = _statement(query, self._books)
        *rows, totals = driver.execute(statement, values).fetchall()
        page = [ReportRow(row[1 : 1 + len(query.groups)], _sums(row)) for row in rows]
        return Report(page[: query.limit], _sums(totals), int(totals[-1] or 0), len(page) > query.limit)


def _sums(row: Sequence[Any]) -> UsageSums:
    return UsageSums(*(int(value or 0) for value in row[-len(_SUMS) - 1 : -1]))


def _statement(query: ReportQuery, books: Books) -> tuple[str, dict[str, Any]]:
    values: dict[str, Any] = {"unpriced": UNPRICED, "limit": query.limit + 1}
    kinds = {group.by for group in query.groups}
    if GroupBy.DAY in kinds:
        _name_buckets(values, "day", days_of(query.span))
    if GroupBy.HOUR in kinds:
        _name_buckets(values, "hour", hours_of(query.span))
    parts = range_parts(query.span, books.calendar, by_local_time=bool(kinds & {GroupBy.DAY, GroupBy.HOUR}))
    if GroupBy.HOUR in kinds:
        # Kept days hold no hours.
        parts = [
            RangePart(KeptSums.QUARTER_HOURS, each.begin, each.end) if each.kept is KeptSums.DAYS else each
            for each in parts
        ]
    where = _filter(query.filter, values)
    selects = [_part(index, part, books, kinds, where, values) for index, part in enumerate(parts)]
    keys = [_key(index, group, values) for index, group in enumerate(query.groups)]
    names = [f"k{index}" for index in range(len(keys))]
    measures = ", ".join(f"sum(c.{name}) as {name}" for name in (*_SUMS, "unpriced"))
    any_left = " or ".join(f"sum(c.{name}) <> 0" for name in _SUMS)
    whole = ", ".join(f"sum({name})" for name in (*_SUMS, "unpriced"))
    group_by = f"group by {', '.join(map(str, range(1, len(keys) + 1)))}" if keys else ""
    listed = "".join(f"{name}, " for name in names)
    order = f"order by {', '.join(names)}" if names else ""
    return (
        f"""
with parts as ({" union all ".join(selects)}),
grouped as materialized (
    select {"".join(f"{key} as {name}, " for key, name in zip(keys, names, strict=True))}{measures}
    from parts p join {SCHEMA}.dimensions d on d.id = p.dimension_id
    {_BY_CLASS if GroupBy.CLASS in kinds else _WHOLE}
    {group_by} having {any_left}
)
(select 0 as part, {listed}{", ".join(_SUMS)}, unpriced from grouped {_after(query, names, values)}
 {order} limit %(limit)s)
union all
(select 1, {"null, " * len(names)}{whole} from grouped)
order by part{"".join(f", {name}" for name in names)}
""",
        values,
    )


def _name_buckets(values: dict[str, Any], name: str, buckets: Sequence[tuple[Any, str]]) -> None:
    values[f"{name}_begins"] = [begin for begin, _ in buckets]
    values[f"{name}_names"] = [shown for _, shown in buckets]


def _part(
    index: int, part: RangePart, books: Books, kinds: set[GroupBy], where: str, values: dict[str, Any]
) -> str:
    table, at = _SOURCES[part.kept]
    is_days = part.kept is KeptSums.DAYS
    for name, moment in (("begin", part.begin), ("end", part.end)):
        values[f"{name}{index}"] = books.calendar.day(moment) if is_days else moment
    times = []
    for kind in (GroupBy.DAY, GroupBy.HOUR):
        if kind in kinds:
            index_of = f"width_bucket({at}, %({kind.value}_begins)s::timestamptz[])"
            named = f"{at}::text" if is_days else f"(%({kind.value}_names)s::text[])[{index_of}]"
            times.append(f"{named} as {kind.value}")
    net = ", ".join(f"sum(gross_{each} - discount_{each}) as net_{each}" for each in _CLASSES)
    tokens = ", ".join(f"sum({name}) as {name}" for name in _SUMS[1:4])
    grouped = ", ".join(map(str, range(1, len(times) + 2)))
    return f"""
select dimension_id, {"".join(f"{each}, " for each in times)}sum(requests) as requests,
       coalesce(sum(requests) filter (where price_version = %(unpriced)s), 0) as unpriced, {tokens}, {net}
from {SCHEMA}.{table} where {at} >= %(begin{index})s and {at} < %(end{index})s {where} group by {grouped}
"""


def _filter(wanted: UsageFilter, values: dict[str, Any]) -> str:
    columns = {"tenant_id": "tenant_id", "key_id": "key_id", "model": "served_model"}
    given = wanted.fields()
    if not given:
        return ""
    values.update({f"only_{name}": value for name, value in given.items()})
    limits = " and ".join(f"{columns[name]} = %(only_{name})s" for name in given)
    return f"and dimension_id in (select id from {SCHEMA}.dimensions where {limits})"


def _key(index: int, group: Group, values: dict[str, Any]) -> str:
    if group.by is GroupBy.LABEL:
        values[f"label{index}"] = group.label
        column = f"coalesce(d.labels ->> %(label{index})s::text, '')"
    else:
        column = _COLUMNS[group.by]
    # One order on every server, whatever its locale.
    return f'{column} collate "C"'


def _after(query: ReportQuery, names: Sequence[str], values: dict[str, Any]) -> str:
    if query.after is None or not names:
        return ""
    given = {f"after{index}": value for index, value in enumerate(query.after)}
    values.update(given)
    return f"where ({', '.join(names)}) > ({', '.join(f'%({name})s::text' for name in given)})"
