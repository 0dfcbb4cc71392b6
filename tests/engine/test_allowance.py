"""Prompts of one tenant beside the answers of another: what a step may take of them, and what it may not."""

from __future__ import annotations

import math
from typing import Any

import pytest

from footplate.engine import allowance as allowance_module
from footplate.engine import step as step_module
from footplate.engine.allowance import BURST_STEPS, EARNED_BY_TOKEN, STEPS_BETWEEN, PromptAllowance
from tests.engine.engine_builders import Driver, make_request

STEP_WORK = 16.0
BURST = BURST_STEPS * STEP_WORK
MONSTER = int(4 * BURST)


@pytest.fixture(autouse=True)
def flat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of any depth cost the same here."""
    monkeypatch.setattr(step_module, "DEPTH_TOKENS", math.inf)


def driver(**options: Any) -> Driver:
    defaults = {"step_work": STEP_WORK, "policy": "fair", "prefix_caching": False}
    return Driver(2048, max_num_batched_tokens=256, max_model_len=4096, **{**defaults, **options})


def chunks(rig: Driver, since: int) -> list[int]:
    """The prompt tokens of each step."""
    return [
        sum(row.num_tokens for row in output.rows if row.num_tokens > 1) for output in rig.outputs[since:]
    ]


def test_a_bucket_is_filled_by_its_tenants_answers_and_slowly_by_steps() -> None:
    allowance = PromptAllowance(STEP_WORK)
    allowance.begin_step({"b": 1})
    assert allowance.left("a") == BURST
    allowance.spend("a", 1, 1_000)
    assert allowance.left("a") == 0
    allowance.begin_step({"a": 2})
    assert allowance.left("a") == pytest.approx(2 * EARNED_BY_TOKEN, abs=1)
    # Where nobody else decodes, work is free.
    allowance.spend("a", 1, 1_000)
    assert allowance.left("a") > 0
    allowance.begin_step({"b": 1})
    allowance.spend("a", 1, 1_000)
    for _ in range(STEPS_BETWEEN):
        allowance.begin_step({"b": 1})
    assert allowance.left("a") == pytest.approx(STEP_WORK)
    for _ in range(100):
        allowance.begin_step({"a": 2})
    assert allowance.left("a") == BURST


def test_without_a_bound_nobody_is_held_up() -> None:
    allowance = PromptAllowance(math.inf)
    allowance.begin_step({"b": 4})
    allowance.spend("a", 10**6, 10**6)
    assert allowance.share("a", 10**6, others_want=True) == math.inf


def test_a_long_prompt_is_felt_in_one_of_many_steps_of_others_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(allowance_module, "STEPS_BETWEEN", 40)
    rig = driver()
    for number in range(3):
        rig.add(make_request(f"chat {number}", 4, tenant="chatty", max_tokens=200))
    rig.step()
    rig.add(make_request("monster", MONSTER, tenant="noisy", max_tokens=1))
    before = len(rig.outputs)
    for _ in range(3 * 40 + 1):
        rig.step()
    felt = [(number, taken) for number, taken in enumerate(chunks(rig, before)) if taken]
    assert felt == [(number * 40, STEP_WORK) for number in range(4)]


def test_it_has_whole_steps_as_soon_as_nobody_else_decodes() -> None:
    rig = driver()
    rig.add(make_request("chat", 4, tenant="chatty", max_tokens=10))
    rig.step()
    rig.add(make_request("monster", MONSTER, tenant="noisy", max_tokens=1))
    before = len(rig.outputs)
    rig.run()
    taken = chunks(rig, before)
    assert taken[0] == STEP_WORK and set(taken[1:9]) == {0}
    assert set(taken[11:-1]) == {STEP_WORK}


def test_a_prompt_that_the_bucket_holds_goes_on_at_once() -> None:
    rig = driver()
    rig.add(make_request("chat", 4, tenant="chatty", max_tokens=200))
    rig.step()
    rig.add(make_request("long enough", int(BURST), tenant="newcomer", max_tokens=1))
    for _ in range(BURST_STEPS):
        rig.step()
    assert ("long enough", 0) in rig.ended


def test_whoever_writes_as_much_as_it_reads_is_never_held_up() -> None:
    rig = driver()
    rig.add(make_request("other", 4, tenant="other", max_tokens=2_000))
    rig.step()
    for turn in range(40):
        rig.add(make_request(f"chat {turn}", 60, tenant="chatty", max_tokens=8))
        for _ in range(4 + 8):
            rig.step()
        assert (f"chat {turn}", 0) in rig.ended


def test_a_tenants_prompts_are_not_held_up_for_its_own_answers() -> None:
    rig = driver()
    rig.add(make_request("chat", 4, tenant="one", max_tokens=300))
    rig.step()
    rig.add(make_request("long", MONSTER, tenant="one", max_tokens=1))
    before = len(rig.outputs)
    for _ in range(20):
        rig.step()
    assert chunks(rig, before) == [STEP_WORK] * 20


def test_prompts_of_others_pass_one_that_is_held_up() -> None:
    rig = driver()
    rig.add(make_request("chat", 4, tenant="chatty", max_tokens=60))
    rig.step()
    for name in ("first", "second"):
        rig.add(make_request(f"{name} monster", MONSTER, tenant="noisy", max_tokens=1))
    for _ in range(5):
        rig.step()
    rig.add(make_request("new chat", 7, tenant="newcomer", max_tokens=1))
    rig.step()
    assert ("new chat", 0) in rig.ended


def test_several_long_prompts_of_a_tenant_leave_half_a_step_to_anothers() -> None:
    rig = driver()
    for number in range(4):
        rig.add(make_request(f"monster {number}", MONSTER, tenant="noisy", max_tokens=1))
    for _ in range(3):
        rig.step()
    rig.add(make_request("chat", 8, tenant="chatty", max_tokens=1))
    rig.step()
    assert ("chat", 0) in rig.ended


def test_what_is_cached_is_no_work_and_holds_nobody_up() -> None:
    """A long chat's next turn: all but its last words were computed before."""
    rig = driver(prefix_caching=True)
    rig.add(make_request("history", MONSTER, tenant="chatty", max_tokens=1))
    rig.run()
    rig.add(make_request("other", 4, tenant="other", max_tokens=200))
    rig.step()
    for turn in range(1, 4):
        rig.add(make_request(f"turn {turn}", MONSTER + 4 * turn, tenant="chatty", max_tokens=1))
        rig.step()
        assert (f"turn {turn}", 0) in rig.ended


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_other_policies_hold_nobody_up(policy: str) -> None:
    rig = driver(policy=policy)
    rig.add(make_request("chat", 4, tenant="chatty", max_tokens=60))
    rig.step()
    rig.add(make_request("monster", MONSTER, tenant="noisy", max_tokens=1))
    before = len(rig.outputs)
    for _ in range(20):
        rig.step()
    assert chunks(rig, before) == [STEP_WORK] * 20
