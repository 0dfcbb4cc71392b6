"""The index is what the engines hold, whatever happens to their events; and it is small."""

from __future__ import annotations

import random
import tracemalloc

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


class Engine:
    """A cache that changes at random, and the events that it sends: the truth that an index must come to."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.held: set[bytes] = set()
        self._sequence = 0

    def change(self) -> BlockEvents:
        evicted = [key for key in sorted(self.held) if self._rng.random() < 0.3]
        self.held -= set(evicted)
        stored = [b"%d" % self._rng.randrange(40) for _ in range(self._rng.randrange(6))]
        self.held |= set(stored)
        return self._next(stored, evicted)

    def snapshot(self) -> list[BlockEvents]:
        held = sorted(self.held)
        half = len(held) // 2
        return [self._next(held[:half], [], is_reset=True), self._next(held[half:], [])]

    def _next(self, stored: list[bytes], evicted: list[bytes], *, is_reset: bool = False) -> BlockEvents:
        self._sequence += 1
        return BlockEvents(self._sequence, stored, evicted, is_reset)


@settings(max_examples=150)
@given(st.integers(0, 2**32), st.floats(0, 0.5))
def test_after_gaps_repeats_and_events_out_of_order_the_index_is_the_engines_truth(
    seed: int, lost_share: float
) -> None:
    rng = random.Random(seed)
    engines = {A: Engine(rng), B: Engine(rng)}
    index = PrefixIndex()
    on_the_way: list[tuple[ReplicaId, BlockEvents]] = []
    for _ in range(30):
        replica = rng.choice((A, B))
        on_the_way += [(replica, engines[replica].change())] * rng.choice((1, 1, 2))
        rng.shuffle(on_the_way)
        while on_the_way and rng.random() < 0.7:
            sender, events = on_the_way.pop()
            if rng.random() < lost_share or index.apply(sender, events):
                continue
            # Whoever is behind asks, and may lose the answer as well.
            on_the_way += [(sender, event) for event in reversed(engines[sender].snapshot())]
        index.sweep(rng.randrange(5))
        if rng.random() < 0.1:
            index.remove(sender := rng.choice((A, B)))
    for replica, engine in engines.items():
        for events in engine.snapshot():
            assert index.apply(replica, events)
    swept(index)
    for number in range(40):
        key = b"%d" % number
        assert set(index.match([key])) == {r for r, engine in engines.items() if key in engine.held}
    assert len(index) == len(engines[A].held | engines[B].held)


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
