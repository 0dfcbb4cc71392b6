"""What rows of exports are made from, read slice by slice in one snapshot.

Slices are of some ten thousand requests in the order of time, and none crosses the end of a month: so memory
is bounded on both sides, whatever the range. The database gives the numbers of each posting as narrow lines
of text, and reads the next slice while the lines of this one are made.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import text

from footplate.billing.adapters.postgres.books import UNAVAILABLE, Books
from footplate.billing.adapters.postgres.price_rows import read_book
from footplate.billing.adapters.postgres.tables import AMOUNT_COLUMNS, SCHEMA, UNPRICED
from footplate.billing.errors import StoreUnavailable
from footplate.billing.exports.cells import safe_text
from footplate.billing.exports.request import ExportFormat, ExportRequest
from footplate.billing.exports.row_layout import Dimension
from footplate.billing.exports.row_lines import FIELDS
from footplate.billing.exports.sidecar import ExportTotals
from footplate.billing.periods import Period
from footplate.billing.prices import PriceBook, PriceVersion, PriceVersionId
from footplate.billing.reports import UsageFilter, UsageSums

SLICE_REQUESTS = 20_000
# A slice is sorted in memory; moments are written as `row_lines` reads them.
_SETTINGS = ("work_mem = '64MB'", "jit = off", "datestyle = 'ISO'", "timezone = 'UTC'")
_NET = " + ".join(AMOUNT_COLUMNS[:3]) + "".join(f" - {name}" for name in AMOUNT_COLUMNS[3:])
# `FIELDS`, where they are no columns of the postings.
_EXPRESSIONS = {
    "event_id": "e.event_id",
    "part": "f.seq",
    "counted_at": "f.effective_at",
    "started_at": "e.started_at",
    "ended_at": "coalesce(r.ended_at, e.ended_at)",
    "endpoint": "e.endpoint",
    "batch_id": "e.batch_id",
    "state": "coalesce(r.state, e.state)",
    "is_estimated": "coalesce(r.is_estimated, e.is_estimated)",
    **{f"net_{name}": f"f.gross_{name} - f.discount_{name}" for name in ("input", "cached_input", "output")},
}
_ROWS = f"""
copy (
    select {", ".join(_EXPRESSIONS.get(name, f"f.{name}") for name in FIELDS)}
    from {SCHEMA}.{{source}} f
    join {SCHEMA}.events e on e.seq = f.event_seq
    left join {SCHEMA}.recounts r on r.event_seq = f.event_seq and f.seq > 0
    where f.effective_at >= %(begin)s and f.effective_at < %(end)s {{only}}
    order by f.effective_at, f.event_seq, f.seq
) to stdout
"""
_DIMENSIONS = f"""
select id, tenant_id, key_id, cost_center, requested_model, served_model, labels::text, is_batch
from {SCHEMA}.dimensions where id = any(%s)
"""
_TOTALS = f"""
select price_version,
       sum((requests <> 0 or input_uncached <> 0)::int + (input_cached <> 0)::int + (output <> 0)::int),
       sum(requests), sum(input_uncached), sum(input_cached), sum(output), sum({_NET})
from {SCHEMA}.usage_facts f where effective_at >= %(begin)s and effective_at < %(end)s {{only}} group by 1
"""
_BUCKETS = f"""
select bucket, sum(requests) from {SCHEMA}.rollups_quarter_hour f
where bucket > %(begin)s - interval '15 minutes' and bucket < %(end)s {{only}} group by 1 order by 1
"""
# Beyond so many dimensions those of earlier slices are read anew.
_MAX_DIMENSIONS = 50_000


@dataclass(frozen=True, slots=True)
class Slice:
    """A piece of the range that lies in one month."""

    begin: datetime
    end: datetime
    period: Period


@dataclass(frozen=True, slots=True)
class SliceRows:
    """Its postings, each a line of `FIELDS` with tabs, and their dimensions by the text of their ids."""

    piece: Slice
    rows: Sequence[str]
    dimensions: Mapping[str, Dimension]


class ExportSnapshot:
    """One moment of the books, as long as it is open; see `open_snapshot`."""

    def __init__(self, books: Books, request: ExportRequest, connection: Any) -> None:
        self._books = books
        self._request = request
        self.connection = connection
        self._driver = connection.connection.driver_connection
        self._version_ids: set[int] = set()
        self._only, self._values = _only(request.filter)
        self.prices: PriceBook = read_book(self._driver)
        self._dimensions: dict[str, Dimension] = {}

    def totals(self) -> ExportTotals:
        """What the file must sum to, read from the events that it is made from."""
        span = self._request.span
        num_rows, sums, left_out = 0, UsageSums(), UsageSums()
        is_focus = self._request.format is ExportFormat.FOCUS
        for version, rows, *numbers in self._ask(_TOTALS, span.begin, span.end):
            found = UsageSums(*map(int, numbers))
            if version == UNPRICED and is_focus:
                left_out = found
                continue
            num_rows += int(rows)
            sums += found
            if version != UNPRICED:
                self._version_ids.add(version)
        return ExportTotals(num_rows, sums, left_out)

    def versions(self) -> list[PriceVersion]:
        """The versions that priced the rows; after `totals`."""
        return [self.prices.by_id[PriceVersionId(number)] for number in sorted(self._version_ids)]

    def slices(self) -> list[Slice]:
        """The range in pieces."""
        span, calendar = self._request.span, self._books.calendar
        counts = self._ask(_BUCKETS, span.begin, span.end)
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

    def rows(self, slices: Sequence[Slice]) -> Generator[SliceRows]:
        """The rows of each slice. The connection belongs to the iterator until it is closed."""
        with ThreadPoolExecutor(1, thread_name_prefix="rows") as threads:
            following = [threads.submit(self._read, piece) for piece in slices[:1]]
            for index in range(len(slices)):
                found = following.pop().result()
                following += [threads.submit(self._read, piece) for piece in slices[index + 1 : index + 2]]
                yield found

    def _read(self, piece: Slice) -> SliceRows:
        source = "postings" if self._request.format is ExportFormat.FOCUS else "usage_facts"
        query = _ROWS.format(source=source, only=self._only)
        values = {"begin": piece.begin, "end": piece.end, **self._values}
        with self._driver.cursor() as cursor, cursor.copy(query, values) as copy:
            rows = b"".join(copy).decode().split("\n")
        # Behind the last line's end.
        rows.pop()
        ids = {row[: row.index("\t")] for row in rows}
        return SliceRows(piece, rows, self._read_dimensions(ids))

    def _read_dimensions(self, ids: set[str]) -> dict[str, Dimension]:
        if len(self._dimensions) > _MAX_DIMENSIONS:
            self._dimensions.clear()
        missing = [int(each) for each in ids if each not in self._dimensions]
        shown = safe_text if self._request.format.is_for_spreadsheets else str
        for number, tenant_id, key_id, cost_center, requested, served, labels, is_batch in (
            self._driver.execute(_DIMENSIONS, (missing,)) if missing else ()
        ):
            self._dimensions[str(number)] = Dimension(
                tenant_id,
                key_id,
                shown(cost_center),
                shown(requested),
                shown(served),
                labels,
                is_batch,
                served,
            )
        return {each: self._dimensions[each] for each in ids}

    def _ask(self, query: str, begin: datetime, end: datetime) -> list[Any]:
        values = {"begin": begin, "end": end, **self._values}
        found: list[Any] = self._driver.execute(query.format(only=self._only), values).fetchall()
        return found


@contextmanager
def open_snapshot(books: Books, request: ExportRequest) -> Iterator[ExportSnapshot]:
    """A transaction that sees one moment and leaves nothing behind. Raises StoreUnavailable."""
    try:
        with books.engine.connect() as connection:
            connection.execute(text("set transaction isolation level repeatable read, read only"))
            connection.execute(text("set local statement_timeout = 0"))
            for setting in _SETTINGS:
                connection.execute(text(f"set local {setting}"))
            yield ExportSnapshot(books, request, connection)
            connection.rollback()
    except UNAVAILABLE as error:
        raise StoreUnavailable("PostgreSQL gave no answer") from error


def _only(wanted: UsageFilter) -> tuple[str, Mapping[str, str]]:
    columns = {"tenant_id": "tenant_id", "key_id": "key_id", "model": "served_model"}
    given = wanted.fields()
    if not given:
        return "", given
    limits = " and ".join(f"{columns[name]} = %({name})s" for name in given)
    return f"and f.dimension_id in (select id from {SCHEMA}.dimensions where {limits})", given


def _cut(slices: list[Slice], begin: datetime, end: datetime, period: Period) -> None:
    if begin < end:
        slices.append(Slice(begin, end, period))
