"""Rows of exports, made by the database as lines of CSV and read slice by slice in one snapshot.

Slices are of some ten thousand requests in the order of time, and none crosses the end of a month: so memory
is bounded on both sides, whatever the range. Dimensions and prices are copied into temporary tables, with
their texts made safe once rather than in each row.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import text

from footplate.billing.adapters.postgres.books import UNAVAILABLE, Books
from footplate.billing.adapters.postgres.export_columns import FOCUS, FROM_FACTS, FROM_PRICED, USAGE
from footplate.billing.adapters.postgres.price_rows import read_book
from footplate.billing.adapters.postgres.tables import AMOUNT_COLUMNS, SCHEMA, UNPRICED
from footplate.billing.errors import StoreUnavailable
from footplate.billing.exports.columns import columns_of
from footplate.billing.exports.request import ExportFormat, ExportRequest
from footplate.billing.exports.sidecar import ExportTotals
from footplate.billing.periods import Period
from footplate.billing.prices import PriceVersion, PriceVersionId
from footplate.billing.reports import UsageFilter, UsageSums
from footplate.billing.time_ranges import TimeRange, days_of

SLICE_REQUESTS = 20_000
# A slice is sorted in memory, and no row's values are worth remembering for the next.
_SETTINGS = ("work_mem = '64MB'", "jit = off", "enable_memoize = off")
# A column of one of the tables that an expression of `export_columns` names by one letter.
_REFERENCE = re.compile(r"\b([cdefmr])\.([a-z_]+)")
_NET = " + ".join(AMOUNT_COLUMNS[:3]) + "".join(f" - {name}" for name in AMOUNT_COLUMNS[3:])
_SAFE = "case when left({0}, 1) in ('=', '+', '-', '@', E'\\t', E'\\r') then '''' || {0} else {0} end"
_DIMENSIONS = f"""
create temporary table export_dimensions on commit drop as
select id, is_batch, served_model as price_model, tenant_id, key_id, {{cost_center}} as cost_center,
       {{requested_model}} as requested_model, {{served_model}} as model, labels::text as labels
from {SCHEMA}.dimensions where {{only}}
"""
_PRICES = f"""
create temporary table export_prices on commit drop as
select m.version_id, m.model, b.is_batch,
       case when b.is_batch then m.input * multiplier_numerator / multiplier_denominator else m.input end
           as input,
       case when b.is_batch then m.cached_input * multiplier_numerator / multiplier_denominator
           else m.cached_input end as cached_input,
       case when b.is_batch then m.output * multiplier_numerator / multiplier_denominator else m.output end
           as output
from {SCHEMA}.model_prices m join {SCHEMA}.price_versions v on v.id = m.version_id
cross join (values (true), (false)) as b (is_batch)
"""
_INDEXES = (
    "create unique index on export_dimensions (id)",
    "create unique index on export_prices (version_id, model, is_batch)",
    "analyze export_dimensions",
    "analyze export_prices",
)
_TOTALS = f"""
select price_version = {UNPRICED}, array_agg(distinct price_version),
       sum((requests <> 0 or input_uncached <> 0)::int + (input_cached <> 0)::int + (output <> 0)::int),
       sum(requests), sum(input_uncached), sum(input_cached), sum(output), sum({_NET})
from {SCHEMA}.usage_facts f join export_dimensions d on d.id = f.dimension_id
where effective_at >= %(begin)s and effective_at < %(end)s group by 1
"""
_BUCKETS = f"""
select bucket, sum(requests) from {SCHEMA}.rollups_quarter_hour r
join export_dimensions d on d.id = r.dimension_id
where bucket > %(begin)s - interval '15 minutes' and bucket < %(end)s group by 1 order by 1
"""


@dataclass(frozen=True, slots=True)
class Slice:
    """A piece of the range that lies in one month."""

    begin: datetime
    end: datetime
    period: Period


class ExportSnapshot:
    """One moment of the books, as long as it is open; see `open_snapshot`."""

    def __init__(self, books: Books, request: ExportRequest, connection: Any) -> None:
        self._books = books
        self._request = request
        self.connection = connection
        self._driver = connection.connection.driver_connection
        self._version_ids: set[int] = set()

    def prepare(self) -> None:
        """Copy dimensions and prices."""
        is_safe = self._request.format.is_for_spreadsheets
        texts = {
            name: _SAFE.format(name) if is_safe else name
            for name in ("cost_center", "requested_model", "served_model")
        }
        only, values = _only(self._request.filter)
        self._driver.execute(_DIMENSIONS.format(only=only, **texts), values)
        self._driver.execute(_PRICES)
        for statement in _INDEXES:
            self._driver.execute(statement)

    def totals(self) -> ExportTotals:
        """What the file must sum to, read from the events that it is made from."""
        span = self._request.span
        num_rows, sums, left_out = 0, UsageSums(), UsageSums()
        is_focus = self._request.format is ExportFormat.FOCUS
        for row in self._driver.execute(_TOTALS, {"begin": span.begin, "end": span.end}).fetchall():
            is_unpriced, versions, rows, *numbers = row
            found = UsageSums(*map(int, numbers))
            if is_unpriced and is_focus:
                left_out = found
                continue
            num_rows += int(rows)
            sums += found
            self._version_ids |= set(versions) - {UNPRICED}
        return ExportTotals(num_rows, sums, left_out)

    def versions(self) -> list[PriceVersion]:
        """The versions that priced the rows; after `totals`."""
        book = read_book(self._driver)
        return [book.by_id[PriceVersionId(number)] for number in sorted(self._version_ids)]

    def slices(self) -> list[Slice]:
        """The range in pieces."""
        span, calendar = self._request.span, self._books.calendar
        counts = self._driver.execute(_BUCKETS, {"begin": span.begin, "end": span.end}).fetchall()
        slices: list[Slice] = []
        begin, num = span.begin, 0
        period = calendar.period_of(begin)
        for bucket, count in counts:
            while bucket >= period.ends_at:
                _cut(slices, begin, period.ends_at, period)
                begin, num, period = period.ends_at, 0, calendar.next_period(period)
            if num and num + count > SLICE_REQUESTS:
                _cut(slices, begin, bucket, period)
                begin, num = bucket, 0
            num += count
        while span.end > period.ends_at:
            _cut(slices, begin, period.ends_at, period)
            begin, period = period.ends_at, calendar.next_period(period)
        _cut(slices, begin, span.end, period)
        return slices

    def lines(self, piece: Slice, *, is_closed: bool) -> Iterator[bytes]:
        """The rows of a slice, each as one line of CSV."""
        request = self._request
        is_focus = request.format is ExportFormat.FOCUS
        expressions = FOCUS if is_focus else USAGE
        source = FROM_PRICED if is_focus else FROM_FACTS
        selected = ", ".join(expressions.get(column.name, "null") for column in columns_of(request))
        # Rows are sorted while they are narrow, and only then made into texts.
        wanted = sorted(set(_REFERENCE.findall(selected)))
        narrow = ", ".join(f"{table}.{name} as {table}_{name}" for table, name in wanted)
        shown = _REFERENCE.sub(r"\1_\2", selected)
        query = f"copy (select {shown} from (select {narrow} {source}) s) to stdout (format csv)"
        with self._driver.cursor() as cursor, cursor.copy(query, self._values(piece, is_closed)) as copy:
            for line in copy:
                yield bytes(line)

    def _values(self, piece: Slice, is_closed: bool) -> dict[str, Any]:
        days = days_of(TimeRange(piece.begin, piece.end, self._request.span.timezone))
        return {
            "begin": piece.begin,
            "end": piece.end,
            "currency": self._books.currency,
            "period_begin": _moment(piece.period.begins_at),
            "period_end": _moment(piece.period.ends_at),
            "period_begins_at": piece.period.begins_at,
            "invoice": f"{piece.period.id}-" if is_closed else None,
            "day_begins": [begin for begin, _ in days],
            "day_names": [name for _, name in days],
        }


@contextmanager
def open_snapshot(books: Books, request: ExportRequest) -> Iterator[ExportSnapshot]:
    """A transaction that sees one moment and leaves nothing behind. Raises StoreUnavailable."""
    try:
        with books.engine.connect() as connection:
            connection.execute(text("set transaction isolation level repeatable read"))
            connection.execute(text("set local statement_timeout = 0"))
            for setting in _SETTINGS:
                connection.execute(text(f"set local {setting}"))
            snapshot = ExportSnapshot(books, request, connection)
            snapshot.prepare()
            yield snapshot
            connection.rollback()
    except UNAVAILABLE as error:
        raise StoreUnavailable("PostgreSQL gave no answer") from error


def _only(wanted: UsageFilter) -> tuple[str, Mapping[str, str]]:
    columns = {"tenant_id": "tenant_id", "key_id": "key_id", "model": "served_model"}
    given = wanted.fields()
    return " and ".join(f"{columns[name]} = %({name})s" for name in given) or "true", given


def _cut(slices: list[Slice], begin: datetime, end: datetime, period: Period) -> None:
    if begin < end:
        slices.append(Slice(begin, end, period))


def _moment(at: datetime) -> str:
    return at.isoformat(timespec="seconds").replace("+00:00", "Z")
