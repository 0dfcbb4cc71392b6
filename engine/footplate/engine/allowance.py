"""How much of a step a tenant's prompts may take while other tenants want it too. Pure; for `fair` only.

Each token of an answer waits for the whole step that it comes out of: whoever decodes feels a prompt's chunk.
On a CPU a chunk costs as much as dozens of steps of answers, and one token of a deep prompt as much as a
step, so a prompt can't be cut so fine that nobody feels it. It can be felt rarely.

So each tenant has a bucket of prompt work, which its answers fill. A prompt that the bucket holds goes on at
once: whoever lets the model write about as much as it lets it read is never held up. A longer one gets one
chunk in `STEPS_BETWEEN` steps in which others' answers come, and whole steps when there are none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

# So few of others' tokens wait for such a chunk that the 99th percentile of their waits isn't one of them.
STEPS_BETWEEN = 320
# Prompt work that each token of an answer earns its tenant, in tokens at depth 0.
EARNED_BY_TOKEN = 16.0
# Steps of prompt work that a full bucket holds: a prompt of some 1,200 tokens.
BURST_STEPS = 8
PRUNE_ABOVE = 10_000  # tenants remembered


class PromptAllowance:
    """A bucket for each tenant. `step_work` bounds the prompt work of a step; infinite: nobody is held up."""

    def __init__(self, step_work: float) -> None:
        self.is_on = math.isfinite(step_work)
        # What one sequence, or one tenant, may take of a step that others want too.
        self._half = step_work / 2
        self._chunk = step_work  # of a prompt that is cut
        self._burst = BURST_STEPS * step_work
        # Steps in which anybody decoded.
        self._num_steps = 0
        # What is left, and the steps that it has seen. A tenant that isn't here has a full bucket.
        self._left: dict[str, tuple[float, int]] = {}
        self._chunk_at: dict[str, int] = {}  # the step of a tenant's last chunk beside others
        self._taken: dict[str, float] = {}  # of the step being planned
        self._decoding: Mapping[str, int] = {}

    def begin_step(self, decoding: Mapping[str, int]) -> None:
        """A step with so many decoding rows of each tenant is planned."""
        self._taken, self._decoding = {}, decoding
        if not self.is_on or not decoding:
            return
        self._num_steps += 1
        for tenant, num_rows in decoding.items():
            if tenant in self._left:
                self._put(tenant, self.left(tenant) + EARNED_BY_TOKEN * num_rows)
        if len(self._left) > PRUNE_ABOVE:
            self._left = {name: kept for name, kept in self._left.items() if self.left(name) < self._burst}
            self._chunk_at = {name: step for name, step in self._chunk_at.items() if name in self._left}

    def left(self, tenant: str) -> float:
        """What a tenant's bucket holds."""
        left, seen = self._left.get(tenant, (self._burst, self._num_steps))
        return min(self._burst, left + (self._num_steps - seen) * self._chunk / STEPS_BETWEEN)

    def share(self, tenant: str, wanted: float, *, others_want: bool) -> float:
        """What a tenant's next prompt, which wants so much work, may take of this step; 0 or less: nothing.

        Where others have prompts too, all of a tenant's together get half a step.
        """
        if not self.is_on:
            return math.inf
        share = self._half - self._taken.get(tenant, 0.0) if others_want else math.inf
        if self._is_guest(tenant) and self._is_long(tenant, wanted):
            last = self._chunk_at.get(tenant, -STEPS_BETWEEN)
            share = min(share, self._chunk if self._num_steps - last >= STEPS_BETWEEN else 0.0)
        return share

    def spend(self, tenant: str, wanted: float, work: float) -> None:
        """Note what a prompt that wanted so much took. Where nobody else decodes it is free."""
        self._taken[tenant] = self._taken.get(tenant, 0.0) + work
        if self.is_on and self._is_guest(tenant):
            if self._is_long(tenant, wanted):
                self._chunk_at[tenant] = self._num_steps
            self._put(tenant, max(0.0, self.left(tenant) - work))

    def _is_long(self, tenant: str, wanted: float) -> bool:
        """Whether a prompt must be cut: one that fits into a chunk never is."""
        return wanted > max(self._chunk, self.left(tenant))

    def _is_guest(self, tenant: str) -> bool:
        return any(name != tenant for name in self._decoding)

    def _put(self, tenant: str, left: float) -> None:
        self._left[tenant] = (min(self._burst, left), self._num_steps)
