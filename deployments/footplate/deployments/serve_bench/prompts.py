"""The requests of a level: drawn from a seed, so that the same command sends the same load."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from footplate.engine.bench.workloads import chat_sessions, decode, mixed, prefix, single

Endpoint = Literal["chat", "completions"]
PATHS: dict[Endpoint, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
WORKLOADS = ("synthetic", "single", "decode", "mixed", "prefix", "sessions")
# Each is one token, with the blank before it, in the vocabularies of GPT-2's kin and of Gemma's.
_WORDS = (
    "the of and to in is was for on that with as by at from his her were are which this also be had or has"
    " first one their its new after but who not they have two she been other when there all during into time"
    " more school may years over only year most would world city some where between later three state such"
    " then national used made known under many university united while part season team these about second"
    " born before through until states game day up well several including him family early number any so out"
    " life work place area film same began name each series because people music house war group book party"
).split()
# At most, of a template with a prompt of the server's own.
TEMPLATE_TOKENS = 16_384


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request's work: a text or token ids, and the length of the answer."""

    text: str | list[int]
    output_len: int


@dataclass(frozen=True, slots=True)
class Load:
    """What to send. `num_words` is the length of a synthetic prompt, in words of one token each."""

    workload: str
    num_words: int
    output_len: int
    scale: float
    high: int
    seed: int

    def chains(self, level: int, count: int | None) -> Iterator[list[Prompt]]:
        """Prompts of a level, each chain one after the other; without end where there is no count.

        A level's prompts are its own: it finds nothing in a prefix cache that an earlier one left there.
        """
        seed = 1_000 * self.seed + level
        if self.workload == "synthetic":
            rng = random.Random(seed)
            while True:
                yield [Prompt(" ".join(rng.choices(_WORDS, k=self.num_words)), self.output_len)]
        while True:
            yield from self._fixed(seed, count)
            seed += 100

    def _fixed(self, seed: int, count: int | None) -> Iterator[list[Prompt]]:
        def scaled(length: int) -> int:
            return max(4, int(length * self.scale))

        if self.workload == "sessions":
            lengths = {name: scaled(value) for name, value in (("system", 512), ("user", 48), ("answer", 96))}
            jobs = chat_sessions(high=self.high, seed=6 + seed, **lengths)
        elif self.workload == "prefix":
            sizes = {name: scaled(value) for name, value in (("shared", 2048), ("fresh", 128), ("out", 64))}
            jobs = [[job] for job in prefix(high=self.high, seed=5 + seed, **sizes)]
        elif self.workload == "mixed":
            jobs = [[job] for job in mixed(count or 1000, self.scale, self.high, seed=4 + seed)]
        elif self.workload == "single":
            jobs = [[job] for job in single(self.high, seed=1 + seed)]
        else:
            jobs = [[job] for job in decode(count or 256, self.high, seed=2 + seed)]
        for chain in jobs:
            yield [Prompt(job.prompt_token_ids, job.output_len) for job in chain]


@dataclass(frozen=True, slots=True)
class MostTokens:
    """What a request can have taken. `output` None: its own extras leave that open."""

    output: int | None
    input: int


@dataclass(frozen=True, slots=True)
class Form:
    """How a prompt is asked for, as the server takes it."""

    endpoint: Endpoint
    model: str
    ignores_eos: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)

    def body(self, prompt: Prompt, output_len: int | None = None) -> dict[str, Any]:
        """The JSON body of one request."""
        is_chat = self.endpoint == "chat"
        asked = (
            {"messages": [{"role": "user", "content": prompt.text}]} if is_chat else {"prompt": prompt.text}
        )
        body: dict[str, Any] = {
            "model": self.model,
            **asked,
            "max_tokens": output_len or prompt.output_len,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignores_eos:
            body["ignore_eos"] = True
        return body | dict(self.extra)

    def most_tokens(self, prompt: Prompt) -> MostTokens:
        """A token is at least a byte of what was sent; a template and a server's own prompt come on top."""
        body = self.body(prompt)
        length, count = body.get("max_completion_tokens", body["max_tokens"]), body.get("n", 1)
        is_bound = type(length) is int and type(count) is int
        num_sent = len(prompt.text.encode()) if isinstance(prompt.text, str) else len(prompt.text)
        num_extra = sum(len(str(value)) for value in self.extra.values())
        return MostTokens(length * count if is_bound else None, num_sent + num_extra + TEMPLATE_TOKENS)
