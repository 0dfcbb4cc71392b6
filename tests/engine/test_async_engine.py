"""The step loop in its thread: one end for every choice, whatever happens to the device or the callers."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from footplate.engine.async_engine import AsyncEngine
from footplate.engine.core import EngineCore
from footplate.engine.errors import EngineDead, EngineOverloaded, InvalidRequest
from footplate.engine.plan import SchedulerOutput, StepResult
from footplate.engine.types import FinishReason, SequenceDelta
from tests.engine.engine_builders import VOCAB, Driver, make_request
from tests.engine.stub_device import oracle

WAIT_S = 30.0  # only a hang takes this long


class GatedDevice:
    """The stub device behind a gate: a step runs when the test lets it. Open at first."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Semaphore(0)
        self.fault: Exception | None = None  # raised in the fifth step
        self.steps = 0

    def run(self, output: SchedulerOutput) -> StepResult:
        self.steps += 1
        self.entered.release()
        assert self.gate.wait(WAIT_S)
        if self.fault is not None and self.steps >= 5:
            raise self.fault
        result: StepResult = self.device.run(output)
        return result


class Listener:
    """Collects what is delivered, and lets a test wait for ends."""

    def __init__(self) -> None:
        self.calls: list[list[SequenceDelta]] = []
        self.threads: set[str] = set()
        self.ends: queue.Queue[SequenceDelta] = queue.Queue()
        self.tokens: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.fault: Exception | None = None

    def __call__(self, deltas: Sequence[SequenceDelta]) -> None:
        if self.fault is not None:
            fault, self.fault = self.fault, None
            raise fault
        self.calls.append(list(deltas))
        self.threads.add(threading.current_thread().name)
        for delta in deltas:
            self.tokens[delta.request_id, delta.index] += delta.token_ids
            if delta.finish_reason is not None:
                self.ends.put(delta)

    def wait_for_ends(self, count: int) -> dict[tuple[str, int], FinishReason]:
        """The next `count` ends; each choice may have one only."""
        seen: dict[tuple[str, int], FinishReason] = {}
        for _ in range(count):
            delta = self.ends.get(timeout=WAIT_S)
            assert (delta.request_id, delta.index) not in seen, "a second end"
            assert delta.finish_reason is not None
            seen[delta.request_id, delta.index] = delta.finish_reason
        return seen


Started = tuple[AsyncEngine, GatedDevice, Listener]


@pytest.fixture(params=[False, True], ids=["in-step", "ahead"])
def start(request: pytest.FixtureRequest) -> Iterator[Callable[..., Started]]:
    engines: list[tuple[AsyncEngine, GatedDevice]] = []

    def build(num_blocks: int = 1024, **config: Any) -> Started:
        driver, listener = Driver(num_blocks, **config), Listener()
        device = GatedDevice(driver.device)
        core = EngineCore(driver.scheduler, device, ahead=request.param)
        facts: dict[str, Any] = {"max_model_len": 512, "vocab_size": VOCAB, "dtype": "none"}
        engine = AsyncEngine(core, listener, fingerprint="fp", **facts)
        engines.append((engine, device))
        return engine, device, listener

    yield build
    for engine, device in engines:
        device.gate.set()
        engine.shutdown()


def test_each_choice_gets_its_tokens_and_one_end(start: Callable[..., Started]) -> None:
    engine, _, listener = start()
    requests = [make_request(f"r{i}", 5 + i, n=1 + i % 3, max_tokens=3 + i) for i in range(9)]
    for request in requests:
        engine.add(request)
    choices = [(r, index) for r in requests for index in range(r.params.n)]
    ends = listener.wait_for_ends(len(choices))
    engine.shutdown()
    assert listener.ends.empty()
    for request, index in choices:
        key = (request.request_id, index)
        assert listener.tokens[key] == oracle(request, index, VOCAB, request.params.max_tokens or 0)
        assert ends[key] is FinishReason.LENGTH
    engine.core.scheduler.check()


def test_deliver_is_called_once_a_step_on_the_engines_thread(start: Callable[..., Started]) -> None:
    engine, device, listener = start()
    device.gate.clear()
    for i in range(4):
        engine.add(make_request(f"r{i}", [i] * 4, max_tokens=6))
    device.gate.set()
    listener.wait_for_ends(4)
    engine.shutdown()
    assert len(listener.calls) <= device.steps
    for call in listener.calls:
        keys = [(d.request_id, d.index) for d in call]
        assert call and len(keys) == len(set(keys))
    assert listener.threads == {"footplate-engine"}


def test_a_step_with_nothing_new_to_tell_is_not_delivered(start: Callable[..., Started]) -> None:
    engine, device, listener = start(max_num_batched_tokens=8)
    engine.add(make_request("r", 32, max_tokens=1))  # four steps, of which the last one draws
    listener.wait_for_ends(1)
    assert device.steps == 4 and len(listener.calls) == 1


def test_requests_and_aborts_come_from_any_thread(start: Callable[..., Started]) -> None:
    engine, _, listener = start(num_blocks=24, policy="fair")

    def client(number: int) -> None:
        for i in range(25):
            request_id = f"r{number}-{i}"
            engine.add(make_request(request_id, [number] * (1 + i % 9), str(number), n=1 + i % 2))
            if i % 3 == 0:
                engine.abort(request_id)
            if i % 5 == 0:
                engine.abort(request_id, 0)
            engine.stats()

    threads = [threading.Thread(target=client, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ends = listener.wait_for_ends(4 * (13 + 2 * 12))
    assert FinishReason.ABORT in ends.values() and FinishReason.LENGTH in ends.values()
    engine.shutdown()
    assert listener.ends.empty()
    engine.core.scheduler.check()
    assert not engine.core.has_work


def test_an_abort_while_a_step_runs_ends_the_request(start: Callable[..., Started]) -> None:
    engine, device, listener = start()
    device.gate.clear()
    engine.add(make_request("r", 4, max_tokens=400))
    assert device.entered.acquire(timeout=WAIT_S)
    engine.abort("r")
    engine.abort("r")
    engine.abort("never seen")
    device.gate.set()
    assert listener.wait_for_ends(1) == {("r", 0): FinishReason.ABORT}
    assert len(listener.tokens["r", 0]) <= 1


def test_shutdown_aborts_what_runs_and_joins(start: Callable[..., Started]) -> None:
    engine, _, listener = start()
    for i in range(3):
        engine.add(make_request(f"r{i}", [i] * 4, n=2, max_tokens=500))
    engine.shutdown()
    ends = listener.wait_for_ends(6)
    assert set(ends.values()) <= {FinishReason.ABORT, FinishReason.LENGTH}
    assert FinishReason.ABORT in ends.values()
    assert not engine._thread.is_alive()
    with pytest.raises(EngineOverloaded, match="shutting down"):
        engine.add(make_request("late", 4))
    engine.shutdown()  # once more is fine
    engine.abort("r0")
    assert listener.ends.empty()


def test_a_device_fault_ends_every_live_choice_with_an_error(start: Callable[..., Started]) -> None:
    engine, device, listener = start()
    device.gate.clear()
    device.fault = RuntimeError("secret words of a prompt")
    engine.add(make_request("mixed", 4, n=3, max_tokens=400))
    assert device.entered.acquire(timeout=WAIT_S)
    engine.abort("mixed", 1)  # told before the fault: this choice has its end already
    engine.add(make_request("long", 4, max_tokens=400))
    device.gate.set()
    ends = listener.wait_for_ends(4)
    assert ends.pop(("mixed", 1)) is FinishReason.ABORT
    assert set(ends) == {("mixed", 0), ("mixed", 2), ("long", 0)}
    assert set(ends.values()) == {FinishReason.ERROR}
    errors = {d.error for call in listener.calls for d in call if d.finish_reason is FinishReason.ERROR}
    assert errors == {"engine_dead"}
    engine._thread.join(WAIT_S)
    with pytest.raises(EngineDead, match="RuntimeError") as dead:
        engine.add(make_request("late", 4))
    assert "secret" not in str(dead.value)
    engine.abort("mixed")
    engine.shutdown()
    assert listener.ends.empty()
    assert engine.heartbeat_age_s() == float("inf")


def test_a_listener_that_fails_kills_the_engine_and_still_ends_requests(
    start: Callable[..., Started],
) -> None:
    engine, _, listener = start()
    listener.fault = ValueError("listener")
    engine.add(make_request("r", 4, max_tokens=400))
    assert listener.wait_for_ends(1) == {("r", 0): FinishReason.ERROR}
    with pytest.raises(EngineDead):
        engine.add(make_request("late", 4))


def test_a_refused_request_disturbs_nobody(start: Callable[..., Started]) -> None:
    engine, device, listener = start()
    device.gate.clear()
    engine.add(make_request("r", 4))
    for wrong in (make_request("empty", 0), make_request("r", 4)):
        with pytest.raises(InvalidRequest):
            engine.add(wrong)
    device.gate.set()
    assert listener.wait_for_ends(1) == {("r", 0): FinishReason.LENGTH}


def test_the_heartbeat_ages_while_a_step_hangs(start: Callable[..., Started]) -> None:
    engine, device, listener = start()
    device.gate.clear()
    engine.add(make_request("r", 4, max_tokens=1))
    assert device.entered.acquire(timeout=WAIT_S)
    hung = engine.heartbeat_age_s()
    assert engine.heartbeat_age_s() > hung
    beat = engine._beat
    device.gate.set()
    listener.wait_for_ends(1)
    engine.shutdown()
    assert engine._beat > beat


def test_the_door_tells_what_the_engine_holds(start: Callable[..., Started]) -> None:
    engine, _, _ = start(num_blocks=16)
    assert (engine.kv_tokens, engine.max_model_len, engine.vocab_size) == (64, 512, VOCAB)
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.kv_blocks_total) == (0, 0, 16)


@pytest.mark.parametrize("ahead", [False, True])
def test_ahead_means_one_step_is_in_flight_between_steps(ahead: bool) -> None:
    driver = Driver()
    core = EngineCore(driver.scheduler, driver.device, ahead=ahead)
    core.add(make_request("r", 4, max_tokens=3))
    told, in_flight = [], []
    while core.has_work:
        told.append(sum(len(d.token_ids) for d in core.step()))
        in_flight.append(core.scheduler.num_in_flight)
    core.shutdown()
    # ahead: a step is read only once the next one is launched, the last one when nothing is left to launch
    assert told == ([0, 1, 1, 1] if ahead else [1, 1, 1])
    assert in_flight == ([1, 1, 1, 0] if ahead else [0, 0, 0])
