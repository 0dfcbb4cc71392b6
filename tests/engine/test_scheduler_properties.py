"""Random add, step, abort under tiny pools: every answer equals its solo run and no block is lost."""

from __future__ import annotations

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from footplate.engine.errors import EngineError
from footplate.engine.types import BATCH_PRIORITY, EngineRequest, FinishReason
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
        step_work=st.sampled_from([math.inf, 3.0, 17.0]),
        batch_bounds=st.tuples(st.sampled_from(["auto", 0, 2]), st.sampled_from(["auto", 1, 6])),
    )
    def start(
        self,
        num_blocks: int,
        budget: int,
        policy: str,
        ahead: bool,
        caching: bool,
        step_work: float,
        batch_bounds: tuple[int | str, int | str],
    ) -> None:
        self.driver = Driver(
            num_blocks,
            ahead=ahead,
            max_model_len=96,
            step_work=step_work,
            max_num_batched_tokens=budget,
            max_num_seqs=6,
            policy=policy,
            prefix_caching=caching,
            batch_class_tokens=batch_bounds[0],
            batch_step_tokens=batch_bounds[1],
        )
        self.requests: dict[str, EngineRequest] = {}
        self.aborted: set[tuple[str, int]] = set()

    @rule(
        prompt=st.tuples(st.integers(0, 2), st.integers(0, 24), st.integers(1, 12)),
        output=st.integers(0, 20),
        n=st.integers(1, 3),
        who=st.tuples(st.sampled_from("ab"), st.sampled_from([0, 1, BATCH_PRIORITY])),
        ignore_eos=st.booleans(),
        prompt_logprobs=st.sampled_from([None, None, 0]),
    )
    def add(
        self,
        prompt: tuple[int, int, int],
        output: int,
        n: int,
        who: tuple[str, int],
        ignore_eos: bool,
        prompt_logprobs: int | None,
    ) -> None:
        number, (group, shared, fresh) = len(self.requests), prompt
        ids = [group + i for i in range(shared)] + [number * 3 + i for i in range(fresh)]
        params = {"max_tokens": output, "n": n, "seed": number, "ignore_eos": ignore_eos}
        request = make_request(f"r{number}", ids, *who, **params, prompt_logprobs=prompt_logprobs)
        try:
            self.driver.add(request)
        except EngineError:
            room = self.driver.scheduler.kv_tokens
            assert len(ids) + output > min(96, room + 1) or len(ids) > room
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
                    self.check_prompt_logprobs(request, index)

    def check_prompt_logprobs(self, request: EngineRequest, index: int) -> None:
        told = [
            d.prompt_logprobs
            for d in self.driver.deltas
            if (d.request_id, d.index) == (request.request_id, index)
        ]
        if index == 0 and request.params.prompt_logprobs is not None:
            assert told[0] is not None and told[0][0] is None and not any(told[1:])
            assert [e.token_id for e in told[0][1:] if e] == list(request.prompt_token_ids[1:])
        else:
            assert not any(told)


SchedulerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestSchedulerMachine = pytest.mark.filterwarnings("default")(SchedulerMachine.TestCase)
