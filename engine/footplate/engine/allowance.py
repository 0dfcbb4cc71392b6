"""How much of a step a tenant's prompts may take while another tenant's answers come out of it. Pure.

Each token of an answer waits for the whole step that it comes out of, so everybody feels a long prompt beside
it at once. Under `fair`, a step in which others decode therefore gives a tenant's prompts only what makes it
longer by a third. A tenant that has asked for little may take a burst of a whole step, so that a chat's short
prompts need not wait; one that sends prompts without pause has none.
"""

from __future__ import annotations

import math

# By how much prompts may lengthen a step in which others decode.
STRETCH = 0.33
# What a decoding row costs beside a prompt's token: it shares the weights that the step reads anyway.
DECODE_ROW_WORK = 0.6
PRUNE_ABOVE = 10_000  # tenants remembered


class PromptAllowance:
    """A bucket of prompt work for each tenant, in tokens at depth 0; filled by steps in which others decode.

    `decode_work` is what a step of decodes costs besides its rows, infinite where no bound is wanted. `burst`
    is how much a bucket holds.
    """

    def __init__(self, decode_work: float, burst: float) -> None:
        self._decode_work = decode_work
        self._burst = burst
        # What is left, and the refills that it has seen. A tenant that isn't here has a full bucket.
        self._left: dict[str, tuple[float, float]] = {}
        self._refilled = 0.0

    def begin_step(self, num_decodes: int) -> None:
        """A step with so many decoding rows is planned: every bucket gains what it may lengthen it by."""
        if math.isfinite(self._decode_work) and num_decodes:
            self._refilled += STRETCH * (self._decode_work + DECODE_ROW_WORK * num_decodes)
            self._prune()

    def left(self, tenant: str) -> float:
        """What a tenant's prompts may take beside others' decodes; at 0 or less nothing."""
        if not math.isfinite(self._decode_work):
            return math.inf
        left, refilled = self._left.get(tenant, (self._burst, self._refilled))
        return min(self._burst, left + self._refilled - refilled)

    def spend(self, tenant: str, work: float, *, is_guest: bool) -> None:
        """Note prompt work. Beside others it may overdraw the bucket; alone it only leaves no burst."""
        if math.isfinite(self._decode_work):
            left = self.left(tenant) - work
            self._left[tenant] = (left if is_guest else max(0.0, left), self._refilled)

    def _prune(self) -> None:
        if len(self._left) > PRUNE_ABOVE:
            self._left = {
                tenant: kept for tenant, kept in self._left.items() if self.left(tenant) < self._burst
            }
