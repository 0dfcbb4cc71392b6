"""Batch work yields: behind all other work under every policy, in short steps, with its blocks and rows."""

from __future__ import annotations

import random
from typing import Any

import pytest

from footplate.engine.config import EngineConfig
from footplate.engine.errors import EngineOverloaded, InvalidRequest, LoadError
from footplate.engine.types import BATCH_PRIORITY, EngineRequest
from footplate.engine.work_class import FAST_BOUNDS, SLOW_BOUNDS, BatchBounds
from tests.engine.engine_builders import VOCAB, Driver, make_request
from tests.engine.stub_device import oracle

POLICIES = ["fcfs", "priority", "fair"]
Rows = list[list[tuple[str, int, int]]]


def batch_request(name: str, prompt: list[int] | int, tenant: str = "batch", **options: Any) -> EngineRequest:
    return make_request(name, prompt, tenant, BATCH_PRIORITY, **options)


class NamedDriver(Driver):
    """Knows requests by their names, a letter and a number each: b is batch work."""

    def __init__(self, num_blocks: int = 64, **options: Any) -> None:
        super().__init__(num_blocks, **options)
        self.requests: list[EngineRequest] = []

    def add(self, request: EngineRequest) -> None:
        super().add(request)
        self.requests += [request] * request.params.n  # each choice is a sequence of its own

    def rows(self, first: int = 0) -> Rows:
        """(name, start, tokens) of each row of each step from `first` on."""
        return [
            [(self.requests[r.sequence_id].request_id, r.start, r.num_tokens) for r in output.rows]
            for output in self.outputs[first:]
        ]

    def run_to_the_answers(self) -> None:
        """Everybody ends, and says what it says alone."""
        self.run()
        for request in self.requests:
            want = oracle(request, 0, VOCAB, request.params.max_tokens or 0)
            assert self.tokens[request.request_id, 0] == want, request.request_id
        assert self.scheduler.pool.num_held == 0

    def run_until_decoding(self, *names: str) -> None:
        while not all(self.tokens[name, 0] for name in names):
            self.step()


def is_batch(row: tuple[str, int, int]) -> bool:
    return row[0].startswith("b")


def batch_tokens(step: list[tuple[str, int, int]]) -> int:
    return sum(row[2] for row in step if is_batch(row))


# --- waiting --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_batch_work_waits_while_other_work_is_there_and_keeps_its_blocks(policy: str, ahead: bool) -> None:
    driver = NamedDriver(policy=policy, ahead=ahead, step_work=64.0)
    driver.add(batch_request("b0", 6, max_tokens=20))
    driver.add(batch_request("b1", 9, max_tokens=20))
    driver.run_until_decoding("b0", "b1")
    before, held = len(driver.outputs), driver.scheduler.pool.num_held
    driver.add(make_request("o0", 5, priority=2**31, max_tokens=6))
    while ("o0", 0) not in driver.ended:
        driver.step()
        assert driver.scheduler.pool.num_held >= held
    beside = [step for step in driver.rows(before) if not all(is_batch(row) for row in step)]
    assert driver.rows(before)[0][0][0] == "o0", "it had to wait for one step more"
    assert len(beside) == 6 and not any(map(batch_tokens, beside))
    driver.run_to_the_answers()
    assert driver.scheduler.stats().preemptions == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_a_batch_that_came_first_is_admitted_last(policy: str) -> None:
    driver = NamedDriver(policy=policy, max_num_seqs=1)
    driver.add(batch_request("b0", 4))
    driver.add(make_request("o0", 4, priority=2**31))
    driver.add(make_request("o1", 4, priority=5))
    driver.run_to_the_answers()
    assert list(driver.ended)[-1] == ("b0", 0)


@pytest.mark.parametrize("policy", POLICIES)
def test_other_work_is_planned_as_if_no_batch_were_there(policy: str) -> None:
    def online_rows(*, with_batch: bool) -> Rows:
        rng = random.Random(3)
        driver = NamedDriver(512, policy=policy, step_work=16.0, max_num_seqs=12)
        for number in range(40 if with_batch else 0):
            driver.add(batch_request(f"b{number}", rng.randrange(1, 30), max_tokens=12))
        rng = random.Random(5)
        for number in range(30):
            prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 30))]
            priority, size = rng.randrange(3), rng.randrange(1, 9)
            driver.add(make_request(f"o{number}", prompt, rng.choice("xy"), priority, max_tokens=size))
            for _ in range(rng.randrange(4)):
                driver.step()
        driver.run_to_the_answers()
        steps = [[row for row in step if not is_batch(row)] for step in driver.rows()]
        return [step for step in steps if step]

    assert online_rows(with_batch=True) == online_rows(with_batch=False)


# --- beside other work, where that is cheap -------------------------------------------------------------


@pytest.mark.parametrize("ahead", [False, True])
def test_decodes_ride_along_under_the_bound_and_in_turn(ahead: bool) -> None:
    driver = NamedDriver(ahead=ahead, batch_class_tokens=2)
    names = [f"b{number}" for number in range(5)]
    for name in names:
        driver.add(batch_request(name, 4, max_tokens=40))
    driver.run_until_decoding(*names)
    first = len(driver.outputs)
    driver.add(make_request("o0", 4, max_tokens=30))
    while ("o0", 0) not in driver.ended:
        driver.step()
    beside = [step for step in driver.rows(first) if not all(map(is_batch, step))]
    assert len(beside) == 30 and all(batch_tokens(step) == 2 for step in beside)
    shares = [sum(row[0] == name for step in beside for row in step) for name in names]
    assert max(shares) - min(shares) <= 1
    driver.run_to_the_answers()


def test_a_step_of_decodes_gets_no_batch_prompt_and_one_with_a_prompt_may() -> None:
    driver = NamedDriver(batch_class_tokens=3)
    driver.add(make_request("o0", 4, max_tokens=20))
    driver.step()
    driver.add(batch_request("b0", 12))
    for _ in range(3):
        driver.step()
    driver.add(make_request("o1", [9] * 8))
    driver.step()
    assert driver.rows(1) == [[("o0", start, 1)] for start in (4, 5, 6)] + [
        [("o0", 7, 1), ("o1", 0, 8), ("b0", 0, 3)]
    ]
    driver.run_to_the_answers()


def test_no_more_batch_sequences_run_beside_other_work_than_fit_the_bound() -> None:
    driver = NamedDriver(batch_class_tokens=2)
    driver.add(make_request("o0", 40, max_tokens=8))
    for number in range(4):
        driver.add(batch_request(f"b{number}", 1))
    driver.step()
    driver.step()
    assert driver.scheduler.stats().batch_running == 2 and driver.scheduler.stats().batch_waiting == 2
    driver.run_to_the_answers()


# --- alone ----------------------------------------------------------------------------------------------


def test_steps_of_batch_work_alone_are_short_and_count_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("footplate.engine.step.DEPTH_TOKENS", 16)
    driver = NamedDriver(256, batch_step_tokens=8)
    for number in range(10):
        driver.add(batch_request(f"b{number}", 6 + 9 * (number % 3), max_tokens=30))
    driver.run_to_the_answers()
    work = [[(1 + row.start / 16) * row.num_tokens for row in output.rows] for output in driver.outputs]
    # The last row may be a token over: it is that or nothing.
    assert all(sum(step[:-1]) < 8 for step in work)
    assert max(sum(step) for step in work) < 8 + max(step[-1] for step in work)
    assert max(len(step) for step in work) > 1


def test_alone_no_more_run_than_fit_a_step() -> None:
    driver = NamedDriver(batch_step_tokens=4)
    for number in range(7):
        driver.add(batch_request(f"b{number}", 5, max_tokens=20))
    driver.run_until_decoding("b0", "b1", "b2", "b3")
    assert driver.scheduler.stats().batch_running == 4
    driver.run_to_the_answers()


def test_nothing_is_planned_behind_a_step_of_batch_work_alone() -> None:
    driver = NamedDriver(ahead=True)
    driver.add(batch_request("b0", 4))
    assert driver.launch()
    assert not driver.launch() and driver.scheduler.has_work
    driver.add(make_request("o0", 4))
    assert driver.launch()
    assert driver.rows()[1][0] == ("o0", 0, 4)
    driver.read()
    driver.run_to_the_answers()


# --- giving way -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("beside", [0, 4])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_who_finds_no_row_takes_that_of_the_newest_batch_sequence(
    policy: str, ahead: bool, beside: int
) -> None:
    driver = NamedDriver(policy=policy, ahead=ahead, max_num_seqs=3, batch_class_tokens=beside)
    for number in range(3):
        driver.add(batch_request(f"b{number}", 4, max_tokens=30))
    driver.run_until_decoding("b0", "b1", "b2")
    first = len(driver.outputs)
    driver.add(make_request("o0", 6, max_tokens=10))
    for _ in range(3):
        driver.step()
    driver.add(make_request("o1", 6, max_tokens=10))  # now decodes of batch work may be in flight
    while not (driver.ended.keys() >= {("o0", 0), ("o1", 0)}):
        driver.step()
        assert len(driver.outputs) < first + 16, "somebody waited for a batch sequence to end"
    assert driver.scheduler.stats().preemptions == 2
    assert all(len(driver.tokens[name, 0]) < 20 for name in ("b1", "b2"))
    driver.run_to_the_answers()


@pytest.mark.parametrize("beside", [0, 4])
@pytest.mark.parametrize("ahead", [False, True])
def test_who_finds_no_blocks_takes_those_of_batch_work(ahead: bool, beside: int) -> None:
    driver = NamedDriver(12, ahead=ahead, batch_class_tokens=beside)
    for number in range(3):
        driver.add(batch_request(f"b{number}", [number] * 13, max_tokens=20))
    driver.run_until_decoding("b0", "b1", "b2")
    assert driver.scheduler.pool.num_free == 0
    first = len(driver.outputs)
    driver.add(make_request("o0", 7, max_tokens=30))  # in the end it fills nine of the twelve blocks
    while ("o0", 0) not in driver.ended:
        driver.step()
        assert len(driver.outputs) < first + 35
    assert driver.scheduler.stats().preemptions >= 2
    starts = [row[1] for step in driver.rows(first) for row in step if row[0] == "o0"]
    assert starts == sorted(set(starts)), "it was preempted itself"
    driver.run_to_the_answers()


@pytest.mark.parametrize("delay", range(8))
def test_a_batch_sequence_that_lacks_a_block_waits_and_spoils_no_admission(delay: int) -> None:
    """At some delay b0 needs its next block in the very step in which o1 is admitted into the last ones."""
    driver = NamedDriver(10, ahead=True, batch_class_tokens=4)
    driver.add(batch_request("b0", 3, max_tokens=20))
    driver.add(make_request("o0", 2, max_tokens=16))
    for _ in range(4 + delay):
        driver.step()
    driver.add(make_request("o1", [9] * 4 * driver.scheduler.pool.num_free, max_tokens=1))
    driver.run_to_the_answers()


@pytest.mark.parametrize("ahead", [False, True])
def test_a_paused_batch_sequence_goes_at_once_without_waiting_for_the_step_in_flight(ahead: bool) -> None:
    driver = NamedDriver(ahead=ahead, step_work=64.0, max_num_seqs=2)
    driver.add(batch_request("b0", 4, max_tokens=30))
    driver.run_until_decoding("b0")
    driver.add(make_request("o0", 4, max_tokens=30))
    for _ in range(3):
        driver.step()
    assert driver.scheduler.num_in_flight == ahead
    driver.add(make_request("o1", 4, max_tokens=2))
    driver.step()
    assert [row[0] for row in driver.rows()[-1]] == ["o0", "o1"]
    driver.run_to_the_answers()


@pytest.mark.parametrize("policy", ["priority", "fair"])
def test_batch_work_gives_way_before_a_lower_priority_does(policy: str) -> None:
    driver = NamedDriver(policy=policy, max_num_seqs=2)
    driver.add(batch_request("b0", 4, max_tokens=20))
    driver.run_until_decoding("b0")
    driver.add(make_request("o0", 4, priority=9, max_tokens=20))
    driver.step()
    driver.add(make_request("o1", 4, priority=0, max_tokens=4))
    driver.step()
    driver.step()
    assert {row[0] for row in driver.rows()[-1]} == {"o0", "o1"}
    assert driver.scheduler.stats().preemptions == 1
    driver.run_to_the_answers()


def test_batch_work_gets_no_room_that_other_work_waits_for() -> None:
    """The long prompt has to wait for o0; batch work must not come back into the blocks it waits for."""
    driver = NamedDriver(8, step_work=64.0, batch_class_tokens=8)
    driver.add(make_request("o0", 8, max_tokens=9))
    driver.step()
    driver.add(make_request("o1", [9] * 24, max_tokens=1))
    driver.add(batch_request("b0", 2, max_tokens=2))
    while ("o1", 0) not in driver.ended:
        driver.step()
    before = [step for step in driver.rows() if step[0][0] == "o0"]
    assert len(before) == 9 and not any(map(batch_tokens, before))
    driver.run_to_the_answers()


# --- among itself, and at the door ----------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_batch_tenants_take_turns_under_every_policy(policy: str) -> None:
    driver = NamedDriver(policy=policy, max_num_seqs=1, prefix_caching=False)
    for number in range(9):
        driver.add(batch_request(f"b{number}", 4, tenant="abc"[number // 3], max_tokens=3))
    driver.run_to_the_answers()
    assert ["abc"[int(name[1:]) // 3] for name, _ in driver.ended] == ["a", "b", "c"] * 3


def test_a_tenants_batch_costs_its_users_no_turn() -> None:
    driver = NamedDriver(policy="fair", max_num_seqs=1, prefix_caching=False)
    driver.add(batch_request("b0", 12, tenant="x", max_tokens=8))
    driver.add(make_request("o0", 4, "y", max_tokens=2))
    driver.run()
    driver.add(make_request("o1", 4, "y", max_tokens=2))
    driver.step()  # y is behind x by its own work only
    driver.add(make_request("o2", 4, "y", max_tokens=2))
    driver.add(make_request("o3", 4, "x", max_tokens=2))
    driver.run()
    assert [name for name, _ in driver.ended] == ["o0", "b0", "o1", "o3", "o2"]


def test_a_full_queue_of_batch_work_refuses_batch_work_only() -> None:
    driver = NamedDriver(policy="fcfs", max_waiting=4, max_num_seqs=1)
    for number in range(2):
        driver.add(batch_request(f"b{number}", 4))
    with pytest.raises(EngineOverloaded, match="2 choices wait; the limit is 4"):
        driver.add(batch_request("b2", 4, n=3))
    for number in range(4):
        driver.add(make_request(f"o{number}", 4))
    with pytest.raises(EngineOverloaded, match="4 choices wait"):
        driver.add(make_request("o4", 4))
    driver.add(batch_request("b3", 4, tenant="other"))
    assert driver.scheduler.stats().waiting == 7 and driver.scheduler.stats().batch_waiting == 3
    driver.run_to_the_answers()


def test_no_priority_that_a_client_can_ask_for_is_batch_work() -> None:
    assert not make_request("r", 1, priority=2**31 + 100).is_batch
    assert make_request("r", 1, priority=BATCH_PRIORITY).is_batch
    with pytest.raises(InvalidRequest, match="priority"):
        Driver().add(make_request("r", 1, priority=BATCH_PRIORITY + 1))


def test_bounds_go_by_the_device_unless_they_are_given() -> None:
    assert BatchBounds.resolve(EngineConfig(), 256.0) == BatchBounds(*SLOW_BOUNDS)
    assert BatchBounds.resolve(EngineConfig(), float("inf")) == BatchBounds(*FAST_BOUNDS)
    given = EngineConfig(batch_class_tokens=3, batch_step_tokens=1)
    assert BatchBounds.resolve(given, 256.0) == BatchBounds(3, 1)
    for wrong in ({"batch_class_tokens": -1}, {"batch_step_tokens": 0}):
        with pytest.raises(LoadError, match=f"{next(iter(wrong))} is .*at least"):
            EngineConfig(**wrong)


@pytest.mark.parametrize("seed", range(12))
def test_in_tiny_pools_everybody_ends_with_its_own_answer(seed: int) -> None:
    choose = random.Random(seed)
    driver = NamedDriver(
        choose.randint(8, 20),
        ahead=choose.random() < 0.5,
        max_model_len=32,
        step_work=choose.choice([3.0, 17.0, float("inf")]),
        max_num_batched_tokens=choose.choice([6, 12]),
        max_num_seqs=choose.randint(2, 4),
        policy=choose.choice(POLICIES),
        batch_class_tokens=choose.choice([0, 1, 3]),
        batch_step_tokens=choose.choice([1, 5, 64]),
    )
    for number in range(40):
        prompt = [choose.randrange(3)] * choose.randint(1, 20)
        options = {"max_tokens": choose.randint(1, 8), "n": choose.choice([1, 1, 2])}
        if choose.random() < 0.6:
            driver.add(batch_request(f"b{number}", prompt, choose.choice("xy"), **options))
        else:
            driver.add(make_request(f"o{number}", prompt, choose.choice("xy"), **options))
        for _ in range(choose.randrange(4)):
            driver.step()
    driver.run_to_the_answers()
    assert all(row.num_tokens > 0 for output in driver.outputs for row in output.rows)
