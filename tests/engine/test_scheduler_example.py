"""The worked example of engine/README.md: what is written there is what the scheduler does."""

from __future__ import annotations

import pytest

from footplate.engine.scheduler import DrainFirst
from tests.engine.engine_builders import Driver, make_request

CHAT, LONG = 0, 1


def started(num_blocks: int, chat_tokens: int) -> Driver:
    driver = Driver(num_blocks, ahead=True, max_num_batched_tokens=6)
    driver.add(make_request("chat", 3, max_tokens=chat_tokens))
    driver.add(make_request("long", [9] * 12, max_tokens=2))
    return driver


def rows(driver: Driver) -> list[list[tuple[int, int, int, bool, tuple[int, ...]]]]:
    """Of each step: sequence, first token, last token, whether it draws, new blocks."""
    return [
        [(r.sequence_id, r.start, r.end - 1, r.samples, r.new_blocks) for r in output.rows]
        for output in driver.outputs
    ]


def test_two_requests_and_a_prompt_in_three_chunks() -> None:
    driver = started(num_blocks=16, chat_tokens=3)
    driver.run()
    assert rows(driver) == [
        [(CHAT, 0, 2, True, (0,)), (LONG, 0, 2, False, (1,))],
        [(CHAT, 3, 3, True, ()), (LONG, 3, 7, False, (2,))],
        [(CHAT, 4, 4, True, (3,)), (LONG, 8, 11, True, (4,))],
        [(LONG, 12, 12, True, (5,))],
    ]
    assert [len(driver.tokens[name, 0]) for name in ("chat", "long")] == [3, 2]


def test_in_a_pool_of_four_blocks_the_newest_gives_way_once_no_step_is_in_flight() -> None:
    driver = started(num_blocks=4, chat_tokens=8)
    for _ in range(6):
        driver.step()
    # No block is left for the last chunk, and `chat` goes on alone.
    assert rows(driver)[2:] == [[(CHAT, 4 + n, 4 + n, True, (3,) if n == 0 else ())] for n in range(4)]
    assert driver.scheduler.num_in_flight == 1
    with pytest.raises(DrainFirst):
        driver.scheduler.schedule()
    driver.read()
    assert driver.launch()
    assert rows(driver)[6][0][:4] == (CHAT, 8, 8, True)
    assert driver.scheduler.stats().preemptions == 1
    driver.run()
    assert [len(driver.tokens[name, 0]) for name in ("chat", "long")] == [8, 2]
