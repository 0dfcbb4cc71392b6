"""Canary keys: whatever is done with a key, its text is in no log, error, record, metric or dump."""

from __future__ import annotations

import json
import logging
import subprocess
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from footplate.deployments.embedded import _postgres_bin
from footplate.deployments.logs import configure_logging
from footplate.platform.http.admin.endpoints import admin_routes
from footplate.platform.http.admin.exchange import AdminRoute
from footplate.tenancy.api_keys import Role
from tests.platform.admin.conftest import World
from tests.postgres_server import PostgresServer


@pytest.fixture
def logged() -> Any:
    """All that any logger says, at its most talkative."""
    text = StringIO()
    handler = logging.StreamHandler(text)
    # The tests' own client.
    handler.addFilter(lambda record: not record.name.startswith("httpx"))
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    configure_logging("gateway", text)
    yield text
    root.removeHandler(handler)
    root.setLevel(level)


def secret_of(text: str) -> str:
    return text.split("_")[2]


def test_a_keys_text_is_nowhere_but_in_the_answer_that_made_it(
    world: World, postgres: PostgresServer, logged: StringIO, tmp_path: Path
) -> None:
    made = world.ok("POST", f"tenants/{world.team}/keys", {"name": "ci"}, idempotency_key="k1")
    rotated = world.ok("POST", f"keys/{made['id']}/rotate", {}, idempotency_key="k2")
    canaries = {secret_of(text) for text in (made["key"], rotated["key"], *world.keys.values())}
    seen = [world.call("POST", f"tenants/{world.team}/keys", {"name": "ci"}, idempotency_key="k1").text]

    for text in (made["key"], rotated["key"]):
        for method, path in (
            ("GET", "/v1/models"),
            ("POST", "/v1/chat/completions"),
            ("GET", "/admin/v1/tenants"),
        ):
            seen.append(world.call(method, path, {} if method == "POST" else None, key=text).text)
        # Where a person pastes a key by mistake.
        for route in admin_routes({}):
            seen += misuse(world, route, text)
        seen.append(world.call("GET", f"/v1/models/{text}", key="member").text)
        seen.append(world.call("GET", f"/nowhere/{text}?key={text}", key=None).text)
    seen.append(world.call("GET", "/metrics", key="scrape").text)
    seen.append(json.dumps(world.records()))
    seen.append(json.dumps(world.ok("GET", "/v1/me", key="member")))
    seen.append(repr(world.desk) + repr(world.cache))

    url = world.engine.url
    command = ["pg_dump", "-h", str(url.query["host"]), "-U", str(url.username), "-d", str(url.database)]
    command[0] = str(_postgres_bin() / command[0])
    dump = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert made["id"] in dump
    for canary in canaries:
        assert canary not in dump
        assert canary.encode().hex() not in dump
        assert canary not in logged.getvalue()
        assert [text for text in seen if canary in text] == []


def misuse(world: World, route: AdminRoute, text: str) -> list[str]:
    """A key's text in the path, in the query, in a header and in every field of the body."""
    names = (
        "tenant_id",
        "key_id",
        "period_id",
        "price_id",
        "export_id",
        "route_name",
        "model_name",
        "capture_id",
    )
    path = route.path.replace(":path}", "}").format(**dict.fromkeys(names, text))
    spare = world.add_key(Role.MEMBER, world.other)
    real = world.path(route, tenant_id=world.other, key_id=spare.split("_")[1])
    fields = list(route.body.model_fields) if route.body is not None else []
    bodies: list[Any] = [{name: text} for name in fields] + [{name: {text: text}} for name in fields]
    bodies += [{name: value} for name in fields for value in ([text], {text: ""}, {text: {}}, {"m": text})]
    bodies += [{"per_model": {text: {"tokens_per_day": value}}} for value in (1, -1, 10**16)]
    bodies += [{"name": "x", name: text} for name in fields] + [{text: text}, text, text.encode()]
    model = {"name": "x", "source": "package:x"}
    bodies += [{**model, name: text} for name in fields] + [{**model, "source": f"package:{text}"}]
    bodies += [{**model, "engine": {"device": text}}, {**model, "aliases": [text]}]
    answers = [world.call(route.method, path), world.call(route.method, f"{real}?{text}={text}")]
    for name in route.parameters:
        answers.append(world.call(route.method, f"{real}?{name}={text}"))
    if route.is_change:
        answers += [world.call(route.method, real, body) for body in bodies]
        answers.append(world.call(route.method, real, {}, idempotency_key=text))
    for name in ("user_agent", "x_forwarded_for", "x_request_id"):
        answers.append(world.call(route.method, real, **{name: text}))
    return [answer.text + str(answer.headers) for answer in answers]


@pytest.mark.parametrize("of", ["tenant", "key"])
@pytest.mark.parametrize(
    "names", [lambda key: {"allowed_models": ["m", key]}, lambda key: {"per_model": {key: {}}}]
)
def test_a_quota_with_a_key_in_a_models_name_is_refused(world: World, of: str, names: Any) -> None:
    key = world.keys["member"]
    path = f"tenants/{world.team}/quota" if of == "tenant" else f"keys/{key.split('_')[1]}/quota"
    error = world.refused(400, "invalid_value", "PUT", path, names(key))
    assert error["param"] == next(iter(names(key)))
    assert world.records()[-1]["outcome"] == "refused"
    tables = ("tenants", "api_keys", "audit_records", "idempotent_answers")
    stored = [str(world.rows(f"select * from tenancy.{table}")) for table in tables]
    assert secret_of(key) not in json.dumps(error) + "".join(stored)


def test_a_key_that_an_older_version_stored_can_be_removed_and_is_masked_in_the_record(world: World) -> None:
    key = world.keys["member"]
    labels = json.dumps({key: ""})
    with world.engine.begin() as connection:
        connection.exec_driver_sql(
            "update tenancy.tenants set labels = %s::jsonb where id = %s", (labels, world.team)
        )
    world.refused(400, "invalid_value", "PATCH", f"tenants/{world.team}", {"cost_center": "1"})
    world.ok("PATCH", f"tenants/{world.team}", {"labels": {}})
    assert world.records()[-1]["before"]["labels"] == {"[key]": ""}


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    body=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
        max_leaves=6,
    )
)
def test_any_body_is_answered_and_no_server_error(world: World, body: Any) -> None:
    made = world.keys["member"].split("_")[1]
    for route in admin_routes({}):
        if route.is_change and "suspend" not in route.path:
            path = world.path(route, tenant_id=world.team, key_id=made)
            response = world.call(route.method, path, json.dumps(body).encode())
            assert response.status_code in (200, 400, 409), (path, response.text)
