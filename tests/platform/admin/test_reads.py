"""`/v1/me`, models, health, and what `/openapi.json` promises of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance

from footplate.platform.ports import Principal
from footplate.platform.use import LimiterUse, all_limits
from footplate.tenancy.errors import LimiterUnavailable
from footplate.tenancy.limiter.decisions import Amounts, LimitState
from footplate.tenancy.limiter.local import LocalLimiter
from footplate.tenancy.quotas import Quota
from tests.platform.admin.conftest import World


def test_me_shows_tenant_key_limits_and_use(world: World) -> None:
    limiter = LocalLimiter(clock_ms=lambda: 1_000_000)
    object.__setattr__(world.desk, "use", LimiterUse(limiter))
    key_id = world.keys["member"].split("_")[1]
    world.ok("PATCH", f"tenants/{world.team}", {"share_group": "secret group"})
    world.ok(
        "PUT",
        f"tenants/{world.team}/quota",
        {"tokens_per_minute": 100, "per_model": {"m": {"tokens_per_day": 7}}},
    )
    world.ok("PUT", f"keys/{key_id}/quota", {"max_concurrent_requests": 2})
    principal = Principal(
        key_id,
        world.team,
        "member",
        b"",
        Quota(tokens_per_minute=100, per_model={"m": Quota(tokens_per_day=7)}),
        Quota(max_concurrent_requests=2),
    )

    async def use() -> None:
        await limiter.reserve(world.team, "r", all_limits(principal), Amounts(5))

    import asyncio

    asyncio.run(use())
    me = world.ok("GET", "/v1/me", key="member")
    assert (me["tenant"]["id"], me["tenant"]["name"], me["key"]["id"]) == (world.team, "team", key_id)
    assert me["tenant"]["quota"]["tokens_per_minute"] == 100
    assert me["key"]["quota"]["max_concurrent_requests"] == 2
    shown = [
        (use["scope"], use["model"], use["kind"], use["limit"], use["used"], use["remaining"])
        for use in me["use"]
    ]
    assert sorted(shown, key=str) == sorted(
        [
            ("tenant", None, "tokens_per_minute", 100, 5, 95),
            ("tenant", "m", "tokens_per_day", 7, 5, 2),
            ("key", None, "max_concurrent_requests", 2, 1, 1),
        ],
        key=str,
    )
    assert "secret group" not in str(me)


def test_me_says_so_when_use_can_not_be_known(world: World) -> None:
    class Away:
        async def use(self, principal: Principal) -> Sequence[LimitState]:
            raise LimiterUnavailable("away")

    assert world.ok("GET", "/v1/me", key="tenant_admin")["use"] is None
    object.__setattr__(world.desk, "use", Away())
    assert world.ok("GET", "/v1/me", key="tenant_admin")["use"] is None


def test_models_and_health(world: World) -> None:
    models = world.ok("GET", "models", key="auditor")["data"]
    assert [model["id"] for model in models] == ["large", "smollm2-135m"]
    health = world.ok("GET", "health", key="auditor")
    assert health == {"status": "ready", "dependencies": {"engines": {"ready": True, "mode": "serving"}}}


def test_answers_are_what_openapi_promises_and_every_status_is_declared(world: World) -> None:
    """Errors too: each status that an endpoint gives stands in its description."""
    schema = schemathesis.openapi.from_asgi(
        "/openapi.json", world.app, headers={"authorization": f"Bearer {world.keys['platform_admin']}"}
    )
    results: list[Any] = [result.ok() for result in schema.get_all_operations()]
    operations = [operation for operation in results if operation.path.startswith("/admin/")]
    assert len(operations) == 38
    made = world.ok("POST", f"tenants/{world.other}/keys", {})["id"]
    for operation in operations:

        @settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck), database=None)
        @given(case=operation.as_strategy())
        def answers(case: Any) -> None:
            # Ids that are there; made-up ones are all the same 404.
            if "tenant_id" in case.path_parameters:
                case.path_parameters["tenant_id"] = world.other
            if "key_id" in case.path_parameters:
                case.path_parameters["key_id"] = made
            for key in ("platform_admin", "member"):
                response = case.call(headers={"authorization": f"Bearer {world.keys[key]}"})
                case.validate_response(
                    response,
                    checks=[not_a_server_error, status_code_conformance, response_schema_conformance],
                )

        answers()
