"""Kept content is read by administrators only, and each reading is written down before it is answered."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from footplate.tenancy.api_keys import Role
from tests.platform.admin.conftest import World
from tests.platform.admin.test_commands import Run, parsed, run, said, url

__all__ = ["run", "url"]


def test_a_reading_leaves_who_read_whose_record(world: World) -> None:
    capture = world.add_capture(world.team)
    shown = world.ok("GET", f"captures/{capture}")
    assert (shown["prompts"], shown["answers"]) == (["[email] asks"], ["an answer"])
    [record] = world.records()
    assert (record["action"], record["outcome"]) == ("capture.read", "done")
    assert record["actor"]["key_id"] == world.keys["platform_admin"].split("_")[1]
    assert record["target"] == {"kind": "capture", "id": capture}
    assert record["tenant_id"] == world.team
    assert "asks" not in str(record)


def test_a_list_has_no_texts_and_leaves_a_record_too(world: World) -> None:
    world.add_capture(world.team)
    listed = world.call("GET", f"captures?tenant_id={world.team}")
    assert "asks" not in listed.text and listed.json()["data"][0]["redacted"] == {"email": 1}
    [record] = world.records()
    assert (record["action"], record["tenant_id"]) == ("captures.list", world.team)
    assert record["target"]["kind"] == "capture"
    assert record["after"] == {"num_listed": 1, "tenants": [world.team]}


@pytest.mark.parametrize("role", [role for role in Role if role is not Role.PLATFORM_ADMIN])
def test_others_are_refused_and_that_is_written_down(world: World, role: Role) -> None:
    capture = world.add_capture(world.team)
    for path in ("captures", f"captures/{capture}"):
        answer = world.call("GET", path, key=role.value)
        assert answer.status_code == 403 and "asks" not in answer.text
        assert world.records()[-1]["outcome"] == "refused"


def test_nothing_is_shown_where_the_record_fails(world: World) -> None:
    capture = world.add_capture(world.team)
    with world.engine.begin() as connection:
        connection.exec_driver_sql(
            "alter table tenancy.audit_records add check (left(action, 7) <> 'capture')"
        )
    for path in ("captures", f"captures/{capture}"):
        answer = world.call("GET", path)
        assert answer.status_code == 500 and "asks" not in answer.text and "req_1" not in answer.text


def test_lists_are_filtered_and_lose_no_row_between_pages(world: World) -> None:
    now = datetime.now(UTC)
    old = world.add_capture(world.team, captured_at=now - timedelta(days=3))
    mine = [world.add_capture(world.team) for _ in range(3)]
    world.add_capture(world.other)
    first = world.ok("GET", f"captures?tenant_id={world.team}&limit=2&order=desc")
    assert [row["id"] for row in first["data"]] == mine[:0:-1]
    second = world.ok("GET", f"captures?tenant_id={world.team}&order=desc&after={first['next']}")
    assert [row["id"] for row in second["data"]] == [mine[0], old]
    end = (now - timedelta(days=1)).strftime("%Y-%m-%dT%H:%M:%SZ")
    assert [row["id"] for row in world.ok("GET", f"captures?to={end}")["data"]] == [old]
    world.pass_time(days=(now - world.now).days + 1)
    assert len(world.ok("GET", f"captures?from={end}")["data"]) == 4


def test_what_has_expired_or_never_was_is_not_there(world: World) -> None:
    gone = world.add_capture(world.team, expires_at=datetime.now(UTC) - timedelta(seconds=1))
    for path in (f"captures/{gone}", "captures/9999", "captures/x", f"captures/{'9' * 30}", "captures/-1"):
        world.refused(404, "not_found", "GET", path)
    assert world.ok("GET", "captures")["data"] == []


@pytest.mark.parametrize("query", ["tenant_id=team", "after=x", "limit=0", "from=yesterday", "secret=1"])
def test_a_query_that_means_nothing_is_refused(world: World, query: str) -> None:
    assert world.call("GET", f"captures?{query}").status_code == 400


def test_a_tenant_opts_in_by_an_administrator_and_the_change_is_written_down(world: World) -> None:
    assert world.ok("GET", f"tenants/{world.team}")["captures_content"] is False
    assert (
        world.call(
            "PATCH", f"tenants/{world.team}", {"captures_content": True}, key="tenant_admin"
        ).status_code
        == 403
    )
    world.ok("PATCH", f"tenants/{world.team}", {"captures_content": True})
    record = world.records()[-1]
    assert (record["before"]["captures_content"], record["after"]["captures_content"]) == (False, True)
    world.refused(400, "invalid_value", "PATCH", f"tenants/{world.team}", {"captures_content": None})
    assert world.ok("GET", f"tenants/{world.team}")["captures_content"] is True


def test_all_of_a_tenant_is_erased_and_that_is_written_down(world: World) -> None:
    for _ in range(2):
        world.add_capture(world.team)
    kept = world.add_capture(world.other)
    erased = world.ok("DELETE", f"tenants/{world.team}/captures")
    assert erased == {"object": "captures.erased", "tenant_id": world.team, "num_erased": 2}
    [record] = world.records()
    assert (record["action"], record["tenant_id"]) == ("captures.erase", world.team)
    assert (record["before"], record["after"]) == ({"num_kept": 2}, {"num_kept": 0})
    assert [row["id"] for row in world.ok("GET", "captures")["data"]] == [kept]
    assert world.rows("select count(*) from capture.records")[0][0] == 1
    world.refused(404, "not_found", "DELETE", "tenants/tn_nobodynobody/captures")


def test_commands_list_and_show(run: Run, world: World) -> None:
    capture = world.add_capture(world.team)
    assert [row["id"] for row in parsed(run("captures", "list", "--tenant", "team", "--json"))] == [capture]
    assert "req_1" in said(run("captures", "list", "--from", "2026-01-01"))
    assert "[email] asks" in said(run("captures", "show", capture))
    assert parsed(run("captures", "erase", "team", "--json"))["num_erased"] == 1
    assert parsed(run("captures", "list", "--json")) == []
    assert parsed(run("tenants", "update", "team", "--capture-content", "--json"))["captures_content"] is True
    assert (
        parsed(run("tenants", "update", "team", "--no-capture-content", "--json"))["captures_content"]
        is False
    )
