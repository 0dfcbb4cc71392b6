"""The index is what the engines hold, whatever happens to their events; and it is small."""

from __future__ import annotations

import random
import tracemalloc
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from footplate.engine.prefix import PrefixHasher
from footplate.routing.prefix_index import PrefixIndex
from footplate.routing.types import BlockEvents, ReplicaId

A, B = ReplicaId("a"), ReplicaId("b")


def keys_of(name: str, count: int) -> list[bytes]:
    return [f"{name}-{number:08d}".encode() for number in range(count)]


def told(index: PrefixIndex, replica: ReplicaId, *stored: bytes, sequence: int = 0) -> None:
    assert index.apply(replica, BlockEvents(sequence, stored, is_reset=sequence == 0))


def swept(index: PrefixIndex) -> None:
    while index.sweep(7):
        pass


def test_each_replica_matches_as_far_as_it_holds() -> None:
    index, keys = PrefixIndex(), keys_of("p", 100)
    told(index, A, *keys[:3])
    told(index, B, *keys[:77])
    assert index.match(keys) == {A: 3, B: 77}
    assert index.match(keys[:50]) == {A: 3, B: 50}
    assert index.match(keys[:1]) == {A: 1, B: 1}
    assert index.match([]) == {}
    assert index.match([b"other", *keys]) == {}


@given(st.lists(st.integers(0, 40), min_size=1, max_size=9), st.integers(1, 40))
def test_a_match_is_what_a_walk_over_every_key_finds(held: list[int], length: int) -> None:
    index, keys = PrefixIndex(), keys_of("p", 40)
    for number, count in enumerate(held):
        told(index, ReplicaId(str(number)), *keys[:count])
    asked = keys[:length]
    expected = {ReplicaId(str(n)): min(count, length) for n, count in enumerate(held) if count}
    assert index.match(asked) == expected


def test_evicted_blocks_match_no_more_and_take_no_room() -> None:
    index, keys = PrefixIndex(), keys_of("p", 10)
    told(index, A, *keys)
    told(index, B, *keys[:4])
    assert index.apply(A, BlockEvents(1, evicted=keys[5:]))
    assert index.match(keys) == {A: 5, B: 4}
    assert len(index) == 5
    assert index.apply(A, BlockEvents(2, evicted=keys[:5]))
    assert index.match(keys) == {B: 4}


def test_a_replica_that_goes_is_forgotten_at_once_and_its_entries_in_pieces() -> None:
    index, keys = PrefixIndex(), keys_of("p", 100)
    told(index, A, *keys)
    told(index, B, *keys[:10])
    index.remove(A)
    assert index.match(keys) == {B: 10}
    swept(index)
    assert len(index) == 10
    # Its bit is used again, and holds nothing of before.
    told(index, ReplicaId("c"), *keys[:1])
    assert index.match(keys) == {B: 10, ReplicaId("c"): 1}
    assert index.replicas == [B, ReplicaId("c")]


def test_a_bit_is_not_used_again_before_it_is_swept() -> None:
    index, keys = PrefixIndex(), keys_of("p", 20)
    told(index, A, *keys)
    index.remove(A)
    told(index, B, *keys[:2])
    assert index.match(keys) == {B: 2}
    index.sweep(5)
    index.remove(B)
    told(index, ReplicaId("c"), *keys[:3])
    swept(index)
    assert index.match(keys) == {ReplicaId("c"): 3}
    assert len(index) == 3


def test_events_before_the_first_snapshot_and_behind_a_gap_are_not_believed() -> None:
    index, keys = PrefixIndex(), keys_of("p", 9)
    assert index.is_behind(A)
    assert not index.apply(A, BlockEvents(5, keys[:1]))
    assert index.match(keys) == {}
    assert index.apply(A, BlockEvents(6, keys[:2], is_reset=True))
    assert not index.apply(A, BlockEvents(8, keys[:4]))
    assert index.is_behind(A)
    assert index.num_gaps == 1
    # What was known before is still the best guess.
    assert index.match(keys) == {A: 2}
    assert index.apply(A, BlockEvents(9, keys[:7], is_reset=True))
    assert not index.is_behind(A)
    assert index.match(keys) == {A: 7}


def test_two_tenants_have_no_block_in_common() -> None:
    hasher = PrefixHasher(b"k" * 32, 16)
    prompt = list(range(160))
    of_a, of_b = hasher.chain(prompt, b"tenant a"), hasher.chain(prompt, b"tenant b")
    for first, second in ((of_a, of_b), (of_b, of_a)):
        index = PrefixIndex()
        told(index, A, *first)
        assert index.match(first) == {A: 10}
        assert index.match(second) == {}


KEYS = [b"%d" % number for number in range(40)]


class Engine:
    """A cache that changes at random, the events that it sends, and what it has told with each of them."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.held: set[bytes] = set()
        # Who has taken in all events up to a number holds these.
        self.told: list[set[bytes]] = [set()]

    def change(self) -> BlockEvents:
        """Blocks go and others come, among them such as went in the same batch."""
        evicted = [key for key in sorted(self.held) if self._rng.random() < 0.3]
        stored = [self._rng.choice(KEYS) for _ in range(self._rng.randrange(6))]
        stored += evicted[:1] if self._rng.random() < 0.3 else []
        self.held = self.held - set(evicted) | set(stored)
        return self._next(stored, evicted, self.held)

    def snapshot(self) -> list[BlockEvents]:
        held = sorted(self.held)
        half = len(held) // 2
        return [
            self._next(held[:half], [], set(held[:half]), is_reset=True),
            self._next(held[half:], [], self.held),
        ]

    def _next(
        self, stored: list[bytes], evicted: list[bytes], told: set[bytes], *, is_reset: bool = False
    ) -> BlockEvents:
        self.told.append(told)
        return BlockEvents(len(self.told) - 1, stored, evicted, is_reset)


class Road:
    """What is on its way to an index: mostly in order, but some of it is lost, late, or comes again."""

    def __init__(self, rng: random.Random, lost_share: float) -> None:
        self._rng, self._lost_share = rng, lost_share
        self._waiting: list[BlockEvents] = []
        self._sent: list[BlockEvents] = []

    def send(self, *events: BlockEvents) -> None:
        self._waiting += events
        self._sent += events

    def deliver(self) -> BlockEvents | None:
        """The next that arrives; None when nothing is on its way, or what came next is lost."""
        rng = self._rng
        if self._sent and rng.random() < 0.15:
            return rng.choice(self._sent)
        if not self._waiting:
            return None
        late = len(self._waiting) > 1 and rng.random() < 0.1
        events = self._waiting.pop(1 if late else 0)
        return None if rng.random() < self._lost_share else events


def held_by(index: PrefixIndex, replica: ReplicaId, keys: list[bytes]) -> set[bytes]:
    """What the index believes, asked key by key."""
    return {key for key in keys if replica in index.match([key])}


@dataclass
class Fleet:
    """Two engines, the roads of their events, and what the index is to know of each."""

    rng: random.Random
    lost_share: float
    index: PrefixIndex = field(default_factory=PrefixIndex)
    # The last event that each replica's view is to have taken in.
    last: dict[ReplicaId, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.engines = {A: Engine(self.rng), B: Engine(self.rng)}
        self.roads = {replica: Road(self.rng, self.lost_share) for replica in self.engines}

    def turn(self) -> None:
        """One change, and on each road one delivery; whoever is behind asks, and may lose the answer too."""
        replica = self.rng.choice((A, B))
        self.roads[replica].send(self.engines[replica].change())
        for sender, road in self.roads.items():
            events = road.deliver()
            if events is None:
                continue
            if not self.index.apply(sender, events):
                road.send(*self.engines[sender].snapshot())
            elif events.sequence > self.last.get(sender, -1):
                self.last[sender] = events.sequence
        self.index.sweep(self.rng.randrange(5))
        if self.rng.random() < 0.03:
            self.index.remove(gone := self.rng.choice((A, B)))
            self.last.pop(gone, None)

    def check(self) -> None:
        """A view that says that it is whole holds what its engine had told by then, and nothing else."""
        for replica, engine in self.engines.items():
            if not self.index.is_behind(replica):
                assert held_by(self.index, replica, KEYS) == engine.told[self.last[replica]]


@settings(max_examples=150)
@given(st.integers(0, 2**32), st.sampled_from((0.0, 0.02, 0.2)))
def test_after_gaps_repeats_and_events_out_of_order_the_index_is_the_engines_truth(
    seed: int, lost_share: float
) -> None:
    """Nothing is healed before it is looked at: no whole comes but those that the index asks for."""
    fleet = Fleet(random.Random(seed), lost_share)
    for _ in range(60):
        fleet.turn()
        fleet.check()
    # Once nothing is lost any more a whole sets all right, and entries of the dead go.
    for replica, engine in fleet.engines.items():
        for events in engine.snapshot():
            assert fleet.index.apply(replica, events)
        assert held_by(fleet.index, replica, KEYS) == engine.held
    swept(fleet.index)
    assert len(fleet.index) == len(fleet.engines[A].held | fleet.engines[B].held)


def test_what_was_seen_before_changes_nothing() -> None:
    """Neither the same event again nor an older one, be it a whole: all that they tell is told already."""
    index, keys = PrefixIndex(), keys_of("p", 6)
    whole, gone = BlockEvents(0, keys[:3], is_reset=True), BlockEvents(1, keys[3:5], keys[2:3])
    come = BlockEvents(2, keys[2:3])
    for events in (whole, gone):
        assert index.apply(A, events)
    for old in (gone, whole, gone):
        assert index.apply(A, old)
        assert held_by(index, A, keys) == {keys[0], keys[1], keys[3], keys[4]}
    assert index.num_gaps == 0
    # The next in order is still awaited.
    assert index.apply(A, come)
    assert held_by(index, A, keys) == set(keys[:5])


def test_what_a_batch_evicts_goes_before_what_it_stores_comes() -> None:
    """A block that went and came again between two reports is in both lists, and is held."""
    index, keys = PrefixIndex(), keys_of("p", 3)
    told(index, A, *keys)
    assert index.apply(A, BlockEvents(1, stored=keys[2:], evicted=keys[1:]))
    assert held_by(index, A, keys) == {keys[0], keys[2]}


def test_no_more_is_kept_than_may_be_and_the_longest_known_goes_first() -> None:
    index = PrefixIndex(max_entries=1_000)
    keys = keys_of("p", 5_000)
    for sequence in range(50):
        told(index, A, *keys[sequence * 100 : sequence * 100 + 100], sequence=sequence)
        assert len(index) <= 1_000
    assert index.match(keys[-1:]) == {A: 1}
    assert index.match(keys[:1]) == {}


def test_an_entry_takes_less_than_200_bytes() -> None:
    rng = random.Random(1)
    replicas = [ReplicaId(str(number)) for number in range(64)]
    tracemalloc.start()
    try:
        index = PrefixIndex()
        num_entries = 0
        for replica in replicas:
            told(index, replica, *[rng.randbytes(16) for _ in range(2_000)])
            num_entries += 2_000
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size / num_entries < 200
