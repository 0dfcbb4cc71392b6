"""Prompts of one tenant beside the answers of another: what a step may take of them, and what it may not."""

from __future__ import annotations

import math
from typing import Any

import pytest

from footplate.engine import scheduler as scheduler_module
from footplate.engine.allowance import DECODE_ROW_WORK, STRETCH, PromptAllowance
from tests.engine.engine_builders import Driver, make_request

STEP_WORK, DECODE_WORK = 64.0, 10.0


@pytest.fixture(autouse=True)
def flat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of any depth cost the same here."""
    monkeypatch.setattr(scheduler_module, "DEPTH_TOKENS", math.inf)


def driver(**options: Any) -> Driver:
    defaults = {"step_work": STEP_WORK, "decode_work": DECODE_WORK, "policy": "fair"}
    return Driver(256, max_num_batched_tokens=256, **{**defaults, **options})


def test_a_bucket_holds_a_burst_and_fills_with_others_decodes() -> None:
    allowance = PromptAllowance(DECODE_WORK, burst=64)
    assert allowance.left("a") == 64
    allowance.spend("a", 70, is_guest=True)
    assert allowance.left("a") == -6
    allowance.begin_step(num_decodes=5)
    assert allowance.left("a") == pytest.approx(-6 + STRETCH * (DECODE_WORK + 5 * DECODE_ROW_WORK))
    allowance.begin_step(num_decodes=0)
    assert allowance.left("a") < 0
    for _ in range(100):
        allowance.begin_step(num_decodes=5)
    assert allowance.left("a") == 64
    # Alone, work is free, but leaves no burst behind.
    allowance.spend("a", 1_000, is_guest=False)
    assert allowance.left("a") == 0


def test_without_a_bound_nothing_is_kept() -> None:
    allowance = PromptAllowance(math.inf, burst=math.inf)
    allowance.begin_step(4)
    allowance.spend("a", 1_000, is_guest=True)
    assert allowance.left("a") == math.inf


def test_a_monster_prompt_lengthens_others_steps_by_a_third_at_most() -> None:
    rig = driver()
    for number in range(3):
        rig.add(make_request(f"chat {number}", 4, tenant="chatty", max_tokens=60))
    rig.step()
    rig.add(make_request("monster", 400, tenant="noisy", max_tokens=1))
    before = len(rig.outputs)
    for _ in range(40):
        rig.step()
    taken = [
        sum(row.num_tokens for row in output.rows) - 3
        for output in rig.outputs[before:]
        if len(output.rows) == 4
    ]
    # The first step is the burst of a tenant that asked for nothing before.
    assert taken[0] == STEP_WORK
    work = STRETCH * (DECODE_WORK + 3 * DECODE_ROW_WORK)
    assert 0 < max(taken[1:]) <= work + 1
    # It goes on all the while: nobody starves.
    assert sum(taken[1:]) == pytest.approx(work * len(rig.outputs[before + 1 :]), abs=work + 1)


def test_it_has_whole_steps_as_soon_as_nobody_else_decodes() -> None:
    rig = driver()
    rig.add(make_request("chat", 4, tenant="chatty", max_tokens=10))
    rig.step()
    rig.add(make_request("monster", 400, tenant="noisy", max_tokens=1))
    rig.run()
    sizes = [row.num_tokens for output in rig.outputs for row in output.rows if row.num_tokens > 1]
    assert sizes[-2] == STEP_WORK


def test_a_tenants_prompts_are_not_held_for_its_own_answers() -> None:
    rig = driver()
    rig.add(make_request("chat", 4, tenant="one", max_tokens=30))
    rig.step()
    rig.add(make_request("long", 300, tenant="one", max_tokens=1))
    before = len(rig.outputs)
    for _ in range(4):
        rig.step()
    assert [max(row.num_tokens for row in output.rows) for output in rig.outputs[before:]] == [64] * 4


def test_short_prompts_of_others_pass_a_monster_that_is_held() -> None:
    rig = driver()
    rig.add(make_request("chat", 4, tenant="chatty", max_tokens=60))
    rig.step()
    rig.add(make_request("monster", 400, tenant="noisy", max_tokens=1))
    for _ in range(5):
        rig.step()
    rig.add(make_request("second monster", 400, tenant="noisy", max_tokens=1))
    rig.add(make_request("new chat", 20, tenant="newcomer", max_tokens=1))
    rig.step()
    assert ("new chat", 0) in rig.ended


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_other_policies_hold_nobody(policy: str) -> None:
    rig = driver(policy=policy)
    rig.add(make_request("chat", 4, tenant="chatty", max_tokens=60))
    rig.step()
    rig.add(make_request("monster", 256, tenant="noisy", max_tokens=1))
    before = len(rig.outputs)
    for _ in range(4):
        rig.step()
    assert [max(row.num_tokens for row in output.rows) for output in rig.outputs[before:]] == [64] * 4
