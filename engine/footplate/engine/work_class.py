"""The two classes of work: what somebody waits for, and batch work, which runs in what the other leaves."""

from __future__ import annotations

import math
from dataclasses import dataclass

from footplate.engine.allowance import PromptAllowance
from footplate.engine.config import EngineConfig
from footplate.engine.sequence import Sequence
from footplate.engine.waiting import WaitingQueue

# Beside other work and alone, in tokens. On a CPU each row makes a step longer, so batch work waits for all
# other work; alone, 4 rows of a small model take 16 ms a step where one takes 12, and 16 rows 43. On a GPU 32
# rows more cost some tenth of a decode step.
SLOW_BOUNDS = (0, 4)
FAST_BOUNDS = (32, 512)


class WorkClass:
    """Everything of one class: its queue with the counters of its tenants, and what runs.

    A tenant's counter is one a class: what it computes cheaply at night costs its users no turn by day.
    """

    def __init__(self, policy: str, step_work: float) -> None:
        self.waiting = WaitingQueue(policy)
        self.running: list[Sequence] = []
        self.allowance = PromptAllowance(step_work if policy == "fair" else math.inf)

    @property
    def has_work(self) -> bool:
        return bool(self.running or len(self.waiting))

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens that are still to be computed, waiting and begun."""
        begun = sum(max(s.num_prompt - s.num_computed, 0) for s in self.running)
        return begun + sum(s.num_prompt for s in self.waiting)


@dataclass(frozen=True, slots=True)
class BatchBounds:
    """How much of a step batch work may be, so that nobody waits long for it."""

    beside: int  # tokens in a step that holds other work too, or could; 0: batch work waits
    alone: int  # tokens in a step of its own, one at depth d counting as in `step.token_work`

    @classmethod
    def resolve(cls, config: EngineConfig, step_work: float) -> BatchBounds:
        """The options; `auto` goes by whether prompt work must be bounded, as on a CPU."""
        beside, alone = SLOW_BOUNDS if math.isfinite(step_work) else FAST_BOUNDS
        if config.batch_class_tokens != "auto":
            beside = config.batch_class_tokens
        if config.batch_step_tokens != "auto":
            alone = config.batch_step_tokens
        return cls(beside, alone)

    def max_running(self, *, is_alone: bool) -> int:
        """Sequences that run at once: more would only hold blocks and take turns."""
        return self.alone if is_alone else self.beside
