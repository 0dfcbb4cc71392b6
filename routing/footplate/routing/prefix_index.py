"""Which replica holds which blocks of which prefixes, as engines tell it. One event loop owns an index.

A key stands for all tokens up to its block's end, so a replica that holds a prompt's n-th block holds the
prefix as well (engines evict ends first), and a longest match is where the set of holders last changes.

Memory: a key is one entry of a dict, and sets of holders are bit masks that all equal entries share. Tests
and `routing/benchmarks/bench_index.py` hold an entry to less than 200 bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from footplate.routing.types import BlockEvents, BlockKey, ReplicaId

# How many sets of more than one holder are kept to be shared before the table begins anew.
MAX_SHARED_MASKS = 65_536
# The part of all entries that goes at once when there are too many.
FORGOTTEN_SHARE = 64
# Entries that one call of `sweep` looks at.
SWEEP_ENTRIES = 4_096


@dataclass(slots=True)
class _View:
    """What is known of one replica: its bit, and where its events are."""

    slot: int
    next_sequence: int | None = None
    # An event is missing: nothing is believed until a reset.
    is_behind: bool = True


class PrefixIndex:
    """Keys to replicas. Everything but `sweep` takes time only for the blocks that it is given.

    A replica that goes, or begins anew, loses its bit at once and is in no match any more; its entries are
    swept out later, in small pieces, and only then is the bit given to another one.
    """

    def __init__(self, max_entries: int = 4_000_000) -> None:
        """`max_entries`: of keys; the longest known go first."""
        if max_entries < 1:
            raise ValueError(f"max_entries is {max_entries}; it must be at least 1")
        self._max_entries = max_entries
        self._masks: dict[BlockKey, int] = {}
        self._views: dict[ReplicaId, _View] = {}
        self._slots: list[ReplicaId | None] = []
        self._free_slots: list[int] = []
        self._live = 0
        self._shared: dict[int, int] = {}
        # Bits that are dead and still in entries: those of the sweep that runs, and those of the next one.
        self._sweeping = 0
        self._dead = 0
        self._unswept: Iterator[BlockKey] = iter(())
        self.num_gaps = 0

    def __len__(self) -> int:
        """How many keys there are."""
        return len(self._masks)

    @property
    def replicas(self) -> Sequence[ReplicaId]:
        """All that have told anything and are not removed."""
        return list(self._views)

    def is_behind(self, replica: ReplicaId) -> bool:
        """Whether a snapshot of the replica is needed: it is new, or one of its events got lost."""
        view = self._views.get(replica)
        return view is None or view.is_behind

    def apply(self, replica: ReplicaId, events: BlockEvents) -> bool:
        """Take in one replica's events; says whether its view is whole. If not, ask it for a snapshot.

        An event that was seen before changes nothing. Behind a gap all but a reset are left out: an eviction
        that is missing can't be told from a block that stayed.
        """
        view = self._views.get(replica)
        if view is None:
            view = self._views[replica] = _View(self._take_slot(replica))
        expected = view.next_sequence
        if expected is not None and events.sequence < expected:
            return not view.is_behind
        if events.is_reset:
            if view.next_sequence is not None:
                self._retire(view.slot)
                view.slot = self._take_slot(replica)
            view.is_behind = False
        elif view.is_behind or events.sequence != expected:
            if not view.is_behind:
                self.num_gaps += 1
            view.is_behind = True
            return False
        view.next_sequence = events.sequence + 1
        self._evict(view.slot, events.evicted)
        self._store(view.slot, events.stored)
        return True

    def remove(self, replica: ReplicaId) -> None:
        """The replica is gone. It is in no match from now on."""
        view = self._views.pop(replica, None)
        if view is not None:
            self._retire(view.slot)

    def match(self, keys: Sequence[BlockKey]) -> Mapping[ReplicaId, int]:
        """How many of a prompt's first blocks each replica holds; those that hold none are left out.

        Looks at few of the keys: where the holders at both ends of a stretch are the same, they are the same
        within it.
        """
        found: dict[ReplicaId, int] = {}
        if not keys:
            return found
        masks, live = self._masks, self._live
        held = masks.get(keys[0], 0) & live
        if not held:
            return found
        # Stretches whose ends are known: (index of the first, its holders, index of the last, its holders).
        last = len(keys) - 1
        stretches: deque[tuple[int, int, int, int]] = deque()
        stretches.append((0, held, last, masks.get(keys[last], 0) & held))
        while stretches:
            first, at_first, last, at_last = stretches.pop()
            if at_first == at_last:
                continue
            if last - first == 1:
                self._note(found, at_first & ~at_last, last)
                continue
            middle = self._probe(first, last, at_last)
            at_middle = masks.get(keys[middle], 0) & at_first
            stretches.append((first, at_first, middle, at_middle | at_last))
            stretches.append((middle, at_middle | at_last, last, at_last))
        self._note(found, masks.get(keys[-1], 0) & held, len(keys))
        return found

    @staticmethod
    def _probe(first: int, last: int, at_last: int) -> int:
        """Where to look next: near the beginning while nobody holds the end, since most matches are short."""
        span = last - first
        return first + (span // 8 if not at_last and span > 16 else span // 2)

    def sweep(self, num_entries: int = SWEEP_ENTRIES) -> bool:
        """Look at some entries for what dead replicas left; says whether there is more to do."""
        if not self._sweeping:
            if not self._dead:
                return False
            self._sweeping, self._dead = self._dead, 0
            # Keys that come meanwhile are of the living.
            self._unswept = iter(list(self._masks))
        masks, keep = self._masks, ~self._sweeping
        for _ in range(num_entries):
            key = next(self._unswept, None)
            if key is None:
                self._free_slots += _bits(self._sweeping)
                self._sweeping = 0
                self._unswept = iter(())
                return bool(self._dead)
            mask = masks.get(key)
            if mask is not None and mask & self._sweeping:
                self._put(key, mask & keep)
        return True

    def _store(self, slot: int, keys: Sequence[BlockKey]) -> None:
        bit, masks = self._shared_mask(1 << slot), self._masks
        for key in keys:
            mask = masks.get(key)
            if mask is None:
                masks[key] = bit
            elif not mask & bit:
                masks[key] = self._shared_mask(mask | bit)
        if len(masks) > self._max_entries:
            self._forget(len(masks) - self._max_entries + self._max_entries // FORGOTTEN_SHARE)

    def _forget(self, num_entries: int) -> None:
        # Many at a time: a dict walks over all that was deleted at its beginning.
        for key in list(islice(self._masks, num_entries)):
            del self._masks[key]

    def _evict(self, slot: int, keys: Sequence[BlockKey]) -> None:
        keep, masks = ~(1 << slot), self._masks
        for key in keys:
            mask = masks.get(key)
            if mask is not None:
                self._put(key, mask & keep)

    def _put(self, key: BlockKey, mask: int) -> None:
        if mask:
            self._masks[key] = self._shared_mask(mask)
        else:
            del self._masks[key]

    def _shared_mask(self, mask: int) -> int:
        shared = self._shared
        if len(shared) >= MAX_SHARED_MASKS:
            shared.clear()
        return shared.setdefault(mask, mask)

    def _take_slot(self, replica: ReplicaId) -> int:
        if self._free_slots:
            slot = self._free_slots.pop()
            self._slots[slot] = replica
        else:
            slot = len(self._slots)
            self._slots.append(replica)
        self._live |= 1 << slot
        return slot

    def _retire(self, slot: int) -> None:
        self._live &= ~(1 << slot)
        self._dead |= 1 << slot
        self._slots[slot] = None

    def _note(self, found: dict[ReplicaId, int], mask: int, num_blocks: int) -> None:
        for slot in _bits(mask):
            replica = self._slots[slot]
            if replica is not None:
                found[replica] = num_blocks


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
