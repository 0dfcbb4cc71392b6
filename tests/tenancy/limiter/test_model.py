"""Whatever the order of calls, the limiter and the model agree on every answer."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from footplate.tenancy.limiter.limits import Limit, limits_for
from footplate.tenancy.quotas import LimitMode, Quota
from tests.tenancy.limiter.pairs import LEASE_S, Pair, local_pair, valkey_pair
from tests.tenancy.limiter.valkey_server import ValkeyServer

TENANT_QUOTA = Quota(
    requests_per_minute=30,
    tokens_per_minute=1_000,
    tokens_per_day=20_000,
    max_concurrent_requests=12,
    per_model={
        "small": Quota(tokens_per_minute=600, max_concurrent_requests=5),
        "none": Quota(0, mode=LimitMode.SHADOW),
    },
)
KEY_QUOTAS = {
    "key a": Quota(requests_per_minute=7, tokens_per_minute=700),
    "key:b": Quota(tokens_per_day=9_000, max_concurrent_requests=3, mode=LimitMode.SHADOW),
    "{c}": None,
}
KEYS = sorted(KEY_QUOTAS)
MODELS = ["small", "none", "large:latest"]
JUMPS_S = [0, 0.001, 0.4, 1, 7, LEASE_S - 1, LEASE_S, 60, 61, 300, 86_400]
# A server's clock after a fail-over: within a window, and beyond it.
STEPS_BACK_S = [-0.5, -20, -59, -62, -3_600, -100_000]
REQUESTS = [f"request {n}" for n in range(40)]


def limits_of(pair: Pair, key_id: str, model: str) -> tuple[Limit, ...]:
    return limits_for(pair.tenant_id, key_id, model, tenant_quota=TENANT_QUOTA, key_quota=KEY_QUOTAS[key_id])


class AgreesWithModel(RuleBasedStateMachine):
    """Hypothesis makes it without arguments, so the test sets what makes pairs on the class."""

    make_pair: ClassVar[Callable[[], AbstractContextManager[Pair]]]

    @initialize()
    def start(self) -> None:
        self.context: AbstractContextManager[Pair] = type(self).make_pair()
        self.pair = self.context.__enter__()

    @rule(
        request_id=st.sampled_from(REQUESTS),
        key=st.sampled_from(KEYS),
        model=st.sampled_from(MODELS),
        num_tokens=st.integers(0, 800),
    )
    def reserve(self, request_id: str, key: str, model: str, num_tokens: int) -> None:
        self.pair.reserve(request_id, limits_of(self.pair, key, model), num_tokens)

    @rule(request_id=st.sampled_from(REQUESTS), num_tokens=st.none() | st.integers(0, 1_200))
    def settle(self, request_id: str, num_tokens: int | None) -> None:
        self.pair.settle(request_id, num_tokens)

    @rule(request_id=st.sampled_from(REQUESTS))
    def release(self, request_id: str) -> None:
        self.pair.release(request_id)

    @rule(request_id=st.sampled_from(REQUESTS), num_tokens=st.integers(0, 1_000))
    def heartbeat(self, request_id: str, num_tokens: int) -> None:
        self.pair.heartbeat(request_id, num_tokens)

    @rule(seconds=st.sampled_from(JUMPS_S + STEPS_BACK_S))
    def advance(self, seconds: float) -> None:
        self.pair.advance(seconds)

    @rule()
    def sweep(self) -> None:
        self.pair.sweep()

    @invariant()
    def nothing_is_negative(self) -> None:
        if hasattr(self, "pair"):
            assert all(taking.amount >= 0 for taking in self.pair.model.takings)

    def teardown(self) -> None:
        if hasattr(self, "context"):
            self.pair.used(*limits_of(self.pair, "key a", "small"))
            self.context.__exit__(None, None, None)


@pytest.mark.parametrize("kind", ["valkey", "local"])
def test_limiter_agrees_with_the_model_in_any_order(valkey: ValkeyServer, kind: str) -> None:
    AgreesWithModel.make_pair = staticmethod(
        local_pair if kind == "local" else lambda: valkey_pair(valkey.url)
    )
    run_state_machine_as_test(
        AgreesWithModel,
        settings=settings(
            max_examples=40,
            stateful_step_count=40,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


def steps(seed: int, num_steps: int) -> Iterator[tuple[random.Random, str, str]]:
    """Steps like those of a gateway: mostly new requests, mostly ended once, each after some time."""
    rng = random.Random(seed)
    names: list[str] = ["never made"]
    for number in range(num_steps):
        action = rng.choices(
            ["reserve", "settle", "release", "heartbeat", "advance", "sweep", "again"],
            [40, 25, 4, 10, 14, 1, 2],
        )[0]
        if action == "reserve":
            names.append(f"request {number}")
            yield rng, action, names[-1]
        else:
            yield rng, action, rng.choice(names[-30:])


def test_ten_thousand_steps_agree_with_the_model_and_never_go_over(pair: Pair) -> None:
    num_admitted = num_refused = 0
    for rng, action, name in steps(seed=20_261_130, num_steps=10_000):
        if action in ("reserve", "again"):
            limits = limits_of(pair, rng.choice(KEYS), rng.choice(MODELS))
            decision = pair.reserve(name, limits, rng.randrange(700))
            num_admitted += decision.is_admitted
            num_refused += not decision.is_admitted
            if decision.is_admitted and not decision.is_repeated:
                assert all(s.used <= s.limit.max_amount for s in decision.states if s.limit.is_enforced)
        elif action == "settle":
            pair.settle(name, rng.choice([None, rng.randrange(200), rng.randrange(900)]))
        elif action == "release":
            pair.release(name)
        elif action == "heartbeat":
            pair.heartbeat(name, rng.randrange(900))
        elif action == "sweep":
            pair.sweep()
        else:
            pair.advance(rng.choices(JUMPS_S, [9, 9, 9, 9, 9, 2, 2, 2, 2, 1, 1])[0])
            # The model's list is short only when what has left every window is dropped.
            now = pair.now_ms()
            pair.model.takings = [
                t for t in pair.model.takings if t.until_ms > now or t.request_id in pair.model.leases
            ]
    assert min(num_admitted, num_refused) > 800
