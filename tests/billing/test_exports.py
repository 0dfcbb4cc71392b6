"""Files that add up: fixed columns, exact decimals, safe cells, for a closed month the same bytes."""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
from focus_data_toolkit.model.validator import lint_focus_1_4_structure
from focus_data_toolkit.schema.detection import detect_focus_schema
from sqlalchemy import text

import footplate.billing.adapters.postgres.export_rows as export_rows
from footplate.billing.adapters.postgres.export_file import write_export
from footplate.billing.adapters.postgres.report_reader import PostgresReportReader
from footplate.billing.errors import ExportDiffers, InvalidReport
from footplate.billing.exports.columns import USAGE, ColumnKind, columns_of
from footplate.billing.exports.request import (
    MAX_SHEET_ROWS,
    ExportFormat,
    ExportRequest,
    FocusVersion,
    refuse_long_sheet,
)
from footplate.billing.prices import ModelPrices
from footplate.billing.reports import ReportQuery, UsageFilter
from footplate.billing.time_ranges import TimeRange, parse_range
from footplate.billing.usage import TenantId
from tests.billing.builders import NOON, NOVEMBER, USUAL, OpenBooks, event, open_books, price_list

DECEMBER = datetime(2026, 12, 1, tzinfo=UTC)
MONTH = TimeRange(NOVEMBER, DECEMBER)
CLOSING = DECEMBER + timedelta(hours=2)
Write = Callable[..., tuple[bytes, dict[str, Any]]]


@pytest.fixture
def write(books: OpenBooks, tmp_path: Path) -> Write:
    """Exports from the books: the file and what stands beside it."""

    def make(
        kind: str = "csv", span: TimeRange = MONTH, focus: str = "1.2", only: UsageFilter | None = None
    ) -> tuple[bytes, dict[str, Any]]:
        request = ExportRequest(span, ExportFormat(kind), FocusVersion(focus), only or UsageFilter())
        path = tmp_path / f"file{request.format.suffix}"
        sidecar = write_export(books.books, request, path, lambda done, total: None)
        data = path.read_bytes()
        assert sidecar["sha256"] == hashlib.sha256(data).hexdigest() and sidecar["bytes"] == len(data)
        assert ExportRequest.from_fields(json.loads(json.dumps(request.to_fields()))) == request
        return data, sidecar

    return make


def rows_of(data: bytes) -> list[dict[str, str]]:
    return list(csv.DictReader(data.decode().splitlines()))


def some(books: OpenBooks) -> None:
    """One of everything: cached, batch, free, unpriced, mended, of another model, of another tenant."""
    books.prices.add(
        price_list(NOVEMBER, m=USUAL, dear=ModelPrices(2, 333_334, 10**12), free=ModelPrices(0, 0, 0)),
        imported_by="test",
    )
    guess = event(tokens=(100, 0, 7), is_estimated=True, started_at=NOON + timedelta(hours=1))
    rebooked = event(tokens=(5, 0, 5), is_estimated=True)
    books.events.commit(
        [
            event(tokens=(200, 800, 50, 20, 3), labels=(("app", "chat"), ("env", "prod"))),
            event(tokens=(1, 3, 7), batch_id="batch_1", cost_center="=HYPERLINK(1)"),
            event(served="dear", tokens=(123_457, 0, 999_999), tenant_id="tnt_b"),
            event(served="free", tokens=(1, 1, 1)),
            event(served="new", tokens=(11, 0, 2)),
            event(tokens=(0, 0, 0)),
            guess,
            rebooked,
        ]
    )
    books.events.commit(
        [
            event(guess.event_id, tokens=(90, 10, 7), started_at=guess.started_at),
            event(rebooked.event_id, tokens=(4, 0, 4), served="dear"),
        ]
    )


def test_rows_sum_to_the_sidecar_and_to_the_reports_in_every_format(books: OpenBooks, write: Write) -> None:
    some(books)
    shown = PostgresReportReader(books.books).report(ReportQuery(MONTH)).totals
    for kind in ExportFormat:
        data, sidecar = write(kind.value)
        left_out = sidecar["left_out_for_want_of_a_price"]
        totals = sidecar["control_totals"]
        assert totals["cost"] == shown.fields()["cost"]
        for name in ("requests", "input_tokens", "total_tokens"):
            assert totals[name] + left_out[name] == shown.fields()[name]
        assert (sidecar["timezone"], sidecar["currency"]) == ("UTC", "USD")
        assert sidecar["price_versions"][-1] == {"id": "2", "effective_from": "2026-11-01T00:00:00Z"}
        assert sidecar["periods"] == [{"id": "2026-11", "state": "open", "closed_at": None}]
        if kind is ExportFormat.CSV:
            rows = rows_of(data)
            assert list(rows[0]) == [column.name for column in USAGE] == sidecar["columns"]
            assert sidecar["rows"] == len(rows)
            assert sum(int(row["requests"]) for row in rows) == totals["requests"]
            assert sum(int(row["quantity"]) for row in rows) == totals["total_tokens"]
            assert sum(Decimal(row["cost"] or 0) for row in rows) == Decimal(str(totals["cost"]))


def test_quantity_times_unit_price_is_the_cost_exactly_in_every_row(books: OpenBooks, write: Write) -> None:
    some(books)
    rows = rows_of(write()[0])
    for row in rows:
        if row["unit_price"]:
            assert Decimal(row["unit_price"]) * int(row["quantity"]) == Decimal(row["cost"])
            assert len(row["cost"].partition(".")[2]) == 12
        else:
            assert (row["model"], row["cost"], row["price_version"]) == ("new", "", "")
    batch = {row["token_class"]: row for row in rows if row["batch_id"]}
    assert {name: row["unit_price"] for name, row in batch.items()} == {
        "input": "0.000000500000",
        "cached_input": "0.000000050000",
        "output": "0.000001000000",
    }
    assert Decimal(batch["output"]["list_cost"]) == 2 * Decimal(batch["output"]["cost"])


def test_text_that_looks_like_a_formula_is_not_run(books: OpenBooks, write: Write) -> None:
    signs = "=+-@\uff1d\uff0b\uff0d\uff20"
    for number, sign in enumerate(signs):
        books.events.commit(
            [event(cost_center=f"{sign}1+1", model=f"{sign}cmd", served="m", key_id=f"k{number}")]
        )
    for kind in ("csv", "focus"):
        for row in rows_of(write(kind)[0]):
            for value in row.values():
                # Numbers may begin with a sign.
                assert not value.startswith(("=", "+", "@", "\t", "\r")) and not value.startswith("-1+")
    assert {row["cost_center"] for row in rows_of(write()[0])} == {f"'{sign}1+1" for sign in signs}
    lines = [json.loads(line) for line in write("jsonl")[0].splitlines()]
    assert {line["cost_center"] for line in lines} == {f"{sign}1+1" for sign in signs}


def test_json_lines_hold_numbers_flags_and_nulls(books: OpenBooks, write: Write) -> None:
    some(books)
    lines = [json.loads(line) for line in write("jsonl")[0].splitlines()]
    cached = next(line for line in lines if line["token_class"] == "cached_input" and not line["batch_id"])
    assert (cached["quantity"], cached["unit_price"], cached["cost"]) == (
        800,
        "0.000000100000",
        "0.000080000000",
    )
    assert (cached["is_estimated"], cached["batch_id"], cached["price_version"]) == (False, None, 2)
    assert json.loads(cached["labels"]) == {"app": "chat", "env": "prod"}
    assert next(line for line in lines if line["model"] == "new")["cost"] is None


def test_parquet_holds_decimals_and_moments(books: OpenBooks, write: Write, tmp_path: Path) -> None:
    some(books)
    write("parquet")
    table = parquet.read_table(tmp_path / "file.parquet")
    kinds = {ColumnKind.DECIMAL: arrow.decimal128(38, 12), ColumnKind.MOMENT: arrow.timestamp("us", "UTC")}
    for column in USAGE:
        if column.kind in kinds:
            assert table.schema.field(column.name).type == kinds[column.kind]
    csv_rows = rows_of(write()[0])
    rows = table.to_pylist()
    assert [row["cost"] for row in rows] == [
        Decimal(row["cost"]) if row["cost"] else None for row in csv_rows
    ]
    assert rows[0]["counted_at"] == NOON
    assert {row["cost_center"] for row in rows} == {"42", "=HYPERLINK(1)"}


def test_a_workbook_holds_the_rows_and_exact_totals(books: OpenBooks, write: Write, tmp_path: Path) -> None:
    from zipfile import ZipFile

    some(books)
    data, sidecar = write("xlsx")
    with ZipFile(tmp_path / "file.xlsx") as book:
        sheet = book.read("xl/worksheets/sheet1.xml").decode()
        totals = book.read("xl/worksheets/sheet2.xml").decode()
    assert sheet.count("<row ") == sidecar["rows"] + 1
    assert "<f>" not in sheet and "HYPERLINK" in sheet
    assert f">{sidecar['control_totals']['cost']}<" in totals
    assert write("xlsx")[0] == data


def test_a_workbook_that_would_be_too_long_is_refused() -> None:
    refuse_long_sheet(ExportFormat.CSV, MAX_SHEET_ROWS + 1)
    with pytest.raises(InvalidReport, match="csv or parquet"):
        refuse_long_sheet(ExportFormat.XLSX, MAX_SHEET_ROWS + 1)


@pytest.mark.parametrize("version", ["1.2", "1.4"])
def test_focus_rows_pass_the_checks_of_the_specification(
    books: OpenBooks, write: Write, version: str
) -> None:
    some(books)
    data, sidecar = write("focus", focus=version)
    rows = rows_of(data)
    found = detect_focus_schema(rows[0])
    assert (found.dataset, found.detected_version, found.exact_match) == ("Cost and Usage", version, True), (
        found
    )
    renamed = [_as_1_4(row) for row in rows]
    report = lint_focus_1_4_structure(
        "Cost and Usage",
        renamed,
        supported_conditions=["SupportsUnitPricing", "SupportsMultiplePricingCategories"],
    )
    assert report.ok, report.messages()[:5]
    assert sum(Decimal(row["BilledCost"]) for row in rows) == Decimal(sidecar["control_totals"]["cost"])
    for row in rows:
        cost = Decimal(row["ListUnitPrice"]) * Decimal(row["PricingQuantity"])
        assert cost == Decimal(row["ListCost"]) == Decimal(row["BilledCost"]) == Decimal(row["EffectiveCost"])
        assert row["BillingPeriodStart"] <= row["ChargePeriodStart"] < row["ChargePeriodEnd"]
    skus = {(row["SkuId"], row["SkuPriceId"]) for row in rows}
    assert ("m/cached_input", "m/cached_input@2") in skus and ("m/output/batch", "m/output/batch@2") in skus
    # Nothing without a price is billed; it is said beside the file.
    assert sidecar["left_out_for_want_of_a_price"]["total_tokens"] == 13


def _as_1_4(row: dict[str, str]) -> dict[str, str]:
    """The rules that are checked are those of 1.4; of 1.2 two columns have other names there."""
    names = {"ProviderName": "ServiceProviderName", "PublisherName": "HostProviderName"}
    return {names.get(name, name): value for name, value in row.items()}


def test_the_checker_of_focus_finds_faults(books: OpenBooks, write: Write) -> None:
    """Lest it says yes to everything."""
    some(books)
    rows = [_as_1_4(row) for row in rows_of(write("focus")[0])]
    rows[0]["ListCost"] = "77"
    rows[1]["BillingCurrency"] = "dollars"
    del rows[2]["BilledCost"]
    report = lint_focus_1_4_structure("Cost and Usage", rows)
    assert len(report.violations) == 3


@pytest.mark.parametrize("kind", ["csv", "parquet", "jsonl", "xlsx", "focus"])
def test_a_closed_month_exports_the_same_bytes_whatever_comes_late(
    books: OpenBooks, write: Write, kind: str
) -> None:
    guess = event(tokens=(100, 0, 0), is_estimated=True)
    books.events.commit([event(), guess, event(batch_id="b", tenant_id="tnt_b")])
    books.clock.now = CLOSING
    books.periods.close(books.books.calendar.period("2026-11"), closed_by="key")
    first = write(kind)
    books.events.commit([event(tokens=(7, 0, 0)), event(guess.event_id, tokens=(90, 0, 0))])
    books.prices.add(price_list(CLOSING, m=ModelPrices(4, 4, 4)), imported_by="test")
    assert write(kind) == first
    assert first[1]["periods"] == [{"id": "2026-11", "state": "closed", "closed_at": "2026-12-01T02:00:00Z"}]
    december = TimeRange(DECEMBER, datetime(2027, 1, 1, tzinfo=UTC))
    data, sidecar = write("focus", december)
    assert sorted((row["x_Kind"], row["ChargeClass"], row["BilledCost"]) for row in rows_of(data)) == [
        ("late", "Correction", "0.000007000000"),
        ("recount", "Correction", "-0.000010000000"),
    ]
    assert sidecar["control_totals"]["requests"] == 1


def test_a_price_change_at_noon_leaves_the_morning_as_it_was(books: OpenBooks, write: Write) -> None:
    morning = TimeRange(NOON - timedelta(hours=12), NOON)
    books.events.commit([event(started_at=NOON - timedelta(hours=1))])
    before = write(span=morning)
    books.prices.add(price_list(NOON, m=ModelPrices(8, 8, 8)), imported_by="test")
    books.events.commit([event(started_at=NOON + timedelta(hours=1))])
    assert write(span=morning) == before
    versions = [row["price_version"] for row in rows_of(write()[0])]
    assert versions == ["1", "1", "2", "2"]


def test_two_tenants_have_files_of_their_own_zones(books: OpenBooks, write: Write) -> None:
    """The evening of the ninth in Los Angeles is the tenth in Kolkata; each file says its zone."""
    at = datetime(2026, 11, 10, 4, tzinfo=UTC)
    books.events.commit([event(started_at=at, tenant_id=tenant) for tenant in ("tnt_a", "tnt_b")])
    for tenant, zone, day in (
        ("tnt_a", "America/Los_Angeles", "2026-11-09"),
        ("tnt_b", "Asia/Kolkata", "2026-11-10"),
    ):
        span = parse_range("2026-11-09", "2026-11-11", zone, NOON)
        data, sidecar = write(span=span, only=UsageFilter(TenantId(tenant)))
        assert {(row["tenant_id"], row["day"]) for row in rows_of(data)} == {(tenant, day)}
        assert sidecar["timezone"] == zone and sidecar["from"].startswith("2026-11-09T00:00:00")
        assert sidecar["filter"] == {"tenant_id": tenant}


def test_slices_of_any_size_make_the_same_file(
    books: OpenBooks, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    books.prices.add(price_list(datetime(2026, 9, 1, tzinfo=UTC)), imported_by="test")
    books.events.commit(
        [
            event(started_at=NOVEMBER - timedelta(days=40) + timedelta(hours=7 * number))
            for number in range(300)
        ]
    )
    span = TimeRange(NOVEMBER - timedelta(days=40, minutes=1), DECEMBER + timedelta(days=70, seconds=3))
    whole = write(span=span)
    assert whole[1]["rows"] == 600
    assert [period["id"] for period in whole[1]["periods"]] == [
        "2026-09", "2026-10", "2026-11", "2026-12", "2027-01", "2027-02",
    ]  # fmt: skip
    monkeypatch.setattr(export_rows, "SLICE_REQUESTS", 7)
    assert write(span=span) == whole


def test_an_export_of_nothing_is_a_head_and_zeros(books: OpenBooks, write: Write) -> None:
    for kind in ExportFormat:
        data, sidecar = write(kind.value)
        assert (sidecar["rows"], sidecar["control_totals"]["cost"]) == (0, "0")
        if kind in (ExportFormat.CSV, ExportFormat.FOCUS):
            assert data.decode().count("\n") == 1


def test_25_001_rows_come_whole(books: OpenBooks, write: Write) -> None:
    made = [event(tokens=(1, 0, 0)) for _ in range(25_001)]
    for index in range(0, len(made), 5_000):
        books.events.commit(made[index : index + 5_000])
    data, sidecar = write()
    assert sidecar["rows"] == 25_001 == len({row["event_id"] for row in rows_of(data)})
    assert sidecar["control_totals"]["cost"] == "0.025001"


def test_a_file_that_would_not_add_up_is_not_made(books: OpenBooks, write: Write) -> None:
    books.events.commit([event()])
    change = "update billing.rollups_{} set requests = requests + {}"
    for table in ("day", "quarter_hour"):
        with books.engine.begin() as connection:
            connection.execute(text(change.format(table, 1)))
    with pytest.raises(ExportDiffers, match="run a reconciliation"):
        write()
    for table in ("day", "quarter_hour"):
        with books.engine.begin() as connection:
            connection.execute(text(change.format(table, -1)))


def test_months_are_those_of_the_billing_timezone(books_url: str, tmp_path: Path) -> None:
    with open_books(books_url, timezone="Asia/Kathmandu") as books:
        books.prices.add(price_list(NOVEMBER - timedelta(days=2)), imported_by="test")
        begin = books.books.calendar.period("2026-11").begins_at
        books.events.commit([event(started_at=begin - timedelta(seconds=1)), event(started_at=begin)])
        request = ExportRequest(TimeRange(begin - timedelta(days=1), DECEMBER), ExportFormat.FOCUS)
        write_export(books.books, request, tmp_path / "f", lambda done, total: None)
        starts = [row["BillingPeriodStart"] for row in rows_of((tmp_path / "f").read_bytes())]
        assert starts == ["2026-09-30T18:15:00Z"] * 2 + ["2026-10-31T18:15:00Z"] * 2


def test_schemas_do_not_change_unnoticed() -> None:
    """Whoever loads these files relies on names and order: a change needs a schema of another name."""
    names = {
        request.schema: hashlib.sha256(
            " ".join(each.name for each in columns_of(request)).encode()
        ).hexdigest()[:12]
        for request in (
            ExportRequest(MONTH),
            ExportRequest(MONTH, ExportFormat.FOCUS),
            ExportRequest(MONTH, ExportFormat.FOCUS, FocusVersion.V1_4),
        )
    }
    assert names == {
        "footplate usage 1": "11ec081d57ca",
        "FOCUS 1.2": "a1a0781eabc7",
        "FOCUS 1.4": "48ac90ddd75b",
    }
