"""Tenants and keys through the admin API, on real PostgreSQL."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from footplate.tenancy.admin.keys import MAX_LIVE_KEYS
from footplate.tenancy.api_keys import Role
from tests.platform.admin.conftest import World


def test_a_tenant_is_made_shown_found_by_name_and_changed(world: World) -> None:
    made = world.ok("POST", "tenants", {"name": " Red team ", "cost_center": "42", "labels": {"env": "prod"}})
    assert made["name"] == "Red team"
    assert (made["cost_center"], made["share_group"], made["labels"]) == ("42", None, {"env": "prod"})
    assert (made["object"], made["state"]) == ("tenant", "active")
    assert world.ok("GET", f"tenants/{made['id']}") == made
    assert world.ok("GET", "tenants?name=Red%20team")["data"] == [made]
    changed = world.ok("PATCH", f"tenants/{made['id']}", {"share_group": "colours", "labels": {}})
    assert changed == {**made, "share_group": "colours", "labels": {}}
    assert world.ok("PATCH", f"tenants/{made['id']}", {"share_group": None})["share_group"] is None
    assert world.ok("PATCH", f"tenants/{made['id']}", {}) == {**made, "labels": {}}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "name"),
        ({"name": ""}, "name"),
        ({"name": "  "}, "name"),
        ({"name": None}, "name"),
        ({"name": "x" * 129}, "name"),
        ({"name": "a\nb"}, "name"),
        ({"name": "\u3164"}, "name"),
        ({"name": "team\u115f"}, "name"),
        ({"name": "te\u200bam"}, "name"),
        ({"name": "team\ufe0f"}, "name"),
        ({"name": "team\u2800"}, "name"),
        ({"name": "a", "labels": {"k": "\uffa0"}}, "labels"),
        ({"name": "a", "cost_center": None}, "cost_center"),
        ({"name": "a", "labels": {"a b": "c"}}, "labels"),
        ({"name": "a", "labels": {"a": "c" * 257}}, "labels"),
        ({"name": "a", "labels": {f"l{i}": "" for i in range(17)}}, "labels"),
        ({"name": "a", "share_group": ""}, "share_group"),
        ({"name": "a", "is_suspended": True}, "is_suspended"),
        ({"name": "a", "id": "tnt_0"}, "id"),
        ({"name": f"fp_{'a' * 12}_{'b' * 32}"}, "name"),
        ({"name": "a", "labels": {"k": f"fp_{'a' * 12}_{'b' * 32}"}}, "labels"),
        ({"name": "a", "labels": {f"fp_{'a' * 12}_{'b' * 32}": ""}}, "labels"),
    ],
)
def test_what_no_tenant_may_be_is_refused_by_field(world: World, body: Any, param: str) -> None:
    response = world.call("POST", "tenants", body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].startswith(param)


def test_a_name_is_taken_once_also_by_a_change(world: World) -> None:
    world.refused(409, "name_taken", "POST", "tenants", {"name": "team"})
    world.refused(409, "name_taken", "PATCH", f"tenants/{world.other}", {"name": "team"})
    assert world.ok("PATCH", f"tenants/{world.team}", {"name": "team"})["name"] == "team"


def test_a_name_is_kept_in_one_form_of_unicode(world: World) -> None:
    composed, decomposed = "Caf\u00e9", "Cafe\u0301"
    made = world.ok("POST", "tenants", {"name": decomposed})
    assert made["name"] == composed
    world.refused(409, "name_taken", "POST", "tenants", {"name": composed})
    for name in ("Caf%C3%A9", "Cafe%CC%81"):
        assert world.ok("GET", f"tenants?name={name}")["data"] == [made]
    key = world.ok("POST", f"tenants/{made['id']}/keys", {"name": decomposed})
    assert key["name"] == composed
    error = world.refused(400, "invalid_value", "POST", f"tenants/{made['id']}/keys", {"name": "\u3164"})
    assert error["param"] == "name"


def test_what_is_not_there_is_a_404_whatever_its_id_looks_like(world: World) -> None:
    for tenant_id in ("tnt_0000000000000000", "nothing", "%00", "tnt_0000000000000000x", "é"):
        world.refused(404, "not_found", "GET", f"tenants/{tenant_id}")
        world.refused(404, "not_found", "POST", f"tenants/{tenant_id}/suspend")
    for key_id in ("a" * 12, "nothing", world.keys["member"]):
        world.refused(404, "not_found", "POST", f"keys/{key_id}/revoke")
        world.refused(404, "not_found", "PUT", f"keys/{key_id}/quota", {})


def test_suspending_a_tenant_shuts_its_keys_at_once_and_resuming_opens_them(world: World) -> None:
    assert world.opens("member")
    assert world.ok("POST", f"tenants/{world.team}/suspend")["state"] == "suspended"
    assert not world.opens("member")
    assert not world.opens("tenant_admin")
    assert world.ok("POST", f"tenants/{world.team}/resume", {})["state"] == "active"
    assert world.opens("member")


def test_nobody_suspends_the_tenant_of_its_own_key(world: World) -> None:
    world.refused(409, "conflict", "POST", f"tenants/{world.platform}/suspend")
    assert world.opens("platform_admin")


def test_a_key_is_shown_once_and_only_its_hash_is_kept(world: World) -> None:
    made = world.ok("POST", f"tenants/{world.team}/keys", {"name": "ci", "labels": {"app": "chat"}})
    text = made.pop("key")
    assert text.split("_")[1] == made["id"]
    assert (made["role"], made["state"], made["name"]) == ("member", "live", "ci")
    assert world.opens(text)
    [shown] = [
        key for key in world.ok("GET", f"tenants/{world.team}/keys")["data"] if key["id"] == made["id"]
    ]
    assert shown == made
    secret = text.split("_")[2]
    for table in ("tenants", "api_keys", "audit_records", "idempotent_answers"):
        assert secret not in str(world.rows(f"select * from tenancy.{table}"))


def test_an_answer_with_a_key_in_it_is_kept_by_no_cache(world: World) -> None:
    response = world.call("POST", f"tenants/{world.team}/keys", {})
    assert response.headers["cache-control"] == "no-store"


def test_a_key_ends_at_its_time(world: World) -> None:
    made = world.ok(
        "POST", f"tenants/{world.team}/keys", {"role": "member", "expires_at": "2026-11-01T14:00:00+01:00"}
    )
    assert made["expires_at"] == "2026-11-01T13:00:00Z"
    assert world.opens(made["key"])
    world.pass_time(hours=1)
    assert not world.opens(made["key"])
    assert world.ok("GET", f"tenants/{world.team}/keys")["data"][-1]["state"] == "expired"


@pytest.mark.parametrize(
    "expires_at",
    [
        "2026-11-01T12:00:00Z",
        "2020-01-01T00:00:00Z",
        "2027-01-01T00:00:00",
        "soon",
        1.5,
        "9999-12-31T23:59:59-12:00",
    ],
)
def test_a_time_that_is_over_or_says_too_little_is_refused(world: World, expires_at: Any) -> None:
    world.refused(400, "invalid_value", "POST", f"tenants/{world.team}/keys", {"expires_at": expires_at})


def test_while_a_rotation_overlaps_both_keys_work_and_then_the_new_one_alone(world: World) -> None:
    old = world.ok("POST", f"tenants/{world.team}/keys", {"name": "app", "labels": {"a": "b"}})
    world.ok("PUT", f"keys/{old['id']}/quota", {"tokens_per_day": 7})
    new = world.ok("POST", f"keys/{old['id']}/rotate", {"overlap_s": 3600})
    assert (new["replaces"], new["name"], new["labels"], new["role"]) == (
        old["id"],
        "app",
        {"a": "b"},
        "member",
    )
    assert new["replaced"]["expires_at"] == "2026-11-01T13:00:00Z"
    assert world.ok("GET", f"keys/{new['id']}/quota")["tokens_per_day"] == 7
    world.pass_time(seconds=3599)
    assert world.opens(old["key"]) and world.opens(new["key"])
    world.pass_time(seconds=1)
    assert not world.opens(old["key"])
    assert world.opens(new["key"])


def test_a_rotation_without_overlap_ends_the_old_key_at_once(world: World) -> None:
    old = world.ok("POST", f"tenants/{world.team}/keys", {})
    assert world.opens(old["key"])
    new = world.ok("POST", f"keys/{old['id']}/rotate", {"overlap_s": 0})
    assert not world.opens(old["key"])
    assert world.opens(new["key"])


def test_a_rotated_key_lives_as_long_as_the_old_one_did_and_never_prolongs_it(world: World) -> None:
    body = {"expires_at": (world.now + timedelta(hours=2)).isoformat()}
    old = world.ok("POST", f"tenants/{world.team}/keys", body)
    world.pass_time(hours=1)
    new = world.ok("POST", f"keys/{old['id']}/rotate")
    # A day of overlap would be longer than the old key has left.
    assert new["replaced"]["expires_at"] == "2026-11-01T14:00:00Z"
    assert new["expires_at"] == "2026-11-01T15:00:00Z"


def test_a_key_that_ends_with_the_last_date_is_rotated_to_one_that_does(world: World) -> None:
    last = "9999-12-31T23:59:59Z"
    old = world.ok("POST", f"tenants/{world.team}/keys", {"expires_at": last})
    world.pass_time(hours=1)
    assert world.ok("POST", f"keys/{old['id']}/rotate", {})["expires_at"] == last


@pytest.mark.parametrize("overlap_s", [-1, 10**4000, 30 * 24 * 3600 + 1, 1.5, "1"])
def test_an_overlap_has_bounds(world: World, overlap_s: Any) -> None:
    old = world.ok("POST", f"tenants/{world.team}/keys", {})
    world.refused(400, "invalid_value", "POST", f"keys/{old['id']}/rotate", {"overlap_s": overlap_s})


def test_a_key_that_has_ended_is_not_rotated(world: World) -> None:
    old = world.ok("POST", f"tenants/{world.team}/keys", {})
    world.ok("POST", f"keys/{old['id']}/revoke")
    world.refused(409, "conflict", "POST", f"keys/{old['id']}/rotate")


def test_a_key_is_rotated_once(world: World) -> None:
    """Whoever lost the new key would get a second one that lives as long as the first one's overlap."""
    old = world.ok("POST", f"tenants/{world.team}/keys", {"expires_at": "2027-01-01T00:00:00Z"})
    new = world.ok("POST", f"keys/{old['id']}/rotate", {"overlap_s": 60})
    refused = world.refused(409, "conflict", "POST", f"keys/{old['id']}/rotate", {"overlap_s": 3600})
    assert new["id"] in str(refused)
    assert world.ok("POST", f"keys/{new['id']}/rotate")["expires_at"] == new["expires_at"]


def test_a_revoked_key_opens_nothing_and_stays_revoked(world: World) -> None:
    made = world.ok("POST", f"tenants/{world.team}/keys", {})
    assert world.opens(made["key"])
    revoked = world.ok("POST", f"keys/{made['id']}/revoke")
    assert (revoked["state"], revoked["revoked_at"]) == ("revoked", "2026-11-01T12:00:00Z")
    assert not world.opens(made["key"])
    world.pass_time(hours=1)
    assert world.ok("POST", f"keys/{made['id']}/revoke")["revoked_at"] == "2026-11-01T12:00:00Z"


def test_a_tenants_admin_sees_and_changes_its_own_tenant_alone(world: World) -> None:
    own = {"key": "tenant_admin"}
    assert [tenant["id"] for tenant in world.ok("GET", "tenants", **own)["data"]] == [world.team]
    assert world.ok("GET", "tenants?name=other", **own)["data"] == []
    made = world.ok("POST", f"tenants/{world.team}/keys", {"name": "mine"}, **own)
    assert world.opens(made["key"])
    foreign = world.add_key(Role.MEMBER, world.other).split("_")[1]
    for method, path in (
        ("GET", f"tenants/{world.other}"),
        ("GET", f"tenants/{world.other}/keys"),
        ("GET", f"tenants/{world.other}/quota"),
        ("POST", f"tenants/{world.other}/keys"),
        ("GET", f"keys/{foreign}/quota"),
        ("POST", f"keys/{foreign}/rotate"),
        ("POST", f"keys/{foreign}/revoke"),
    ):
        there = world.refused(404, "not_found", method, path, None if method == "GET" else {}, **own)
        # Nothing tells another tenant's from what is not there.
        absent = path.replace(world.other, "tnt_0000000000000000").replace(foreign, "0" * 12)
        nowhere = world.refused(404, "not_found", method, absent, None if method == "GET" else {}, **own)
        assert there == nowhere
    assert world.opens(world.keys["member"])


def test_a_cursor_tells_nothing_of_other_tenants_rows(world: World) -> None:
    own = {"key": "tenant_admin"}
    foreign = world.add_key(Role.MEMBER, world.other).split("_")[1]
    for path, there, absent in (
        (f"tenants/{world.team}/keys", foreign, "0" * 12),
        ("tenants", world.other, "tnt_0000000000000000"),
    ):
        of_there = world.refused(400, "invalid_value", "GET", f"{path}?after={there}", **own)
        assert of_there == world.refused(400, "invalid_value", "GET", f"{path}?after={absent}", **own)
    assert world.ok("GET", f"tenants?after={world.team}", **own)["data"] == []
    assert world.ok("GET", f"tenants?after={world.team}")["data"] != []


def test_a_tenants_admin_takes_no_rights_through_keys(world: World) -> None:
    own = {"key": "tenant_admin"}
    for role in ("platform_admin", "finance", "auditor", "scrape"):
        world.refused(403, "permission_denied", "POST", f"tenants/{world.team}/keys", {"role": role}, **own)
    # A key of the platform's that happens to lie in its tenant.
    lying = world.add_key(Role.PLATFORM_ADMIN, world.team).split("_")[1]
    for action in ("rotate", "revoke"):
        world.refused(403, "permission_denied", "POST", f"keys/{lying}/{action}", {}, **own)
    world.refused(403, "permission_denied", "PUT", f"keys/{lying}/quota", {}, **own)


def test_last_use_is_written_in_batches(world: World) -> None:
    made = world.ok("POST", f"tenants/{world.team}/keys", {})
    world.opens(made["key"])
    assert world.ok("GET", f"tenants/{world.team}/keys")["data"][-1]["last_used_at"] is None
    world.store.note_uses(world.cache.take_uses())
    assert world.ok("GET", f"tenants/{world.team}/keys")["data"][-1]["last_used_at"] == "2026-11-01T12:00:00Z"


def test_two_who_make_a_tenant_of_one_name_at_once_make_one(world: World) -> None:
    async def both() -> list[int]:
        calls = [world.call_async("POST", "/admin/v1/tenants", {"name": "one"}) for _ in range(8)]
        return [response.status_code for response in await asyncio.gather(*calls)]

    assert sorted(asyncio.run(both())) == [200] + [409] * 7


def test_whom_a_tenant_shares_its_cache_with_is_shown_to_the_platform_alone(world: World) -> None:
    world.ok("PATCH", f"tenants/{world.team}", {"share_group": "colours"})
    for role in ("platform_admin", "finance", "auditor"):
        assert world.ok("GET", f"tenants/{world.team}", key=role)["share_group"] == "colours"
    own = {"key": "tenant_admin"}
    [listed] = world.ok("GET", "tenants", **own)["data"]
    for shown in (world.ok("GET", f"tenants/{world.team}", **own), listed):
        assert shown["name"] == "team" and "share_group" not in shown
    assert "colours" not in str([world.call("GET", path, **own).text for path in ("tenants", "/v1/me")])


NEW_YEAR, LATER = "2027-01-01T00:00:00Z", "2027-01-01T00:00:01Z"


def test_only_the_platform_prolongs_a_key_by_rotation(world: World) -> None:
    def made() -> str:
        key = world.ok("POST", f"tenants/{world.team}/keys", {"expires_at": NEW_YEAR})
        return f"keys/{key['id']}/rotate"

    own = {"key": "tenant_admin"}
    world.pass_time(days=30)
    error = world.refused(403, "permission_denied", "POST", made(), {"expires_at": LATER}, **own)
    assert NEW_YEAR in error["message"]
    assert world.ok("POST", made(), {}, **own)["expires_at"] == NEW_YEAR
    sooner = "2026-12-02T00:00:00Z"
    assert world.ok("POST", made(), {"expires_at": sooner}, **own)["expires_at"] == sooner
    assert world.ok("POST", made(), {"expires_at": LATER})["expires_at"] == LATER


def test_an_admins_key_that_expires_makes_none_that_outlives_it(world: World) -> None:
    path = f"tenants/{world.team}/keys"
    body = {"role": "tenant_admin", "expires_at": NEW_YEAR}
    ending = world.ok("POST", path, body)
    own = {"key": ending["key"]}
    assert world.ok("POST", path, {}, **own)["expires_at"] == NEW_YEAR
    world.refused(403, "permission_denied", "POST", path, {"expires_at": LATER}, **own)
    # Nor does it get hold of one that lives for ever.
    lasting = world.ok("POST", path, {"role": "tenant_admin"})
    world.refused(
        403, "permission_denied", "POST", f"keys/{lasting['id']}/rotate", {"expires_at": LATER}, **own
    )
    assert world.ok("POST", f"keys/{lasting['id']}/rotate", {}, **own)["expires_at"] == NEW_YEAR
    # By its own rotation it gains nothing either, and whoever does not expire is held by nothing.
    world.refused(
        403, "permission_denied", "POST", f"keys/{ending['id']}/rotate", {"expires_at": LATER}, **own
    )
    assert world.ok("POST", f"keys/{ending['id']}/rotate", {}, **own)["expires_at"] == NEW_YEAR
    assert world.ok("POST", path, {}, key="tenant_admin")["expires_at"] is None


def test_a_tenant_has_so_many_live_keys_and_no_more(world: World) -> None:
    path = f"tenants/{world.team}/keys"
    last = world.ok("POST", path, {})
    with world.engine.begin() as connection:
        connection.exec_driver_sql(
            "insert into tenancy.api_keys (public_id, hashed, name, role, tenant_id, expires_at, revoked_at) "
            "select lpad(n::text, 12, '0'), '', '', 'member', %s, "
            "case when n %% 3 = 1 then '2026-10-01'::timestamptz end, "
            "case when n %% 3 = 2 then '2026-10-01'::timestamptz end from generate_series(1, %s) n",
            (world.team, 3 * (MAX_LIVE_KEYS - 4)),
        )
    key = world.ok("POST", path, {})
    for key_of in ("tenant_admin", "platform_admin"):
        error = world.refused(409, "conflict", "POST", path, {}, key=key_of)
        assert str(MAX_LIVE_KEYS) in error["message"]
    world.refused(409, "conflict", "POST", f"keys/{key['id']}/rotate", {})
    key = world.ok("POST", f"keys/{key['id']}/rotate", {"overlap_s": 0})
    world.ok("POST", f"tenants/{world.other}/keys", {})
    world.ok("POST", f"keys/{last['id']}/revoke")
    world.ok("POST", path, {})


@pytest.mark.parametrize(
    "body",
    [b'{"name": "a", "name": "b"}', b'{"name": "a", "labels": {"x": "1", "y": "2", "x": "3"}}'],
)
def test_a_name_that_is_written_twice_is_refused(world: World, body: bytes) -> None:
    error = world.refused(400, "invalid_value", "POST", "tenants", body)
    assert error["param"] == "body"
    assert world.ok("POST", "tenants", b'{"name": "a", "labels": {"name": "a"}}')["labels"] == {"name": "a"}


@pytest.mark.parametrize("encoding", ["gzip", "br", "identity, gzip"])
def test_a_body_that_is_encoded_is_refused_before_it_is_read(world: World, encoding: str) -> None:
    response = world.call("POST", "tenants", {"name": "new"}, content_encoding=encoding)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (415, "unsupported_media_type")
    assert response.headers["connection"] == "close"
    chat = world.call("POST", "/v1/chat/completions", b"\x1f\x8b", key="member", content_encoding=encoding)
    assert chat.status_code == 415
    world.ok("POST", "tenants", {"name": "new"}, content_encoding="Identity")
