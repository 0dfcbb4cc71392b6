"""The messages between policy and device: what one step computes, and what came out."""

from __future__ import annotations

from dataclasses import dataclass, field

from footplate.engine.types import SamplingParams, TokenLogprob


@dataclass(frozen=True, slots=True)
class NewRow:
    """A sequence that enters the runner's persistent batch; everything the device must know of it once."""

    row: int
    token_ids: tuple[int, ...]  # all known tokens: the prompt, after preemption the output too
    num_prompt: int
    params: SamplingParams
    block_table: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ScheduledRow:
    """One row's share of a step: tokens start : start + num_tokens, and the blocks added for them."""

    row: int
    sequence_id: int
    start: int
    num_tokens: int
    samples: bool  # whether the step reaches the last known token, and so draws the next one
    new_blocks: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        """How many of the sequence's tokens are computed after it."""
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step. Order of effects on the device: block copies, new rows, then the rows' tokens."""

    step: int
    rows: tuple[ScheduledRow, ...]
    new_rows: tuple[NewRow, ...] = ()
    copies: tuple[tuple[int, int], ...] = ()  # (from, to): whole blocks, for forks

    @property
    def num_tokens(self) -> int:
        return sum(r.num_tokens for r in self.rows)


@dataclass(slots=True)
class StepResult:
    """What a step drew. Both dictionaries are keyed by sequence id."""

    step: int
    tokens: dict[int, int]
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)
    # for the tokens after each computed prompt position of this step, in order
    prompt_logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
