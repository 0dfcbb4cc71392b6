"""Builders and a small driver for scheduler tests."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from typing import Any

from footplate.engine.config import EngineConfig
from footplate.engine.plan import SchedulerOutput, StepResult
from footplate.engine.scheduler import DrainFirst, Scheduler
from footplate.engine.types import EngineRequest, FinishReason, SamplingParams, SequenceDelta
from tests.engine.stub_device import EOS, StubDevice

VOCAB = 64


def make_request(
    request_id: str,
    prompt: list[int] | int,
    tenant: str = "a",
    priority: int = 0,
    weight: float = 1.0,
    **params: Any,
) -> EngineRequest:
    """`prompt` as ids, or as a length. Params default to 8 tokens, seed 1, EOS ignored."""
    ids = list(range(1, prompt + 1)) if isinstance(prompt, int) else prompt
    ids = [i % VOCAB for i in ids]
    sampling = SamplingParams(**{"max_tokens": 8, "seed": 1, "ignore_eos": True} | params)
    return EngineRequest(
        request_id, ids, sampling, tenant.encode(), tenant=tenant, priority=priority, weight=weight
    )


class Driver:
    """A scheduler on a stub device; `ahead` keeps one step in flight, as the engine does."""

    def __init__(
        self,
        num_blocks: int = 64,
        *,
        ahead: bool = False,
        max_model_len: int = 512,
        step_work: float = math.inf,
        **config: Any,
    ) -> None:
        defaults = {"block_size": 4, "max_num_batched_tokens": 32, "max_num_seqs": 8, "policy": "fcfs"}
        self.config = EngineConfig(**defaults | config)
        self.scheduler = Scheduler(
            self.config,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            vocab_size=VOCAB,
            eos_token_ids=[EOS],
            prefix_key=b"k" * 32,
            step_work=step_work,
        )
        self.device = StubDevice(num_blocks, self.config.block_size, VOCAB)
        self.ahead = ahead
        self.flying: deque[StepResult] = deque()
        self.outputs: list[SchedulerOutput] = []
        self.tokens: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.ended: dict[tuple[str, int], FinishReason] = {}
        self.deltas: list[SequenceDelta] = []

    def add(self, request: EngineRequest) -> None:
        self.scheduler.add(request)

    def launch(self) -> bool:
        try:
            output = self.scheduler.schedule()
        except DrainFirst:
            self.read()
            return True
        if output is not None:
            self.outputs.append(output)
            self.flying.append(self.device.run(output))
        return output is not None

    def read(self) -> None:
        deltas = self.scheduler.update(self.flying.popleft()) if self.flying else self.scheduler.take_deltas()
        for delta in deltas:
            key = (delta.request_id, delta.index)
            assert key not in self.ended, "a delta after the end"
            self.deltas.append(delta)
            self.tokens[key] += delta.token_ids
            if delta.finish_reason is not None:
                self.ended[key] = delta.finish_reason

    def step(self) -> None:
        launched = self.launch()
        if not self.ahead or len(self.flying) > 1 or not launched:
            self.read()
        self.scheduler.check()

    def run(self, max_steps: int = 5000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                self.scheduler.check()
                return
            self.step()
        raise AssertionError(f"work is left after {max_steps} steps")
