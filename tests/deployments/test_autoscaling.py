"""How many replicas: up before users feel it, down when it is calm, and never to and fro."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from footplate.deployments.autoscaling.policy import ReplicaReport, ReplicaScaler, ScalingTarget
from footplate.deployments.autoscaling.serve_policy import ServeReplicaPolicy, recorded, reports_of
from footplate.deployments.autoscaling.service_rate import ServiceRate

TARGET = ScalingTarget(1, 8, waiting_per_replica=4, use=0.75, lead_s=30, clear_s=30, calm_s=300)


class Model:
    """A model's replicas and its scaler, second by second; what is wanted is there at once."""

    def __init__(self, target: ScalingTarget = TARGET, count: int = 1) -> None:
        self.scaler = ReplicaScaler(target)
        self.count = count
        self.now = 1000.0
        self.finished = 0.0
        self.seen: set[int] = set()

    def second(
        self,
        use: float = 0.0,
        waiting: float = 0.0,
        ended: float = 0.0,
        asked: float = 0.0,
        running: float = 0.0,
    ) -> int:
        """`use`, `waiting` and `running` are sums over all replicas."""
        self.now += 1.0
        self.finished += ended
        share = max(1, self.count)
        reports = {
            str(n): ReplicaReport(
                waiting / share, running / share, min(1.0, use / share), self.finished / share
            )
            for n in range(self.count)
        }
        self.count = self.scaler.decide(reports, self.count, self.count, asked, self.now)
        self.seen.add(self.count)
        return self.count


def test_as_many_as_are_used_up_to_the_target_and_within_the_bounds() -> None:
    for use, wanted in ((0.74, 1), (0.76, 2), (2.9, 4), (9.0, 8)):
        model = Model()
        assert [model.second(use=use) for _ in range(400)][-1] == wanted
        assert max(model.seen) == wanted


def test_a_second_of_use_is_none() -> None:
    model = Model()
    for number in range(600):
        assert model.second(use=0.95 if number % 10 == 5 else 0.4) == 1


def test_a_queue_that_may_be_there_moves_nothing() -> None:
    model = Model()
    assert [model.second(use=0.5, waiting=4, ended=5) for _ in range(30)] == [1] * 30


def test_a_queue_asks_for_what_the_arrivals_need_and_not_for_what_it_counts() -> None:
    """Eight requests a second come where one replica ends four, and the others have yet to start."""
    scaler, now, ended, waiting, wanted = ReplicaScaler(replace(TARGET, max_replicas=100)), 0.0, 0.0, 0.0, []
    for second in range(60):
        now, ended = now + 1, ended + 4
        waiting += 4 if second >= 30 else 0
        count = wanted[-1] if wanted else 1
        wanted.append(scaler.decide({"0": ReplicaReport(waiting, 8, 0.7, ended)}, 1, count, 0, now))
    assert set(wanted[:31]) == {1}
    assert wanted[32] == 2
    # Two for the arrivals, and one that clears 120 of them in 30 s; 120 by fours would have been 30.
    assert max(wanted) == 3


def test_a_queue_in_front_of_replicas_that_end_nothing_asks_for_more() -> None:
    assert Model().second(use=0.7, waiting=20) == 5


def test_a_jump_of_arrivals_is_answered_before_anybody_waits() -> None:
    """Four requests a second, each five seconds long and a 128th of a replica; then eight times as many."""
    model = Model()
    assert {model.second(use=20 / 128, running=20, ended=4) for _ in range(300)} == {1}
    counts = [model.second(use=(20 + 28 * n) / 128, running=20 + 28 * n, ended=4) for n in (1, 2)]
    assert counts[-1] == 2
    assert model.scaler.reason == "arrivals"


def test_what_chance_makes_of_arrivals_is_no_jump() -> None:
    model, rng = Model(), random.Random(3)
    running: list[float] = []
    for second in range(7200):
        came = sum(rng.expovariate(1) < 0.4 for _ in range(10))  # about 3.3 a second, five seconds each
        before = len(running)
        running = [end for end in running if end > second]
        ended = before - len(running)
        running += [second + rng.uniform(3, 7)] * came
        assert model.second(use=len(running) / 40, running=len(running), ended=ended) == 1


def test_short_requests_that_are_soon_done_ask_for_nothing() -> None:
    """Twenty at once in one second of each minute, gone in the next: no reason to start anything."""
    model = Model()
    for second in range(900):
        is_burst, was_burst = second % 60 == 30, second % 60 == 31
        running = 10 + 20 * is_burst
        assert model.second(use=running / 64, running=running, ended=2 + 20 * was_burst) == 1


def test_a_replica_that_was_wanted_again_soon_is_kept_longer_the_next_time() -> None:
    model = Model(count=2)

    def goes_after() -> int:
        for second in range(2000):
            if model.second(use=0.3) == 1:
                return second
        raise AssertionError("it never went")

    first = goes_after()
    while model.count == 1:
        model.second(use=0.9)
    assert goes_after() > first + 200
    # A day without regrets, and the time of calm is what it was.
    for _ in range(13 * 360):
        model.now += 9
        model.second(use=0.3)
    while model.count == 1:
        model.second(use=0.9)
    assert goes_after() <= first + 60


def test_a_rising_use_is_followed_before_it_is_there() -> None:
    """One percent a second, thirty seconds ahead: the second replica comes before 0.6, and not at 0.75."""
    model, seen = Model(), 0.0
    for number in range(80):
        seen = 0.2 + 0.01 * number
        if model.second(use=seen) == 2:
            break
    assert 0.45 <= seen <= 0.6
    assert model.scaler.reason == "trend"


def test_noise_is_no_trend() -> None:
    model = Model()
    values = [0.4 + 0.2 * ((n * 7919) % 13 - 6) / 6 for n in range(600)]
    assert {model.second(use=value) for value in values} == {1}


def test_one_goes_only_when_it_was_not_wanted_for_the_whole_time_of_calm() -> None:
    model = Model(count=4)
    counts = [model.second(use=1.0) for _ in range(285)]
    assert set(counts) == {4}, "nothing is known yet of the time before"
    for _ in range(14):
        model.second(use=2.5)  # once more wanted, all begins again
    assert {model.second(use=1.0) for _ in range(299)} == {4}
    # One, and the next only when the others have settled.
    counts = [model.second(use=1.0) for _ in range(100)]
    assert counts == sorted(counts, reverse=True)
    assert (counts.count(3), counts[-1]) == (60, 2)
    # 0.75 * 0.8 leave room to spare: at 0.65 a single one would be too full to stay alone
    assert {model.second(use=0.65) for _ in range(900)} == {2}
    assert [model.second(use=0.5) for _ in range(330)][-1] == 1


def test_what_moves_to_the_others_when_one_goes_is_no_trend() -> None:
    """Fuller batches end later, so the same load uses more: that must not bring the replica back."""
    model = Model(count=4)
    while model.count == 4:
        model.second(use=1.5)
    counts = [model.second(use=1.5 + 0.02 * min(n, 15)) for n in range(600)]
    assert set(counts) == {3}


def test_a_replica_that_does_not_report_takes_none_away() -> None:
    scaler = ReplicaScaler(TARGET)
    silent = {"0": ReplicaReport(0, 1, 0.1, 0)}
    assert {scaler.decide(silent, 2, 2, 0, float(now)) for now in range(900)} == {2}


def test_one_that_is_still_starting_is_not_given_up() -> None:
    scaler = ReplicaScaler(replace(TARGET, min_replicas=0))
    assert {scaler.decide({}, 0, 1, 0, float(now)) for now in range(900)} == {1}
    idle = {"0": ReplicaReport(0, 0, 0, 0)}
    counts = [scaler.decide(idle, 1, 1, 0, float(now)) for now in range(900, 1300)]
    assert counts[:300] == [1] * 300 and 0 in counts
    # And one that runs a single request, or batch work alone, is not idle.
    scaler = ReplicaScaler(replace(TARGET, min_replicas=0))
    hardly = {"0": ReplicaReport(0, 0, 0.001, 0)}
    assert {scaler.decide(hardly, 1, 1, 0, float(now)) for now in range(900)} == {1}


def test_to_zero_and_back_when_somebody_asks() -> None:
    model = Model(replace(TARGET, min_replicas=0))
    for _ in range(20):
        model.second(use=0.5, ended=1)
    assert [model.second() for _ in range(400)][-1] == 0
    assert {model.second() for _ in range(10)} == {0}
    assert model.second(asked=3) == 1
    # Between two looks too: a first request must not wait for the next second.
    model = Model(replace(TARGET, min_replicas=0), count=0)
    assert model.scaler.decide({}, 0, 0, 0, 5.0) == 0
    assert model.scaler.decide({}, 0, 0, 1, 5.1) == 1


def test_a_clock_that_jumps_back_begins_anew() -> None:
    model = Model()
    model.second(use=0.76)
    model.now -= 5000
    assert model.second(use=0.76) == 2
    assert {model.second(use=0.1) for _ in range(290)} == {2}


def context(metrics: Mapping[str, Mapping[str, float]] | None, **fields: Any) -> Any:
    given = {"total_num_requests": 0.0, "target_num_replicas": 1, "running_replicas": ["a"], "app_name": "m"}
    return SimpleNamespace(aggregated_metrics=metrics, **given | fields)


@pytest.fixture
def serve_policy() -> Callable[[Any], int]:
    policy = ServeReplicaPolicy(min_replicas=1, max_replicas=4)
    return lambda given: policy(given)[0]


def test_serve_hears_a_number_whatever_it_tells(serve_policy: Callable[[Any], int]) -> None:
    full = {"waiting": {"a": 0.0}, "running": {"a": 5.0}, "use": {"a": 0.9}, "finished": {"a": 1.0}}
    assert serve_policy(context(full)) == 2
    assert ServeReplicaPolicy(min_replicas=1, max_replicas=4)(context(None))[0] == 1
    broken = context({"waiting": {"a": None}}, target_num_replicas=3)  # type: ignore[dict-item]
    assert serve_policy(broken) == 3
    assert reports_of({"waiting": {"a": 1.0}, "use": {"a": 0.5}}) == {}


def test_batch_work_asks_for_no_replica() -> None:
    told = recorded(
        waiting=900,
        batch_waiting=898,
        running=40,
        batch_running=30,
        max_running=100,
        kv_usage=0.8,
        finished=7,
    )
    assert told == {"waiting": 2.0, "running": 10.0, "use": pytest.approx(0.2), "finished": 7.0}
    only = {"running": 3, "batch_running": 3, "max_running": 100, "kv_usage": 0.9, "finished": 0}
    assert 0 < recorded(waiting=0, batch_waiting=0, **only)["use"] < 0.01  # type: ignore[arg-type]


def test_what_a_fuller_batch_would_end_is_learnt_from_its_line() -> None:
    """An answer stays 4 s alone and 12 s in a full batch: half used is no half of what can be done."""
    service, rng = ServiceRate(), random.Random(5)
    assert service.at(0.6) == math.inf
    for _ in range(3600):
        use = rng.uniform(0.2, 0.7)
        service.observe(use, use * 64 / (4 + 8 * use), 1.0)
    for use in (0.3, 0.75, 1.0):
        assert service.at(use) == pytest.approx(use * 64 / (4 + 8 * use), rel=0.02)
    alone = ServiceRate()
    for _ in range(60):
        alone.observe(0.3, 3.0, 1.0)
    assert 3.0 < alone.at(0.6) < 6.0, "one point and the prior: less than twice as much"
    alone.observe(0.0, 0.0, 1e6)
    assert alone.at(0.6) > 0
