"""Quotas through the admin API: shown, set, refused, and in force with the next request."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from footplate.tenancy.quotas import FIELDS, PICO, LimitMode, Quota
from tests.platform.admin.conftest import DEFAULT_QUOTA, World

WHOLE: dict[str, Any] = {
    "requests_per_minute": 60,
    "tokens_per_minute": 10_000,
    "tokens_per_day": 0,
    "max_concurrent_requests": 4,
    "max_context_tokens": 4096,
    "allowed_models": ["large", "smollm2-135m"],
    "per_model": {"large": {"tokens_per_day": 5, "mode": "enforce"}},
    "priority": -5,
    "weight": 2.5,
    "monthly_budget": "250.00",
    "monthly_soft_budget": "200.50",
    "cached_token_weight": 0.1,
    "mode": "shadow",
}


def quotas_of(world: World, key: str) -> tuple[Quota, Quota | None]:
    holder = asyncio.run(world.cache.authenticate(world.keys.get(key, key)))
    assert holder is not None
    return holder.tenant_quota, holder.key_quota


def test_every_field_is_set_shown_and_in_force_with_the_next_request(world: World) -> None:
    assert set(WHOLE) == set(FIELDS)
    assert quotas_of(world, "member") == (DEFAULT_QUOTA, None)
    shown = world.ok("PUT", f"tenants/{world.team}/quota", WHOLE)
    assert shown == {"object": "quota", "source": "own", **WHOLE}
    assert world.ok("GET", f"tenants/{world.team}/quota") == shown
    tenant_quota, key_quota = quotas_of(world, "member")
    assert tenant_quota == Quota.parse(WHOLE)
    assert (tenant_quota.monthly_budget_pico, tenant_quota.mode) == (250 * PICO, LimitMode.SHADOW)
    assert key_quota is None


def test_a_tenant_without_a_quota_shows_the_default_and_an_empty_one_is_unlimited(world: World) -> None:
    shown = world.ok("GET", f"tenants/{world.team}/quota")
    assert (shown["source"], shown["requests_per_minute"]) == ("default", 600)
    assert world.ok("PUT", f"tenants/{world.team}/quota", {})["requests_per_minute"] is None
    assert quotas_of(world, "member")[0] == Quota()


def test_setting_replaces_the_whole(world: World) -> None:
    world.ok("PUT", f"tenants/{world.team}/quota", WHOLE)
    shown = world.ok("PUT", f"tenants/{world.team}/quota", {"weight": 3})
    assert {name: shown[name] for name in FIELDS if shown[name] is not None} == {
        "weight": 3,
        "mode": "enforce",
    }


def test_a_keys_quota_stands_beside_its_tenants(world: World) -> None:
    key_id = world.keys["member"].split("_")[1]
    assert world.ok("GET", f"keys/{key_id}/quota")["source"] == "none"
    world.ok("PUT", f"keys/{key_id}/quota", {"tokens_per_day": 9})
    assert quotas_of(world, "member") == (DEFAULT_QUOTA, Quota(tokens_per_day=9))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tokens_per_day": -1}, "tokens_per_day"),
        ({"tokens_per_day": 10**16}, "tokens_per_day"),
        ({"tokens_per_day": "1"}, "tokens_per_day"),
        ({"tokens_per_day": 10**4000}, "tokens_per_day"),
        ({"priority": -(10**4000)}, "priority"),
        ({"weight": 0}, "weight"),
        ({"weight": 1e9}, "weight"),
        ({"priority": 1000}, "priority"),
        ({"monthly_budget": 1.5}, "monthly_budget"),
        ({"monthly_budget": "1,5"}, "monthly_budget"),
        ({"monthly_budget": "10", "monthly_soft_budget": "10.01"}, "monthly_soft_budget"),
        ({"cached_token_weight": 2}, "cached_token_weight"),
        ({"mode": "off"}, "mode"),
        ({"allowed_models": "all"}, "allowed_models"),
        ({"per_model": {"m": {"weight": 2}}}, "per_model.weight"),
        ({"per_model": {"m": {"tokens_per_day": 10**16}}}, "per_model.tokens_per_day"),
        ({"per_model": {"m": 1}}, "per_model"),
        ({"tpm": 4}, "tpm"),
    ],
)
def test_what_no_quota_may_be_is_refused_and_changes_nothing(world: World, body: Any, param: str) -> None:
    world.ok("PUT", f"tenants/{world.team}/quota", WHOLE)
    response = world.call("PUT", f"tenants/{world.team}/quota", body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert world.ok("GET", f"tenants/{world.team}/quota")["tokens_per_minute"] == 10_000


def test_a_tenants_admin_limits_its_keys_and_moves_no_tenant_ahead_of_others(world: World) -> None:
    own = {"key": "tenant_admin"}
    key_id = world.keys["member"].split("_")[1]
    world.ok("PUT", f"keys/{key_id}/quota", {"tokens_per_day": 9, "priority": 5})
    # What it may not set stays, also when it says so.
    world.ok("PUT", f"keys/{key_id}/quota", {"tokens_per_day": 8, "priority": 5}, **own)
    world.ok("PUT", f"keys/{key_id}/quota", {"tokens_per_day": 7}, **own)
    assert quotas_of(world, "member")[1] == Quota(tokens_per_day=7, priority=5)
    for body in ({"priority": -100}, {"weight": 9}, {"cached_token_weight": 0}):
        world.refused(403, "permission_denied", "PUT", f"keys/{key_id}/quota", body, **own)
    world.refused(403, "permission_denied", "PUT", f"tenants/{world.team}/quota", {}, **own)
    assert quotas_of(world, "member")[1] == Quota(tokens_per_day=7, priority=5)


def test_a_soft_budget_may_reach_the_hard_one_and_what_was_stored_otherwise_is_read(world: World) -> None:
    for body in ({"monthly_budget": "10", "monthly_soft_budget": "10.00"}, {"monthly_soft_budget": "10"}):
        world.ok("PUT", f"tenants/{world.team}/quota", body)
        key_id = world.keys["member"].split("_")[1]
        world.ok("PUT", f"keys/{key_id}/quota", body)
    wrong = {"monthly_budget": "1.00", "monthly_soft_budget": "2.00"}
    world.refused(400, "invalid_value", "PUT", f"keys/{key_id}/quota", wrong)
    with world.engine.begin() as connection:
        connection.exec_driver_sql(
            "update tenancy.tenants set quota = %s where id = %s", (json.dumps(wrong), world.team)
        )
    assert world.opens("member")
    assert world.ok("GET", f"tenants/{world.team}/quota")["monthly_soft_budget"] == "2.00"
