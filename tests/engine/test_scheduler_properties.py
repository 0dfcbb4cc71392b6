"""Random add, step, abort under tiny pools: every answer equals its solo run and no block is lost."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from footplate.engine.errors import EngineError
from footplate.engine.types import EngineRequest, FinishReason
from tests.engine.engine_builders import VOCAB, Driver, make_request
from tests.engine.stub_device import oracle


class SchedulerMachine(RuleBasedStateMachine):
    """The auditor: for each request it knows the solo answer, and what an abort may cut."""

    @initialize(
        num_blocks=st.integers(6, 40),
        budget=st.integers(4, 48),
        policy=st.sampled_from(["fcfs", "priority", "fair"]),
        ahead=st.booleans(),
        caching=st.booleans(),
    )
    def start(self, num_blocks: int, budget: int, policy: str, ahead: bool, caching: bool) -> None:
        self.driver = Driver(
            num_blocks,
            ahead=ahead,
            max_model_len=96,
            max_num_batched_tokens=budget,
            max_num_seqs=6,
            policy=policy,
            prefix_caching=caching,
        )
        self.requests: dict[str, EngineRequest] = {}
        self.aborted: set[tuple[str, int]] = set()

    @rule(
        group=st.integers(0, 2),
        shared=st.integers(0, 24),
        fresh=st.integers(1, 12),
        output=st.integers(0, 20),
        n=st.integers(1, 3),
        tenant=st.sampled_from("ab"),
        priority=st.integers(0, 1),
        ignore_eos=st.booleans(),
        prompt_logprobs=st.booleans(),
    )
    def add(self, group: int, shared: int, fresh: int, output: int, n: int, tenant: str, priority: int,
            ignore_eos: bool, prompt_logprobs: bool) -> None:  # fmt: skip
        number = len(self.requests)
        prompt = [group + i for i in range(shared)] + [number * 3 + i for i in range(fresh)]
        request = make_request(
            f"r{number}", prompt, tenant, priority, max_tokens=output, n=n, seed=number, ignore_eos=ignore_eos,
            prompt_logprobs=0 if prompt_logprobs else None, logprobs=1 if ignore_eos else None,
        )  # fmt: skip
        try:
            self.driver.add(request)
        except EngineError:
            assert (
                len(prompt) + output > min(96, self.driver.scheduler.kv_tokens + 1)
                or len(prompt) > self.driver.scheduler.kv_tokens
            )
            return
        self.requests[request.request_id] = request

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), whole=st.booleans())
    def abort(self, data: st.DataObject, whole: bool) -> None:
        request = self.requests[data.draw(st.sampled_from(sorted(self.requests)))]
        index = None if whole else data.draw(st.integers(0, request.params.n - 1))
        self.driver.scheduler.abort(request.request_id, index)
        for i in range(request.params.n) if index is None else [index]:
            self.aborted.add((request.request_id, i))
        self.driver.scheduler.check()

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.driver.step()

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        self.driver.run()
        for request in self.requests.values():
            for index in range(request.params.n):
                key = (request.request_id, index)
                want = oracle(request, index, VOCAB, request.params.max_tokens or 0)
                got, reason = self.driver.tokens[key], self.driver.ended[key]
                if reason is FinishReason.ABORT:
                    assert key in self.aborted and got == want[: len(got)]
                else:
                    assert got == want


SchedulerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestSchedulerMachine = pytest.mark.filterwarnings("default")(SchedulerMachine.TestCase)
