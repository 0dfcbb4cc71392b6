"""Choices of one request that are kept back until the first one, their leader, has computed the prompt."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from footplate.engine.sequence import Sequence, SequenceState


class Followers:
    """Who is kept back behind whom. They are in no queue, and each leaves by one way: freed, or ended."""

    def __init__(self) -> None:
        self._by_leader: dict[int, list[Sequence]] = {}  # by the leader's id

    def __bool__(self) -> bool:
        return bool(self._by_leader)

    def keep(self, leader: Sequence, choices: Seq[Sequence]) -> None:
        """Keep the other choices of a request back."""
        for choice in choices:
            choice.leader = leader
        if choices:
            self._by_leader[leader.id] = list(choices)

    def free(self, leader: Sequence) -> list[Sequence]:
        """Those that may queue up now: the prompt is computed, or the leader won't do it soon."""
        freed = self._by_leader.pop(leader.id, [])
        return [choice for choice in freed if choice.state is SequenceState.WAITING]

    def end(self, choice: Sequence) -> bool:
        """A choice ends; whether it was still kept back, and so never entered the queue."""
        kept = self._by_leader.get(choice.leader.id, []) if choice.leader is not None else []
        if choice not in kept:
            return False
        kept.remove(choice)
        return True

    def count(self, *, is_batch: bool) -> int:
        """How many of one class of work are kept back."""
        return sum(len(kept) for kept in self._by_leader.values() if kept and kept[0].is_batch is is_batch)
