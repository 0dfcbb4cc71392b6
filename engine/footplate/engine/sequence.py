"""A sequence: one choice of one request as the scheduler sees it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from footplate.engine.kv.block_pool import CacheEntry
from footplate.engine.types import EngineRequest, SamplingParams, TokenLogprob


class SequenceState(IntEnum):
    """Where a sequence stands. FINISHED is final."""

    WAITING = 0
    RUNNING = 1
    FINISHED = 2


@dataclass(slots=True, eq=False)
class Sequence:
    """Three counts say everything: tokens known, tokens computed, tokens in flight; the rest follows.

    Known tokens are prompt and output ids the host has seen. `num_pending` counts tokens a launched step
    samples and the host has not read yet; they are known to the device only. A token's key and value are in
    the pool once it is computed. Only the scheduler changes a sequence.
    """

    id: int
    request: EngineRequest
    index: int
    params: SamplingParams  # as in the request, its seed resolved for this choice
    max_output: int
    arrival: int  # order of arrival; a preempted sequence keeps it, and so its place in line
    root: bytes  # prefix key of scope and extras
    token_ids: list[int]
    num_prompt: int
    is_batch: bool = False  # of the batch class, as its request says
    state: SequenceState = SequenceState.WAITING
    num_computed: int = 0
    num_pending: int = 0
    row: int = -1  # its slot in the runner's persistent batch while running
    block_table: list[int] = field(default_factory=list)
    num_sent_blocks: int = 0  # how much of the table the runner was told
    entries: list[CacheEntry] = field(default_factory=list)  # of its registered full blocks, in order
    chain_broken: bool = False  # a key collision: later blocks can't be registered
    cached_tokens: int = 0  # prompt tokens found in the cache at first admission
    scheduled_at: float | None = None  # when it was first admitted, on the scheduler's clock
    last_step: int = -1  # the last launched step that touches its blocks
    leader: Sequence | None = None  # choice 0 of the same request, until this choice forks from it
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)

    @property
    def was_admitted(self) -> bool:
        """Whether it has ever had a place in the batch."""
        return self.scheduled_at is not None

    @property
    def num_known(self) -> int:
        """Tokens that exist, on the host or in flight on the device."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_uncomputed(self) -> int:
        """The one scheduling quantity: tokens known and not yet computed."""
        return len(self.token_ids) + self.num_pending - self.num_computed

    @property
    def num_output(self) -> int:
        """Output tokens, those in flight included."""
        return len(self.token_ids) + self.num_pending - self.num_prompt

    @property
    def is_prefilling(self) -> bool:
        return self.num_uncomputed > 1

    @property
    def is_finished(self) -> bool:
        return self.state is SequenceState.FINISHED

    @property
    def awaits_last_token(self) -> bool:
        """All the output it may have is already in flight; scheduling it again would be waste."""
        return self.num_output >= self.max_output and self.num_computed >= self.num_prompt
