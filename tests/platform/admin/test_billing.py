"""Use, prices, months, files and reconciliation over HTTP: one total everywhere, each within its role."""

from __future__ import annotations

import csv
import hashlib
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest

from footplate.billing.reconcile import EngineCount, EngineCounts, Reservations, WaitingEvents
from footplate.billing.usage import EventId, UsageEvent
from tests.billing.builders import event
from tests.platform.admin.conftest import World
from tests.platform.admin.test_audit import PRICES

NOVEMBER = "from=2026-11-01&to=2026-12-01"
NOON = datetime(2026, 11, 1, 12, tzinfo=UTC)
DECEMBER = datetime(2026, 12, 1, 3, tzinfo=UTC)


def use(world: World, **options: Any) -> UsageEvent:
    """A request of the team, at noon of the first."""
    made = event(**{"tenant_id": world.team, "started_at": NOON, **options})
    world.events.commit([made])
    return made


def filled(world: World) -> None:
    world.ok("POST", "prices", {**PRICES, "batch_multiplier": "0.5"})
    use(world, tokens=(200, 800, 50), labels=(("app", "chat"),))
    use(world, tokens=(10, 0, 10), batch_id="b", cost_center="7")
    use(world, tokens=(5, 0, 5), tenant_id=world.other, key_id="k2")
    use(world, tokens=(3, 0, 0), served="new", tenant_id=world.other)


def sums(rows: list[dict[str, Any]]) -> dict[str, Any]:
    names = ("requests", "input_tokens", "cached_input_tokens", "output_tokens", "total_tokens")
    totals: dict[str, Any] = {name: sum(row[name] for row in rows) for name in names}
    cost = sum((Decimal(row["cost"]) for row in rows), Decimal())
    return {**totals, "cost": f"{cost.normalize():f}"}


def test_every_grouping_every_page_and_every_file_has_one_total(world: World) -> None:
    """What litellm's users found to differ between pages."""
    filled(world)
    totals = world.ok("GET", f"usage?{NOVEMBER}")["totals"]
    assert totals == {
        "requests": 4,
        "input_tokens": 1018,
        "cached_input_tokens": 800,
        "output_tokens": 65,
        "total_tokens": 1083,
        "cost": "0.00041",
    }
    for group_by in ("tenant", "key", "model", "requested_model", "class", "day", "hour", "cost_center"):
        for more in ("", ",label:app", ",class"):
            if more == ",class" and group_by == "class":
                continue
            found = world.ok("GET", f"usage?{NOVEMBER}&group_by={group_by}{more}")
            assert found["totals"] == sums(found["data"]) == totals, group_by
            assert found["unpriced_requests"] == 1
    paged: list[dict[str, Any]] = []
    after = ""
    while True:
        page = world.ok("GET", f"usage?{NOVEMBER}&group_by=tenant,key,class&limit=2{after}")
        assert page["totals"] == totals
        paged += page["data"]
        if page["next"] is None:
            break
        after = f"&after={page['next']}"
    assert sums(paged) == totals
    made = world.ok("POST", "exports", {"from": "2026-11-01", "to": "2026-12-01", "format": "csv"})
    assert world.ok("GET", f"exports/{made['id']}")["sidecar"]["control_totals"] == totals


def test_a_range_is_of_the_asked_zone_and_the_answer_says_which(world: World) -> None:
    world.ok("POST", "prices", PRICES)
    for at in (
        "2026-11-10T07:59:59.999Z",
        "2026-11-10T08:00:00Z",
        "2026-11-11T07:59:59.999Z",
        "2026-11-11T08:00:00Z",
    ):
        use(world, started_at=datetime.fromisoformat(at))
    found = world.ok("GET", "usage?from=2026-11-10&to=2026-11-11&group_by=day&timezone=America/Los_Angeles")
    assert [(row["day"], row["requests"]) for row in found["data"]] == [("2026-11-10", 2)]
    assert (found["from"], found["timezone"]) == ("2026-11-10T00:00:00-08:00", "America/Los_Angeles")
    east = world.ok("GET", "usage?from=2026-11-10&to=2026-11-12&group_by=day&timezone=Asia/Kolkata")
    assert [(row["day"], row["requests"]) for row in east["data"]] == [("2026-11-10", 2), ("2026-11-11", 2)]


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("from=yesterday", "from"),
        ("from=2026-12-01&to=2026-11-01", "to"),
        ("timezone=Mars", "timezone"),
        ("group_by=colour", "group_by"),
        ("after=x", "after"),
        ("limit=0", "limit"),
        ("limit=10001", "limit"),
        ("limit=many", "limit"),
        ("from=2026-11-01&from=2026-11-02", "from"),
        ("tenant_id=x", "tenant_id"),
        ("from=2020-01-01&group_by=hour", "to"),
    ],
)
def test_what_can_not_be_asked_is_refused_by_name(world: World, query: str, param: str) -> None:
    assert world.refused(400, "invalid_value", "GET", f"usage?{query}")["param"] == param


@pytest.mark.parametrize("field", ["tenant_id", "key_id", "model", "timezone", "from"])
def test_what_no_database_takes_is_refused_in_a_body_and_in_a_path(world: World, field: str) -> None:
    assert world.refused(400, "invalid_value", "POST", "exports", {field: "a\0b"})["param"] == field
    for path in ("exports/%00", "exports/%00/file", "prices/%00"):
        world.refused(404, "not_found", "GET", path)


def test_a_tenants_admin_sees_its_own_use_alone(world: World) -> None:
    filled(world)
    own = {"key": "tenant_admin"}
    whole = world.ok("GET", f"usage?{NOVEMBER}&group_by=tenant")["data"]
    mine = world.ok("GET", f"usage?{NOVEMBER}&group_by=tenant", **own)
    assert mine["data"] == [row for row in whole if row["tenant"] == world.team]
    world.refused(404, "not_found", "GET", f"usage?tenant_id={world.other}", **own)
    world.refused(404, "not_found", "POST", "exports", {"tenant_id": world.other}, **own)
    made = world.ok("POST", "exports", {"from": "2026-11-01", "to": "2026-11-02"}, **own)
    text = world.call("GET", f"exports/{made['id']}/file", **own).text
    assert {row["tenant_id"] for row in csv.DictReader(text.splitlines())} == {world.team}
    theirs = world.ok("POST", "exports", {"tenant_id": world.other})
    for path in (f"exports/{theirs['id']}", f"exports/{theirs['id']}/file"):
        world.refused(404, "not_found", "GET", path, **own)
    world.refused(404, "not_found", "GET", f"periods/2026-11/statements/{world.other}", **own)


def test_a_file_is_the_one_that_its_sidecar_tells_of(world: World) -> None:
    filled(world)
    for kind in ("csv", "parquet", "jsonl", "xlsx", "focus"):
        made = world.ok("POST", "exports", {"from": "2026-11-01", "to": "2026-12-01", "format": kind})
        shown = world.ok("GET", f"exports/{made['id']}", key="finance")
        response = world.call("GET", f"exports/{made['id']}/file", key="finance")
        assert hashlib.sha256(response.content).hexdigest() == shown["sidecar"]["sha256"]
        assert shown["file_name"] in response.headers["content-disposition"]
        assert (shown["state"], shown["rows_done"]) == ("completed", shown["sidecar"]["rows"])


def test_a_file_is_kept_for_a_week_and_one_whose_process_died_says_so(world: World) -> None:
    world.ok("POST", "prices", PRICES)
    made = world.ok("POST", "exports", {})
    world.pass_time(days=8)
    world.ok("POST", "exports", {})
    assert world.ok("GET", f"exports/{made['id']}")["state"] == "expired"
    assert "expired" in str(world.refused(404, "not_found", "GET", f"exports/{made['id']}/file"))
    with world.engine.begin() as connection:
        connection.exec_driver_sql("update billing.exports set state = 'running'")
    world.pass_time(minutes=2)
    lost = world.ok("GET", f"exports/{made['id']}")
    assert (lost["state"], lost["error"]) == ("failed", "the process that wrote it ended; ask for it again")


def test_a_repeated_export_is_one(world: World) -> None:
    first = world.ok("POST", "exports", {"format": "jsonl"}, idempotency_key="k")
    assert world.ok("POST", "exports", {"format": "jsonl"}, idempotency_key="k")["id"] == first["id"]
    world.refused(409, "idempotency_key_reused", "POST", "exports", {"format": "csv"}, idempotency_key="k")


def test_prices_follow_one_another_and_rate_what_waited(world: World) -> None:
    filled(world)
    second = {
        **PRICES,
        "models": {**PRICES["models"], "new": PRICES["models"]["m"]},
        "batch_multiplier": "0.5",
    }
    preview = world.ok("POST", "prices/preview", {"prices": second, "period": "2026-11"}, key="finance")
    assert {(change["kind"], change["model"]) for change in preview["changes"]} == {("added", "new")}
    assert preview["simulation"]["models_without_a_price"] == []
    assert preview["simulation"]["simulated_cost"] == "0.000413"
    assert preview["simulation"]["actual_cost"] == "0.00041"
    made = world.ok("POST", "prices", second, idempotency_key="k")
    assert world.ok("POST", "prices", second, idempotency_key="k") == made
    listed = world.ok("GET", "prices", key="auditor")["data"]
    assert [(row["id"], row["is_in_force"]) for row in listed] == [("1", False), ("2", True)]
    assert world.ok("GET", "prices/2") == listed[1]
    found = world.ok("GET", f"usage?{NOVEMBER}")
    assert (found["unpriced_requests"], found["totals"]["cost"]) == (0, "0.000413")
    cheaper = {**PRICES, "models": {"m": {"input": "0", "cached_input": "0", "output": "0"}}}
    error = world.refused(409, "price_in_force", "POST", "prices", cheaper)
    assert "let the version begin later" in error["message"]
    assert world.records()[-1]["code"] == "price_in_force"
    for body, param in (
        ({**PRICES, "currency": "EUR"}, "currency"),
        ({**PRICES, "effective_from": "soon"}, "effective_from"),
        ({**PRICES, "models": {"m": {"input": "-1", "cached_input": "0", "output": "0"}}}, "models.m.input"),
        (
            {**PRICES, "models": {"m": {"input": "0.0000001", "cached_input": "0", "output": "0"}}},
            "models.m.input",
        ),
    ):
        assert world.refused(400, "invalid_value", "POST", "prices", body)["param"] == param


def test_reports_and_files_of_one_tenant_are_in_its_own_time_zone(world: World) -> None:
    """Two tenants, two zones; a day there has 25 hours, and all tenants together have those of the books."""
    world.ok("POST", "prices", PRICES)
    for tenant_id, zone in ((world.team, "America/Los_Angeles"), (world.other, "Asia/Kolkata")):
        assert world.ok("PATCH", f"tenants/{tenant_id}", {"timezone": zone})["timezone"] == zone
        # Clocks go back in Los Angeles on the first of November: the day is from 07:00 to 08:00 in UTC.
        for hour in (6, 7, 31, 32):
            began = datetime(2026, 11, 1, tzinfo=UTC) + timedelta(hours=hour)
            use(world, tokens=(1, 0, 0), tenant_id=tenant_id, started_at=began)
    query = "usage?from=2026-11-01&to=2026-11-02&group_by=hour"
    found = world.ok("GET", query, key="tenant_admin")
    assert (found["timezone"], found["from"], found["to"]) == (
        "America/Los_Angeles", "2026-11-01T00:00:00-07:00", "2026-11-02T00:00:00-08:00",
    )  # fmt: skip
    assert [row["hour"] for row in found["data"]] == [
        "2026-11-01T00:00:00-07:00", "2026-11-01T23:00:00-08:00",
    ]  # fmt: skip
    other = world.ok("GET", f"{query}&tenant_id={world.other}", key="finance")
    assert (other["timezone"], other["totals"]["requests"]) == ("Asia/Kolkata", 2)
    assert world.ok("GET", query, key="finance")["timezone"] == "UTC"
    assert world.ok("GET", f"{query}&timezone=UTC", key="tenant_admin")["totals"]["requests"] == 2
    days = {"from": "2026-11-01", "to": "2026-11-02"}
    made = world.ok("POST", "exports", {**days, "tenant_id": world.other}, key="finance")
    shown = world.ok("GET", f"exports/{made['id']}", key="finance")
    assert (shown["timezone"], shown["sidecar"]["timezone"]) == ("Asia/Kolkata", "Asia/Kolkata")
    assert shown["sidecar"]["from"] == "2026-11-01T00:00:00+05:30"
    assert shown["sidecar"]["control_totals"]["requests"] == 2
    # In spring a day has 23 hours.
    spring = world.ok("GET", "usage?from=2026-03-08&to=2026-03-09", key="tenant_admin")
    begin, end = (datetime.fromisoformat(spring[name]) for name in ("from", "to"))
    assert end - begin == timedelta(hours=23)
    world.refused(400, "invalid_value", "PATCH", f"tenants/{world.team}", {"timezone": "../etc/passwd"})
    world.ok("PATCH", f"tenants/{world.team}", {"timezone": None})
    assert world.ok("GET", query, key="tenant_admin")["timezone"] == "UTC"


def test_finance_closes_a_month_once_it_adds_up(world: World) -> None:
    filled(world)
    assert [(row["id"], row["state"]) for row in world.ok("GET", "periods", key="finance")["data"]] == [
        ("2026-11", "open")
    ]
    error = world.refused(409, "period_not_closable", "POST", "periods/2026-11/close", key="finance")
    assert "not over" in error["message"] and "have no price" in error["message"]
    world.ok(
        "POST",
        "prices",
        {**PRICES, "models": {**PRICES["models"], "new": PRICES["models"]["m"]}, "batch_multiplier": "0.5"},
    )
    world.pass_time(days=30, hours=2)
    closed = world.ok("POST", "periods/2026-11/close", key="finance", idempotency_key="k")
    assert (closed["state"], closed["totals"]["requests"]) == ("closed", 4)
    assert closed["totals"]["cost"] == {"USD": "0.000413"}
    assert world.ok("POST", "periods/2026-11/close", key="finance", idempotency_key="k") == closed
    world.refused(409, "period_closed", "POST", "periods/2026-11/close", key="finance")
    record = world.records()[-2]
    assert (record["action"], record["target"]["id"]) == ("period.close", "2026-11")
    before = world.ok("GET", f"usage?{NOVEMBER}&group_by=tenant,class")
    made = [world.ok("POST", "exports", {"from": "2026-11-01", "to": "2026-12-01", "format": "focus"})]
    use(world, tokens=(9, 9, 9))
    made.append(world.ok("POST", "exports", {"from": "2026-11-01", "to": "2026-12-01", "format": "focus"}))
    files = [world.call("GET", f"exports/{each['id']}/file").content for each in made]
    assert files[0] == files[1]
    assert world.ok("GET", f"usage?{NOVEMBER}&group_by=tenant,class") == before
    assert [row["id"] for row in world.ok("GET", "periods?limit=1")["data"]] == ["2026-11"]
    assert [row["id"] for row in world.ok("GET", "periods?after=2026-11")["data"]] == ["2026-12"]
    world.refused(404, "not_found", "POST", "periods/2026-13/close", key="finance")


def test_a_statement_is_a_page_without_anything_from_elsewhere(world: World) -> None:
    filled(world)
    response = world.call("GET", f"periods/2026-11/statements/{world.team}", key="tenant_admin")
    assert response.status_code == 200 and response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.headers["content-security-policy"].startswith("default-src 'none'")
    assert "batch discount" in response.text and "The period is open" in response.text


def test_a_reconciliation_explains_or_lists_each_difference(world: World) -> None:
    world.ok("POST", "prices", PRICES)
    right, lost, other = (use(world, tokens=(1, 0, 10), is_estimated=number == 1) for number in range(3))
    world.engine_counts = EngineCounts(
        {right.event_id: EngineCount(12, 10), lost.event_id: EngineCount(14, 14)}, NOON - timedelta(hours=1)
    )
    found = world.ok("GET", "reconciliation", key="finance")
    assert found["state"] == "differs"
    assert found["counts"] == {"estimated": 1, "not_at_engines": 1}
    assert [row["subject"] for row in found["unexplained"]] == [other.event_id]
    assert found["engines"] == {
        "requests": 2, "produced_tokens": 26, "delivered_tokens": 24, "discarded_tokens": 2,
    }  # fmt: skip
    world.engine_counts = EngineCounts({each.event_id: EngineCount(10, 10) for each in (right, lost, other)})
    assert world.ok("GET", "reconciliation")["state"] == "balanced"
    assert found["sources"] == {"ledger": True, "engines": True, "reservations": False, "journals": True}
    made = {each.event_id: EngineCount(10, 10) for each in (right, lost, other)}
    ids = [EventId(name) for name in ("req_runs", "req_dead", "req_waits", "req_gone")]
    world.engine_counts = EngineCounts({**made, **dict.fromkeys(ids, EngineCount(3, 3))})
    world.reservations = Reservations(frozenset(ids[:1]), frozenset(ids[1:2]), world.now)
    world.waiting_events = WaitingEvents(frozenset(ids[2:3]))
    found = world.ok("GET", "reconciliation")
    assert found["counts"] == {
        "still_running": 1, "waits_for_reaper": 1, "waits_in_journal": 1, "not_in_ledger": 1,
    }  # fmt: skip
    assert (found["reservations"], found["sources"]["reservations"]) == ({"held": 1, "lost": 1}, True)
    assert found["backlog"] == {"events_in_journals": 1, "events_refused": 0}
    # Of another month: neither missing there, nor counted.
    world.engine_counts = EngineCounts(made)
    found = world.ok("GET", "reconciliation?from=2026-10-01&to=2026-11-01")
    assert (found["state"], found["engines"]["requests"]) == ("balanced", 0)


def test_without_books_there_is_nothing_to_read(world: World) -> None:
    object.__setattr__(world.desk, "billing", None)
    world.refused(404, "not_found", "GET", "usage")
