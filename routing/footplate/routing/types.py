"""The values of routing: what engines tell, what a request asks, and what is decided. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

ReplicaId = NewType("ReplicaId", str)
# The key of a full block of a prompt: a keyed hash over its tokens, all before them, and the tenant's scope
# (see `footplate.engine.prefix`). Blocks of two scopes have no key in common.
BlockKey = bytes


@dataclass(frozen=True, slots=True)
class BlockEvents:
    """What changed in one replica's cache since the event before.

    `sequence` counts up by one with each event that one replica sends to one router. `is_reset`: forget all
    that is known of the replica first; a snapshot is a reset with the first of its blocks, and events behind
    it with the rest. What is evicted comes before what is stored: a block that went and came back is there.
    """

    sequence: int
    stored: Sequence[BlockKey] = ()
    evicted: Sequence[BlockKey] = ()
    is_reset: bool = False


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """What a replica has to do. All are of one moment; the next report takes their place."""

    num_running: int = 0
    num_waiting: int = 0
    # Prompt tokens that are still to be computed, of those waiting and of those in the middle.
    num_prefill_tokens: int = 0
    # Share of the KV pool that live sequences hold, from 0 to 1.
    kv_usage: float = 0.0

    @property
    def num_requests(self) -> int:
        """All that it has taken and not ended."""
        return self.num_running + self.num_waiting


class Reason(StrEnum):
    """Why a replica stands where it stands."""

    PREFIX = "prefix"  # it holds the most of the prompt, and that is worth its load
    RECENT = "recent"  # a request with the same beginning was sent there a moment ago
    SESSION = "session"  # nothing is known of the prompt; its session belongs there
    LOAD = "load"  # the less loaded of two, or cheapest whatever it holds
    SPILL = "spill"  # another one holds more and has too much to do
    FALLBACK = "fallback"  # for when all before it refuse


@dataclass(frozen=True, slots=True)
class Ranked:
    """One replica in a decision's order; the first is asked first."""

    replica: ReplicaId
    reason: Reason
    # Prompt tokens that are thought to be cached there.
    num_cached_tokens: int
