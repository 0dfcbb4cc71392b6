"""The engine's central values: what a caller asks for and what comes back, one step at a time.

Everything here is immutable, picklable and free of torch, so that gateways, channels and tests share it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any

BATCH_PRIORITY = 2**40
"""The priority of batch work, and where its class begins: lower runs first.

Far behind whatever a client (at most 2**31) and its quota (at most 100) can ask for together. Work of this
class runs after all other work under every policy, `fcfs` too, and gives up its blocks and rows to it.
"""


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"  # an EOS or stop token, or (decided by the text pipeline) a stop string
    LENGTH = "length"  # max_tokens or the model's context length
    ABORT = "abort"  # the caller went away or cancelled
    ERROR = "error"  # the engine failed; the text so far is not an answer


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose the next token, and when to end.

    The order is fixed: allowed ids, bad words, min-tokens, logit bias, penalties, temperature, min-p,
    top-k, top-p, draw. Values are checked by `validate`, which the door of the engine calls; a value that
    means "off" is written in the default.
    """

    max_tokens: int | None = None  # None: as many as the context holds
    min_tokens: int = 0
    temperature: float = 1.0  # below 1e-5 is greedy: the arg-max of the row, ties to the lowest id
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1 is off
    min_p: float = 0.0
    presence_penalty: float = 0.0  # presence and frequency count generated ids only
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0  # counts prompt and generated ids
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    allowed_token_ids: tuple[int, ...] = ()  # empty: all
    bad_words_ids: tuple[tuple[int, ...], ...] = ()  # id sequences that must not be completed
    n: int = 1
    seed: int | None = None  # None: drawn at the door, so that a draw is always a pure function of it
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # None: none; k: the chosen token's and the k most likely ones'
    prompt_logprobs: int | None = None  # as logprobs, for each prompt token; bypasses prefix cache reads
    # Fields below are carried out by the text pipeline; the engine proper ignores them.
    stop: tuple[str, ...] = ()
    bad_words: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One prompt and what to do with it. The caller makes `request_id` and keeps it unique while it runs.

    `cache_scope` is the secret-free tenant scope that enters the first block's hash: two requests share
    cached blocks only when their scopes are equal bytes. It is derived on the server, never by a client.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    cache_scope: bytes = b""
    tenant: str = "default"  # whose virtual token counter pays, under policy `fair`
    weight: float = 1.0  # the tenant's share under policy `fair`
    # lower runs first, under policies `priority` and `fair`; BATCH_PRIORITY is a class of its own under all
    priority: int = 0
    session: bytes = b""  # what keeps a session's requests on one replica; the engine itself ignores it
    adapter_id: str | None = None  # room for LoRA; refused while no adapter is loaded
    kv_transfer: Mapping[str, Any] | None = None  # room for prefill/decode disaggregation; refused for now

    @property
    def is_batch(self) -> bool:
        """Whether it is batch work, which waits for all other work."""
        return self.priority >= BATCH_PRIORITY


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probabilities (nats) at one position: the chosen token's and the most likely ones', best first.

    They are taken from the raw model distribution, before penalties and temperature, so that they compare
    between requests.
    """

    token_id: int
    logprob: float
    rank: int  # 1 is the most likely
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Token counts of one request. `cached_tokens` is part of `prompt_tokens`."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    accepted_draft_tokens: int = 0
    rejected_draft_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(slots=True)
class SequenceDelta:
    """What one engine step added to one choice of one request. Any number of tokens, also none.

    `cached_tokens` and `prompt_logprobs` stand in the first delta of choice 0 only; a prompt's first entry
    is None, since nothing comes before it. `scheduled_at` stands there too: when the request first got its
    place in the batch, in monotonic seconds of the engine's process. `error` is a code-like sentence without
    any content.
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    error: str | None = None
    scheduled_at: float | None = None


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of the engine's load and of its counters since start. Cheap; taken once a step."""

    running: int = 0
    waiting: int = 0
    kv_blocks_total: int = 0
    kv_blocks_used: int = 0  # held by live sequences; cached-but-free blocks are not used
    block_size: int = 16
    prefix_queries: int = 0  # tokens looked up
    prefix_hits: int = 0  # tokens found
    preemptions: int = 0
    prompt_tokens: int = 0  # computed or found in the cache
    generation_tokens: int = 0
    steps: int = 0
    finished: Mapping[str, int] = field(default_factory=dict)  # by finish reason
    batch_running: int = 0  # of those running; some may be paused
    batch_waiting: int = 0  # of those waiting
    prefill_tokens: int = 0  # of prompts that are waiting or begun, still to be computed; batch work left out

    @property
    def kv_usage(self) -> float:
        """Share of the pool held by live sequences, from 0 to 1."""
        return self.kv_blocks_used / self.kv_blocks_total if self.kv_blocks_total else 0.0


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What a gateway must know of a served model to validate, tokenise and meter without loading weights."""

    name: str
    source: str
    max_model_len: int  # tokens, prompt and output together
    kv_tokens: int  # tokens the KV pool can hold at once; a longer request can never run
    vocab_size: int
    dtype: str
    fingerprint: str  # changes with version, weights and config; the API's system_fingerprint
    aliases: tuple[str, ...] = ()
    chat_template_file: str | None = None
    created: int = 0  # unix seconds
