"""Rows a second and memory of exports, from an embedded PostgreSQL that holds a month of events.

    python billing/benchmarks/bench_exports.py [--events 1000000] [--formats focus,csv] [--output FILE]

Events, postings and rollups are written by the database itself, as a commit would leave them: 100 tenants of
three keys and five models, every second event in a batch. Server and export share the machine. Memory is that
of the exporting process, at its highest. A row is one class of tokens of one event.

The floor is what nobody gets below: the rows of the FOCUS file stand in a table as they are, and a plain
COPY of all its columns goes to a file. A workbook gets as much of the month as a sheet holds, after the whole
month was refused.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from bench_events import BEGIN, MODELS, NUM_KEYS, NUM_TENANTS, environment, running_books, server_cpu_s
from sqlalchemy import text

from footplate.billing.adapters.postgres.books import Books, connect
from footplate.billing.adapters.postgres.export_file import write_export
from footplate.billing.errors import InvalidReport
from footplate.billing.exports.columns import focus_columns
from footplate.billing.exports.request import ExportFormat, ExportRequest, FocusVersion
from footplate.billing.periods import BillingCalendar
from footplate.billing.time_ranges import TimeRange

RESULTS = Path(__file__).parent / "results"
MAX_FLOOR_ROWS = 1_000_000
# Of three rows each, as many as a sheet of a workbook holds.
SHEET_EVENTS = 349_000
_TOKENS = "input_uncached, input_cached, output, reasoning, discarded"
_FILL = f"""
insert into billing.dimensions
    (digest, tenant_id, key_id, requested_model, served_model, cost_center, labels, is_batch)
select int4send(n::int), 'tnt_' || lpad((n % {NUM_TENANTS})::text, 16, '0'),
       'key_' || n / {NUM_TENANTS} % {NUM_KEYS}, model, model, '4200', '{{"team": "search"}}', batch
from (select row_number() over () as n, model, batch
      from generate_series(1, {NUM_TENANTS * NUM_KEYS}) k
      cross join unnest(:models ::text[]) as model cross join (values (true), (false)) as b (batch)) all_of;
"""
_EVENTS = f"""
insert into billing.events (event_id, dimension_id, endpoint, batch_id, started_at, effective_at, state,
    is_estimated, ended_at, {_TOKENS})
select 'req_' || lpad(n::text, 32, '0'), d.ids[1 + (hashint8(n) & 2147483647) % cardinality(d.ids)],
       '/v1/chat/completions', null, at, at, 'completed', false, at + interval '2 seconds',
       900 - n % 900, n % 900, 1 + n % 499, 0, 0
from (select n, cast(:begin as timestamptz) + n * cast(:step as interval) as at
      from generate_series(0, :last) as n) as numbered
cross join (select array_agg(id order by id) as ids from billing.dimensions) d
"""
_POSTINGS = f"""
insert into billing.postings (event_seq, seq, kind, dimension_id, price_version, currency, effective_at,
    requests, {_TOKENS}, gross_input, gross_cached_input, gross_output,
    discount_input, discount_cached_input, discount_output)
select e.seq, 0, 'usage', e.dimension_id, 1, 'USD', effective_at, 1, {_TOKENS.replace("output", "e.output")},
       input_uncached * m.input, input_cached * m.cached_input, e.output * m.output,
       input_uncached * m.input * off, input_cached * m.cached_input * off, e.output * m.output * off
from billing.events e join billing.dimensions d on d.id = e.dimension_id
join billing.model_prices m on m.model = d.served_model
cross join lateral (select case when d.is_batch then 0.5 else 0 end as off) o order by e.seq
"""
_SUMS = ", ".join(
    f"sum({name})"
    for name in f"requests, {_TOKENS}, gross_input, gross_cached_input, gross_output, discount_input, "
    "discount_cached_input, discount_output".split(", ")
)
_ROLLUPS = (
    f"""insert into billing.rollups_quarter_hour
select date_bin('15 minutes', effective_at, '2000-01-01'), dimension_id, 1, false, {_SUMS}
from billing.postings group by 1, 2""",
    f"""insert into billing.rollups_day
select (effective_at at time zone 'UTC')::date, dimension_id, 1, false, {_SUMS}
from billing.postings group by 1, 2""",
)


def fill(url: str, num_events: int) -> None:
    """A month of events, as commits would have left it."""
    month = BillingCalendar().period_of(BEGIN)
    step = (month.ends_at - month.begins_at) / num_events
    engine = connect(url)
    statements: list[tuple[str, dict[str, Any]]] = [
        (_FILL, {"models": list(MODELS)}),
        (_EVENTS, {"begin": BEGIN, "step": step, "last": num_events - 1}),
        (_POSTINGS, {}),
        *((statement, {}) for statement in _ROLLUPS),
    ]
    for statement, values in statements:
        with engine.begin() as connection:
            connection.execute(text("set local statement_timeout = 0"))
            connection.execute(text("set local synchronous_commit = off"))
            connection.execute(text(statement), values)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("set statement_timeout = 0"))
        connection.execute(text("vacuum analyze"))
    engine.dispose()


def export(url: str, kind: str, folder: str, share: float, results: Any) -> None:
    """One export of the first `share` of the month, in a process of its own; what it took."""
    books = Books(connect(url, pool_size=1))
    month = books.calendar.period_of(BEGIN)
    end = month.begins_at + (month.ends_at - month.begins_at) * share
    request = ExportRequest(TimeRange(month.begins_at, end), ExportFormat(kind))
    began = time.perf_counter()
    path = Path(folder) / f"file{request.format.suffix}"
    try:
        sidecar = write_export(books, request, path, lambda done, total: None)
    except InvalidReport as error:
        results.put({"format": kind, "refused": str(error), "seconds": round(time.perf_counter() - began, 2)})
        return
    took_s = time.perf_counter() - began
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    results.put(
        {
            "format": kind,
            "rows": sidecar["rows"],
            "seconds": round(took_s, 2),
            "rows_per_s": round(sidecar["rows"] / took_s),
            "max_rss_mb": round(own.ru_maxrss / 1024),
            "cpu_s": round(own.ru_utime + own.ru_stime + children.ru_utime, 2),
            "file_mb": round(sidecar["bytes"] / 1e6, 1),
            "cost": sidecar["control_totals"]["cost"],
        }
    )


def measure(url: str, data_dir: Path, kind: str, folder: str, share: float = 1.0) -> dict[str, Any]:
    """What an export took, with the server's part of it."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    server_s = server_cpu_s(data_dir)
    process = context.Process(target=export, args=(url, kind, folder, share, results))
    process.start()
    found: dict[str, Any] = results.get()
    process.join()
    if "rows" in found:
        # Fair on a machine that is busy with other work, where rows a second are not.
        found["server_us_per_row"] = round((server_cpu_s(data_dir) - server_s) / found["rows"] * 1e6, 1)
        found["export_us_per_row"] = round(found.pop("cpu_s") / found["rows"] * 1e6, 1)
    return found


def measure_floor(url: str, folder: str) -> dict[str, Any]:
    """A plain COPY of the FOCUS file's rows, all columns, from a table to a file."""
    columns = [column.name for column in focus_columns(FocusVersion.V1_2)]
    named = ", ".join(f'"{name}" text' for name in columns)
    engine = connect(url, pool_size=1)
    raw = engine.raw_connection()
    driver = raw.driver_connection
    assert driver is not None
    driver.execute("set statement_timeout = 0")
    driver.execute(f"create unlogged table finished_rows ({named})")
    num_rows = 0
    with (
        (Path(folder) / "file.csv").open("rb") as file,
        driver.cursor() as cursor,
        cursor.copy("copy finished_rows from stdin (format csv, header true)") as copy,
    ):
        for line in file:
            copy.write(line)
            num_rows += 1
            if num_rows > MAX_FLOOR_ROWS:
                break
    driver.commit()
    took = []
    for _ in range(3):
        began = time.perf_counter()
        with (
            (Path(folder) / "floor.csv").open("wb") as file,
            driver.cursor() as cursor,
            cursor.copy("copy finished_rows to stdout (format csv)") as copy,
        ):
            for block in copy:
                file.write(block)
        took.append(time.perf_counter() - began)
    driver.execute("drop table finished_rows")
    driver.commit()
    raw.close()
    engine.dispose()
    seconds = statistics.median(took)
    return {"rows": num_rows - 1, "seconds": round(seconds, 2), "rows_per_s": round((num_rows - 1) / seconds)}


def main() -> None:
    """Measure and write a JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--formats", default="focus,csv,parquet,jsonl,xlsx")
    parser.add_argument("--output", type=Path, default=RESULTS / "exports.json")
    given = parser.parse_args()
    measured: list[dict[str, Any]] = []
    found: dict[str, Any] = {"events": given.events, **environment(), "load_before": os.getloadavg()}
    with running_books() as (url, data_dir), tempfile.TemporaryDirectory(prefix="bench-exports-") as folder:
        began = time.perf_counter()
        fill(url, given.events)
        print(f"filled in {time.perf_counter() - began:.0f} s", flush=True)
        for kind in given.formats.split(","):
            each = measure(url, data_dir, kind, folder)
            measured.append(each)
            print(each, flush=True)
            if "refused" in each:
                measured.append(measure(url, data_dir, kind, folder, SHEET_EVENTS / given.events))
                print(measured[-1], flush=True)
            if kind == ExportFormat.FOCUS:
                found["floor"] = measure_floor(url, folder)
                each["times_the_floor"] = round(found["floor"]["rows_per_s"] / each["rows_per_s"], 2)
                print(found["floor"], each["times_the_floor"], flush=True)
            for path in Path(folder).iterdir():
                path.unlink()
    found |= {"exports": measured, "load_after": os.getloadavg()}
    given.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
