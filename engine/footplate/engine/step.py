"""A step while it is planned: what is handed out so far, and what is left to hand out."""

from __future__ import annotations

from footplate.engine.plan import NewRow, ScheduledRow
from footplate.engine.sequence import Sequence

# A token this deep costs about twice one at depth 0: attention is then as much work as all the rest.
DEPTH_TOKENS = 1024


def token_work(depth: int) -> float:
    """The work of one token behind `depth` others, in tokens at depth 0."""
    return 1 + depth / DEPTH_TOKENS


class Step:
    """The rows so far and the budgets left."""

    def __init__(self, number: int, budget: int, work: float) -> None:
        self.number = number
        self.budget = budget  # tokens
        self.work = work  # prompt work, in tokens at depth 0
        self.rows: list[tuple[Sequence, ScheduledRow]] = []
        self.new_rows: list[NewRow] = []
        self.copies: list[tuple[int, int]] = []
        self.has_prompts = False  # whether a row is part of a prompt
        self.is_batch_alone = False  # then decodes count as work, too
        self.lacks_room = False  # other work finds no room: batch work gets none and stays out

    def bound(self, tokens: int) -> None:
        """Let what is planned from now on be so many tokens at most."""
        self.budget = min(self.budget, tokens)

    def begin_batch_alone(self, tokens: int) -> None:
        """Nothing but batch work is there: all of it within so many tokens' work."""
        self.bound(tokens)
        self.work = min(self.work, tokens)
        self.is_batch_alone = True

    @property
    def takes_decodes(self) -> bool:
        return self.budget > 0 and (self.work > 0 or not self.is_batch_alone)

    def chunk(self, sequence: Sequence, share: float) -> int:
        """How many of a sequence's tokens fit into its share of this step; at least one."""
        affordable = share / token_work(sequence.num_computed)
        return max(1, int(min(sequence.num_uncomputed, self.budget, affordable)))

    def add(self, sequence: Sequence, row: ScheduledRow) -> None:
        """Take in a row and pay for it."""
        self.rows.append((sequence, row))
        self.budget -= row.num_tokens
        if sequence.is_prefilling or self.is_batch_alone:
            self.work -= row.num_tokens * token_work(row.start)
            self.has_prompts |= sequence.is_prefilling
