"""A full pool in which everything is shared: every step still moves something, and everything ends."""

from __future__ import annotations

import random

import pytest

from footplate.engine.errors import EngineError
from footplate.engine.types import BATCH_PRIORITY
from tests.engine.engine_builders import VOCAB, Driver, make_request

SHARED = [[(7 * i + n) % (VOCAB - 1) + 1 for i in range(80)] for n in (1, 5)]


def test_a_victim_whose_blocks_are_all_shared_is_not_taken_for_room() -> None:
    """The lowest prompt ends at a block and shares all it holds: its end frees nothing."""
    driver = Driver(22, step_work=17.0, max_num_batched_tokens=12, max_num_seqs=4, policy="fair")
    arrivals = {  # by step: prompt, its length, priority, choices
        1: (SHARED[1], 32, 2, 1),
        2: (SHARED[0], 60, 0, 1),
        3: (SHARED[0], 16, 1, 1),
        5: (SHARED[1], 40, 0, 3),
        7: (SHARED[1], 32, 2, 1),
    }
    for number in range(12):
        if number in arrivals:
            prompt, length, priority, n = arrivals[number]
            driver.add(make_request(f"r{number}", prompt[:length], priority=priority, max_tokens=0, n=n))
        if driver.scheduler.has_work:
            driver.step()
    driver.run()
    assert driver.scheduler.stats().preemptions > 0
    assert all(row.num_tokens > 0 for output in driver.outputs for row in output.rows)


@pytest.mark.parametrize("seed", range(20))
def test_tiny_pools_of_shared_prompts_never_plan_an_empty_row(seed: int) -> None:
    choose = random.Random(seed)
    driver = Driver(
        choose.randint(5, 24),
        ahead=choose.random() < 0.5,
        max_model_len=96,
        step_work=choose.choice([3.0, 9.0, 17.0]),
        max_num_batched_tokens=choose.choice([4, 5, 8, 12, 16]),
        max_num_seqs=choose.randint(2, 4),
        policy=choose.choice(["fcfs", "priority", "fair"]),
    )
    for number in range(12):
        ids = choose.choice(SHARED)[: choose.choice([8, 16, 20, 24, 32, 40, 48, 60])]
        options = {"max_tokens": choose.choice([0, 1, 4, 12]), "n": choose.choice([1, 1, 2])}
        try:
            driver.add(
                make_request(f"r{number}", ids, priority=choose.choice([0, 1, BATCH_PRIORITY]), **options)
            )
        except EngineError:
            continue  # larger than the pool
        if driver.scheduler.has_work:
            driver.step()
    driver.run()
    assert all(row.num_tokens > 0 for output in driver.outputs for row in output.rows)
