"""What admins are told of routes: who answered, what that saved, and what a route would decide."""

from __future__ import annotations

from typing import Any

import pytest

from footplate.billing.prices import ModelPrices
from footplate.billing.usage import Attempt, AttemptOutcome, ModelName, TokenCounts
from tests.billing.builders import NOVEMBER, event, price_list
from tests.platform.admin.conftest import World
from tests.platform.admin.test_commands import Run, parsed, run, said, url

__all__ = ["run", "url"]  # fixtures

CANARY = "xylophone"


def test_routes_tell_who_answered_and_what_that_saved_net_of_attempts(world: World) -> None:
    small, large = ModelPrices(1_000_000, 100_000, 2_000_000), ModelPrices(5_000_000, 500_000, 10_000_000)
    prices = price_list(**{"smollm2-135m": small, "large": large})
    world.billing.prices.add(prices, imported_by="test")
    name = ModelName("smollm2-135m")
    tried = Attempt(name, "0", AttemptOutcome.ESCALATED, TokenCounts(1_000, 0, 4), "unsure")
    answered = Attempt(ModelName("large"), "0", AttemptOutcome.COMPLETED, TokenCounts(1_000, 0, 10))
    world.events.commit(
        [
            event(model="auto", served=name, tokens=(1_000, 0, 10), started_at=NOVEMBER),
            event(
                model="auto",
                served="large",
                tokens=(1_000, 0, 10),
                attempts=(tried, answered),
                started_at=NOVEMBER,
            ),
            event(model=name, served=name, started_at=NOVEMBER),
        ]
    )
    listed = {route["id"]: route for route in world.ok("GET", "routes")["data"]}
    assert set(listed) == {"auto", "sure", "team/seen"}
    auto = listed["auto"]
    assert (auto["policy"], auto["small"], auto["large"]) == ("rules", "smollm2-135m", "large")
    assert (auto["requests"], auto["escalated_share"], auto["attempts_left"]) == (2, 0.5, 1)
    assert auto["requests_by_model"] == {"large": 1, "smollm2-135m": 1}
    assert auto["saving"] == {
        "currency": "USD",
        "billed": "0.00612",
        "at_large": "0.0102",
        "attempts": "0.001008",
        "saved": "0.003072",
        "requests_without_price": 0,
    }
    assert listed["sure"]["requests"] == 0 and listed["sure"]["escalated_share"] is None
    [before] = [
        route
        for route in world.ok("GET", "routes?from=2026-10-01&to=2026-11-01")["data"]
        if route["id"] == "auto"
    ]
    assert (before["requests"], before["saving"]["saved"]) == (0, "0")


@pytest.mark.parametrize(
    ("body", "target", "reason"),
    [
        ({"prompt": CANARY}, "small", "easy"),
        ({"prompt": f"{CANARY} and so much more of it"}, "large", "hard"),
        ({"prompt": CANARY, "tags": ["law"]}, "large", "tag"),
        ({"prompt": CANARY, "model": "auto", "metadata": {"tags": "draft LAW"}}, "large", "tag"),
        ({"messages": [{"role": "user", "content": CANARY}], "has_tools": True}, "large", "tools"),
    ],
)
def test_a_dry_run_says_what_would_be_decided_and_nothing_of_the_text(
    world: World, body: dict[str, Any], target: str, reason: str
) -> None:
    response = world.call("POST", "routes/auto/explain", body)
    found = response.json()
    assert (found["target"], found["reason"], found["threshold"]) == (target, reason, 0.5)
    assert found["model"] == {"small": "smollm2-135m", "large": "large"}[target]
    texts = body.get("prompt") or body["messages"][0]["content"]
    assert found["features"]["num_characters"] == len(texts)
    assert CANARY not in response.text
    # Nothing ran, and nothing is written down.
    assert not world.models.requests and not world.rows("select * from billing.events")


def test_a_dry_run_of_confidence_says_that_the_answer_itself_decides(world: World) -> None:
    found = world.ok("POST", "routes/sure/explain", {"prompt": "Hi"})
    assert (found["target"], found["model"], found["score"]) == ("small_first", None, None)
    assert (found["reason"], found["after_tokens"]) == ("asked_first", 16)
    assert not world.models.requests


def test_a_dry_run_of_the_classifier_shows_what_each_feature_adds(world: World) -> None:
    found = world.ok("POST", "routes/team/seen/explain", {"prompt": "What is 12 plus 9?"})
    assert 0 < found["score"] < 1 and set(found["contributions"]) <= set(found["features"])


@pytest.mark.parametrize(
    "body",
    [{}, {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, {"prompt": "x", "run": True}],
)
def test_a_dry_run_needs_one_prompt_and_runs_nothing(world: World, body: dict[str, Any]) -> None:
    assert world.call("POST", "routes/auto/explain", body).status_code == 400


def test_an_unknown_route_is_not_there(world: World) -> None:
    assert world.call("POST", "routes/nowhere/explain", {"prompt": "x"}).status_code == 404


def test_finance_sees_what_routes_save_and_asks_none_of_them(world: World) -> None:
    assert len(world.ok("GET", "routes", key="finance")["data"]) == 3
    assert world.call("POST", "routes/auto/explain", {"prompt": CANARY}, key="finance").status_code == 403


def test_the_command_lists_routes_and_explains_one(run: Run) -> None:
    assert [route["id"] for route in parsed(run("routes", "list", "--json"))] == ["auto", "sure", "team/seen"]
    assert "escalated_share" in said(run("routes", "list"))
    explained = parsed(run("routes", "explain", "team/seen", CANARY, "--json"))
    assert explained["route"] == "team/seen" and explained["contributions"]
    assert parsed(run("routes", "explain", "auto", CANARY, "--tags", "law", "--json"))["reason"] == "tag"
    assert CANARY not in said(run("routes", "explain", "auto", CANARY))
    refused = run("routes", "explain", "none", CANARY)
    assert "no such route" in str(refused.exception)
