"""The commands of finance, against the admin API over HTTP: what a clerk gets adds up."""

from __future__ import annotations

import csv
import hashlib
import json
import threading
from pathlib import Path
from typing import Any

import pytest

import footplate.platform.cli.usage as usage_commands
from footplate.billing.exports.request import ExportId
from footplate.billing.reconcile import EngineCounts
from footplate.platform.cli.errors import CommandError
from tests.billing.builders import event
from tests.platform.admin.conftest import World
from tests.platform.admin.test_billing import NOON, filled, sums, use
from tests.platform.admin.test_commands import Run, parsed, run, said, url

__all__ = ["run", "url"]  # fixtures
MONTH = ("--from", "2026-11-01", "--to", "2026-12-01")
YAML = """
effective_from: 2026-11-01T00:00:00Z
currency: USD
batch_multiplier: "0.5"
models:
  m: {input: "1", cached_input: "0.1", output: "2"}
"""


def test_prices_from_a_file_to_what_they_would_have_cost(run: Run, world: World, tmp_path: Path) -> None:
    book = tmp_path / "prices.yaml"
    book.write_text(YAML)
    assert "no prices are in force" in str(run("prices", "show").exception)
    assert "version 1" in said(run("prices", "import", str(book)))
    use(world, tokens=(100, 0, 10))
    table = tmp_path / "next.csv"
    table.write_text("model,input,cached_input,output\nm,2,0.2,4\nn,1,1,1\n")
    options = ("--effective-from", "2026-12-01T00:00:00Z", "--currency", "USD")
    changes = parsed(run("prices", "diff", str(table), *options, "--batch-multiplier", "0.5", "--json"))
    assert {(row["model"], row["kind"]) for row in changes} == {("m", "changed"), ("n", "added")}
    simulated = parsed(run("prices", "simulate", str(table), *options, "--period", "2026-11", "--json"))
    assert (simulated["actual_cost"], simulated["simulated_cost"]) == ("0.00012", "0.00024")
    assert "0.00024" in said(run("prices", "simulate", str(table), *options, "--period", "2026-11"))
    made = parsed(run("prices", "import", str(table), *options, "--json"))
    assert [row["id"] for row in parsed(run("prices", "list", "--json"))] == ["1", made["id"]]
    assert "2026-12-01" in said(run("prices", "list"))
    assert parsed(run("prices", "show", "--json"))["id"] == "1"
    assert "0.2" in said(run("prices", "show", made["id"]))


def test_files_that_are_no_prices_are_refused_in_one_line(run: Run, tmp_path: Path) -> None:
    book = tmp_path / "prices.yaml"
    for text, told in (
        ("models: {m: {input: 0.0000001}}", "effective_from"),
        (YAML.replace('"1"', '"-1"'), "models.m.input"),
        ("a: b: c", "line 1"),
    ):
        book.write_text(text)
        result = run("prices", "import", str(book))
        assert isinstance(result.exception, CommandError) and told in str(result.exception)
        assert "\n" not in str(result.exception)
    assert "No such file" in str(run("prices", "import", str(tmp_path / "none.yaml")).exception)
    table = tmp_path / "next.csv"
    table.write_text("model,input,cached_input,output\n")
    assert run("prices", "import", str(table)).exit_code == 2
    book.write_text(YAML)
    assert run("prices", "import", str(book), "--currency", "EUR").exit_code == 2


def test_a_report_is_a_table_with_its_total_and_json_whole(
    run: Run, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(world)
    found = parsed(run("usage", "report", *MONTH, "--group-by", "tenant,key,class", "--json"))
    assert sums(found["data"]) == found["totals"]
    table = run("usage", "report", *MONTH, "--group-by", "class")
    assert "TOTAL" in said(table) and "0.00041" in table.stdout
    assert "1 requests have no price yet" in table.stderr and "UTC" in table.stderr
    mine = parsed(run("usage", "report", *MONTH, "--tenant", "team", "--json"))
    assert {row["tenant"] for row in mine["data"]} == {world.team}
    asked: list[Any] = []
    whole = usage_commands.AdminClient.ask

    def small(self: Any, method: str, path: str, body: Any = None, **query: Any) -> Any:
        asked.append(path)
        return whole(self, method, path, body, **{**query, "limit": 2})

    monkeypatch.setattr(usage_commands.AdminClient, "ask", small)
    paged = parsed(run("usage", "report", *MONTH, "--group-by", "tenant,key,class", "--json"))
    assert paged["data"] == found["data"] and len(asked) > 2


@pytest.mark.parametrize("kind", ["csv", "focus", "parquet", "jsonl", "xlsx"])
def test_a_clerk_gets_a_file_that_adds_up(run: Run, world: World, tmp_path: Path, kind: str) -> None:
    filled(world)
    out = tmp_path / f"november.{kind}"
    told = run("usage", "export", *MONTH, "--format", kind, "--out", str(out))
    assert "USD" in said(told)
    sidecar = json.loads(out.with_name(out.name + ".json").read_text())
    assert sidecar["sha256"] == hashlib.sha256(out.read_bytes()).hexdigest()
    totals = parsed(run("usage", "report", *MONTH, "--json"))["totals"]
    assert sidecar["control_totals"]["cost"] == totals["cost"]
    if kind == "csv":
        rows = list(csv.DictReader(out.read_text().splitlines()))
        assert len(rows) == sidecar["rows"]
        assert sum(int(row["quantity"]) for row in rows) == totals["total_tokens"]
    if kind == "focus":
        assert "1 requests have no price yet and are not in the file" in told.stderr
    assert not list(tmp_path.glob("*.partial"))


def test_two_tenants_get_files_of_their_own_zones(run: Run, world: World, tmp_path: Path) -> None:
    filled(world)
    for tenant, zone in (("team", "America/Los_Angeles"), ("other", "Asia/Kolkata")):
        out = tmp_path / f"{tenant}.csv"
        sidecar = parsed(
            run(
                "usage", "export", *MONTH, "--tenant", tenant, "--timezone", zone, "--out", str(out), "--json"
            )
        )
        assert sidecar["timezone"] == zone
        shown = parsed(run("usage", "report", *MONTH, "--tenant", tenant, "--timezone", zone, "--json"))
        assert shown["totals"] == sidecar["control_totals"]


def test_an_export_that_fails_leaves_no_file(
    run: Run, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "file.csv"
    monkeypatch.setattr(usage_commands, "_BLOCK", 7)
    use(world)
    run_export = world.exports.run

    def spoil(export_id: ExportId) -> None:
        run_export(export_id)
        for file in world.exports_dir.iterdir():
            file.write_bytes(b"x" + file.read_bytes()[1:])

    object.__setattr__(world.billing, "launch", spoil)
    result = run("usage", "export", "--out", str(out))
    assert "is not the one that was written" in str(result.exception)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == []
    assert "is no folder" in str(run("usage", "export", "--out", str(tmp_path / "no" / "f")).exception)
    with world.engine.begin() as connection:
        connection.exec_driver_sql("update billing.rollups_day set requests = 7")
        connection.exec_driver_sql("update billing.rollups_quarter_hour set requests = 7")
    object.__setattr__(world.billing, "launch", run_export)
    result = run("usage", "export", "--out", str(out))
    assert "failed" in str(result.exception) and "run a reconciliation" in str(result.exception)


def test_25_001_rows_come_whole_through_the_command(run: Run, world: World, tmp_path: Path) -> None:
    for _ in range(5):
        world.events.commit(
            [event(tenant_id=world.team, started_at=NOON, tokens=(1, 0, 0)) for _ in range(5_000)]
        )
    world.events.commit([event(tenant_id=world.team, started_at=NOON, tokens=(1, 0, 0))])
    out = tmp_path / "all.csv"
    sidecar = parsed(run("usage", "export", *MONTH, "--out", str(out), "--json"))
    assert sidecar["rows"] == 25_001
    with out.open() as file:
        assert len({row["event_id"] for row in csv.DictReader(file)}) == 25_001
    keys = [f"k{number}" for number in range(1_200)]
    world.events.commit([event(tenant_id=world.other, key_id=key, started_at=NOON) for key in keys])
    found = parsed(run("usage", "report", *MONTH, "--tenant", "other", "--group-by", "key", "--json"))
    assert [row["key"] for row in found["data"]] == sorted(keys)


def test_a_month_from_open_to_closed_with_its_statement(run: Run, world: World, tmp_path: Path) -> None:
    book = tmp_path / "prices.yaml"
    book.write_text(YAML)
    said(run("prices", "import", str(book)))
    use(world, tokens=(100, 0, 10))
    assert isinstance(run("periods", "close", "2026-11").exception, CommandError)
    world.pass_time(days=30, hours=2)
    assert parsed(run("periods", "close", "2026-11", "--json"))["state"] == "closed"
    assert [row["state"] for row in parsed(run("periods", "list", "--json"))] == ["closed", "open"]
    assert "2026-12" in said(run("periods", "list"))
    out = tmp_path / "statement.html"
    said(run("periods", "statement", "2026-11", "team", "--out", str(out)))
    assert "Statement 2026-11" in out.read_text() and "The period is open" not in out.read_text()
    missing = run("periods", "statement", "2026-11", "nobody", "--out", str(out))
    assert "there is no tenant" in str(missing.exception)


def test_a_difference_without_a_reason_ends_with_a_failure(run: Run, world: World) -> None:
    assert parsed(run("reconcile", "--json"))["state"] == "balanced"
    made = use(world)
    world.engine_counts = EngineCounts({}, NOON)
    result = run("reconcile")
    assert "1 differences have no reason" in str(result.exception) and made.event_id in result.stdout
    world.engine_counts = EngineCounts({})
    shown = run("reconcile")
    assert "engine_forgot" in said(shown) and "reservations could not be asked" in shown.stderr


def test_an_export_is_written_by_a_process_of_its_own(world: World) -> None:
    from footplate.billing.export_process import ExportProcesses
    from footplate.billing.exports.request import ExportRequest, ExportState
    from footplate.billing.time_ranges import TimeRange

    use(world)
    url_text = world.engine.url.render_as_string(hide_password=False)
    processes = ExportProcesses(url_text, "USD", "UTC", world.exports_dir)
    try:
        export = world.exports.add(ExportRequest(TimeRange(NOON, world.now.replace(day=2))), created_by="t")
        is_done = threading.Event()
        processes._threads.submit(processes._run, export.id).add_done_callback(lambda _: is_done.set())
        assert is_done.wait(60)
        found = world.exports.find(export.id)
        assert (found.state, found.rows_done) == (ExportState.COMPLETED, 2)
        assert world.exports.file_of(found).read_text().count("\n") == 3
    finally:
        processes.close()
