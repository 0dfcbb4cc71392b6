"""Whose turn it is: arrival under `fcfs`, class under `priority`, shares by weight under `fair`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import pytest

from footplate.engine.errors import EngineOverloaded
from footplate.engine.sequence import Sequence, SequenceState
from footplate.engine.types import SamplingParams
from footplate.engine.waiting import DECODE_COST, PREFILL_COST, VirtualCounters, WaitingQueue
from tests.engine.engine_builders import Driver, make_request

PROMPT, OUTPUT, ROWS = 8, 4, 2
REQUEST_COST = PROMPT * PREFILL_COST + (OUTPUT - 1) * DECODE_COST  # the last token is never computed
# Sheng et al., theorem 4.4: backlogged tenants' service differs by at most twice what can run at once.
BOUND = 2 * ROWS * REQUEST_COST


def make_sequence(arrival: int, tenant: str = "a", priority: int = 0, weight: float = 1.0) -> Sequence:
    request = make_request(f"r{arrival}", PROMPT, tenant, priority, weight)
    ids = list(request.prompt_token_ids)
    return Sequence(arrival, request, 0, SamplingParams(), 8, arrival, b"", ids, len(ids))


def order(policy: str, sequences: Iterable[Sequence]) -> list[int]:
    queue = WaitingQueue(policy)
    for sequence in sequences:
        queue.counters.arrive(sequence.request.tenant)
        queue.push(sequence)
    out = []
    while (head := queue.peek()) is not None:
        queue.pop(head)
        out.append(head.id)
    assert len(queue) == 0
    return out


def test_fcfs_is_arrival_whatever_the_class_or_tenant() -> None:
    assert order("fcfs", [make_sequence(2, "a", 0), make_sequence(0, "b", 9), make_sequence(1)]) == [0, 1, 2]


def test_priority_is_class_and_then_arrival() -> None:
    mixed = [make_sequence(0, priority=1), make_sequence(3), make_sequence(1, "b"), make_sequence(2)]
    assert order("priority", mixed) == [1, 2, 3, 0]


def test_fair_lets_class_come_before_share() -> None:
    queue = WaitingQueue("fair")
    heavy, light = make_sequence(0, "heavy", priority=0), make_sequence(1, "light", priority=1)
    for sequence in (heavy, light):
        queue.counters.arrive(sequence.request.tenant)
        queue.push(sequence)
    queue.counters.charge(heavy, 1000)
    assert queue.peek() is heavy


def test_fair_serves_the_lowest_counter_and_each_tenant_in_arrival_order() -> None:
    queue = WaitingQueue("fair")
    a0, a1, b = make_sequence(0, "a"), make_sequence(1, "a"), make_sequence(2, "b")
    for sequence in (a1, b, a0):
        queue.counters.arrive(sequence.request.tenant)
        queue.push(sequence)
    assert queue.peek() is a0  # equal counters: who came first
    queue.pop(a0)
    queue.counters.charge(a0, 8)
    assert queue.peek() is b
    assert queue.key(b) < queue.key(a1)


def test_a_sequence_that_ended_while_waiting_is_passed_over() -> None:
    queue = WaitingQueue("fcfs")
    first, second = make_sequence(0), make_sequence(1)
    queue.push(first)
    queue.push(second)
    queue.discard(first)
    first.state = SequenceState.FINISHED
    assert len(queue) == 1 and list(queue) == [second] and queue.peek() is second


def charged(sequence: Sequence, computed: int, num_tokens: int) -> float:
    counters = VirtualCounters(fair=True)
    counters.arrive(sequence.request.tenant)
    sequence.num_computed = computed + num_tokens
    counters.charge(sequence, num_tokens)
    return counters.value(sequence.request.tenant)


@pytest.mark.parametrize(
    ("computed", "num_tokens", "cost"),
    [
        (0, 8, 8 * PREFILL_COST),
        (7, 1, PREFILL_COST),  # a prompt's last token alone is still a prompt token
        (8, 1, DECODE_COST),
        (4, 6, 6 * PREFILL_COST),  # recomputed after a preemption
    ],
)
def test_prompt_tokens_cost_one_and_generated_ones_two(computed: int, num_tokens: int, cost: float) -> None:
    assert charged(make_sequence(0), computed, num_tokens) == cost
    assert charged(make_sequence(0, weight=4), computed, num_tokens) == cost / 4


@pytest.mark.parametrize("busy", [True, False])
def test_a_tenant_that_was_idle_gets_no_credit(busy: bool) -> None:
    counters, worker = VirtualCounters(fair=True), make_sequence(0, "worker")
    counters.arrive("idler")
    counters.leave("idler")
    counters.arrive("worker")
    counters.charge(worker, 1000)
    if not busy:
        counters.leave("worker")  # nobody is left; the idler still was away for all that work
    counters.arrive("idler")
    assert counters.value("idler") == 1000
    counters.arrive("newcomer")
    assert counters.value("newcomer") == 1000


def test_going_idle_forgives_no_debt() -> None:
    counters = VirtualCounters(fair=True)
    counters.arrive("light")
    counters.arrive("heavy")
    counters.charge(make_sequence(0, "heavy"), 500)
    counters.leave("heavy")
    counters.arrive("heavy")
    assert (counters.value("light"), counters.value("heavy")) == (0, 500)


def services(driver: Driver, tenants: list[str]) -> list[dict[str, float]]:
    """Each tenant's service (virtual tokens) after each step; `tenants` by sequence id."""
    total: dict[str, float] = defaultdict(float)
    out = []
    for output in driver.outputs:
        for row in output.rows:
            cost = PREFILL_COST if row.start < PROMPT else DECODE_COST
            total[tenants[row.sequence_id]] += row.num_tokens * cost
        out.append(dict(total))
    return out


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_backlogged_tenants_share_by_weight(weight: float, ahead: bool) -> None:
    driver = Driver(policy="fair", max_num_seqs=ROWS, prefix_caching=False, ahead=ahead)
    tenants = ["big"] * 40 + ["small"] * 40  # the whole backlog of one came first
    weights = {"big": weight, "small": 1.0}
    for i, tenant in enumerate(tenants):
        driver.add(make_request(f"r{i}", PROMPT, tenant, weight=weights[tenant], max_tokens=OUTPUT))
    driver.run()
    for service in services(driver, tenants):
        if service.get("big", 0) >= 39 * REQUEST_COST or service.get("small", 0) >= 39 * REQUEST_COST:
            break  # one of them runs out of work
        gap = service.get("big", 0) / weight - service.get("small", 0)
        assert abs(gap) <= BOUND


@pytest.mark.parametrize("pause", [True, False])
def test_an_idle_tenant_shares_from_its_return_on(pause: bool) -> None:
    """Work alone earns no debt: after the newcomer's arrival both are served alike."""
    driver = Driver(policy="fair", max_num_seqs=ROWS, prefix_caching=False)
    tenants = ["old"] * 30 + ["new"] * 20 + ["old"] * 20
    requests = [make_request(f"r{i}", PROMPT, t, max_tokens=OUTPUT) for i, t in enumerate(tenants)]
    for request in requests[:30]:
        driver.add(request)
    while (driver.scheduler.stats().waiting > 0) or (pause and driver.scheduler.has_work):
        driver.step()
    before = services(driver, tenants)[-1]["old"]
    for request in requests[30:]:
        driver.add(request)
    driver.run()
    for service in services(driver, tenants):
        if service.get("new", 0) > 0 and service["new"] < 18 * REQUEST_COST:
            assert abs(service["old"] - before - service["new"]) <= BOUND


def test_one_class_of_many_tenants_admits_each_in_turn() -> None:
    driver = Driver(policy="fair", max_num_seqs=1, prefix_caching=False)
    tenants = ["a"] * 4 + ["b"] * 4 + ["c"] * 4
    for i, tenant in enumerate(tenants):
        driver.add(make_request(f"r{i}", PROMPT, tenant, max_tokens=OUTPUT))
    driver.run()
    ends = [tenants[int(key[0][1:])] for key in driver.ended]
    assert ends == ["a", "b", "c"] * 4


def test_no_tenant_can_fill_the_queue_for_all_others() -> None:
    driver = Driver(policy="fair", max_waiting=16)
    for number in range(8):
        driver.add(make_request(f"flood {number}", 4, tenant="flood", max_tokens=1))
    with pytest.raises(EngineOverloaded, match="limit is 16"):
        driver.add(make_request("flood 8", 4, tenant="flood"))
    for number in range(4):
        driver.add(make_request(f"other {number}", 4, tenant="other", max_tokens=1))
    with pytest.raises(EngineOverloaded):
        driver.add(make_request("other 4", 4, tenant="other"))
    driver.add(make_request("third", 4, tenant="third", max_tokens=1))
    driver.run()
    assert len(driver.ended) == 13
    driver.add(make_request("flood 8", 4, tenant="flood", max_tokens=1))
    driver.run()


def test_what_left_the_queue_by_an_abort_makes_room() -> None:
    driver = Driver(policy="fair", max_waiting=2)
    driver.add(make_request("a", 4, tenant="a", max_tokens=1))
    driver.scheduler.abort("a")
    driver.add(make_request("b", 4, tenant="a", max_tokens=1))
    driver.run()
