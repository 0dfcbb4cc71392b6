"""Run requests on an engine core and gather what comes out."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from footplate.engine.core import EngineCore
from footplate.engine.types import EngineRequest, FinishReason, SamplingParams, TokenLogprob


@dataclass
class Answer:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0


def greedy(max_tokens: int = 32, **params: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True} | params)


def run(core: EngineCore, *requests: EngineRequest) -> dict[tuple[str, int], Answer]:
    """Submit all at once and step until idle; the scheduler is checked after every step."""
    for request in requests:
        core.add(request)
    answers: dict[tuple[str, int], Answer] = defaultdict(Answer)
    while core.has_work:
        for delta in core.step():
            answer = answers[delta.request_id, delta.index]
            answer.token_ids += delta.token_ids
            answer.logprobs += delta.logprobs or ()
            answer.cached_tokens += delta.cached_tokens
            answer.prompt_logprobs = delta.prompt_logprobs or answer.prompt_logprobs
            answer.finish_reason = delta.finish_reason or answer.finish_reason
        core.scheduler.check()
    return answers


def run_one(core: EngineCore, prompt: list[int], params: SamplingParams, scope: bytes = b"") -> Answer:
    request_id = f"one-{core.stats().steps}-{len(prompt)}"
    return run(core, EngineRequest(request_id, prompt, params, scope))[request_id, 0]


def run_batch(core: EngineCore, prompts: list[list[int]], params: SamplingParams) -> list[Answer]:
    requests = [EngineRequest(f"b{i}-{core.stats().steps}", p, params) for i, p in enumerate(prompts)]
    answers = run(core, *requests)
    return [answers[r.request_id, 0] for r in requests]


def poison(core: EngineCore) -> None:
    """Fill the KV pool with NaN: whoever reads a slot nobody wrote answers nonsense."""
    for pair in core.runner.caches:  # type: ignore[attr-defined]
        for cache in pair:
            cache.fill_(float("nan"))
