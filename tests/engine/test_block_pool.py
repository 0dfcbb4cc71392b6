"""Which block is handed out next, which is evicted first, and who may take up a cached prefix."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from footplate.engine.kv.block_pool import BlockPool, CacheEntry
from footplate.engine.prefix import PrefixHasher

SIZE = 2


class ConstantHasher(PrefixHasher):
    """Every block collides with every other."""

    def child(self, parent: bytes, token_ids: Any) -> bytes:
        return b"same"


def make_pool(num_blocks: int = 6, hasher: type[PrefixHasher] = PrefixHasher, **options: Any) -> BlockPool:
    return BlockPool(num_blocks, hasher(b"key", SIZE), **options)


def fill(pool: BlockPool, tokens: list[int], root: bytes = b"root") -> list[int]:
    """Hold and register the full blocks of a prompt; gives its table."""
    table = pool.allocate(pool.blocks_for(len(tokens)))
    assert table is not None
    parent: CacheEntry | None = None
    for i in range(len(tokens) // SIZE):
        parent = pool.register(table[i], tokens[i * SIZE : (i + 1) * SIZE], parent, root)
    return table


def found_blocks(pool: BlockPool, tokens: list[int], root: bytes = b"root") -> list[int]:
    return [e.block for e in pool.lookup(tokens, root, len(tokens))]


def test_a_fresh_pool_hands_out_blocks_in_order() -> None:
    pool = make_pool()
    assert pool.allocate(2) == [0, 1]
    assert pool.allocate(3) == [2, 3, 4]
    assert (pool.num_held, pool.num_free) == (5, 1)


def test_too_large_an_allocation_takes_nothing() -> None:
    pool = make_pool(3)
    assert pool.allocate(4) is None
    assert pool.allocate(3) == [0, 1, 2]  # exactly full is fine
    assert pool.allocate(1) is None and pool.allocate(0) == []


def test_blocks_without_content_are_reused_before_cached_ones() -> None:
    pool = make_pool(6)
    cached = fill(pool, [1, 2, 3, 4])  # blocks 0, 1
    plain = pool.allocate(2)  # blocks 2, 3
    assert plain is not None
    pool.release(cached)
    pool.release(plain)
    # 2, 3: freed last, but nothing is lost with them; 4, 5: never used; then the cached tail before its head
    assert pool.allocate(6) == [2, 3, 4, 5, 1, 0]


def test_the_tail_of_a_prefix_is_evicted_before_its_head() -> None:
    pool = make_pool(3)
    pool.release(fill(pool, [1, 2, 3, 4, 5, 6]))
    assert pool.allocate(1) == [2]  # the last block: what follows a prefix is worth less than the prefix
    assert found_blocks(pool, [1, 2, 3, 4, 5, 6]) == [0, 1]
    assert pool.allocate(1) == [1]
    assert found_blocks(pool, [1, 2, 3, 4, 5, 6]) == [0]


def test_the_least_recently_freed_prefix_is_evicted_first() -> None:
    pool = make_pool(3)
    first, second, third = fill(pool, [1, 1]), fill(pool, [2, 2]), fill(pool, [3, 3])
    for table in (second, first, third):
        pool.release(table)
    pool.share(second)  # used again,
    pool.release(second)  # so it is now the most recently freed
    assert [pool.allocate(1) for _ in range(3)] == [[0], [2], [1]]


def test_shared_blocks_return_with_their_last_holder() -> None:
    pool = make_pool(3)
    table = fill(pool, [1, 2, 3, 4])
    pool.share(table)
    pool.release(table)
    assert (pool.num_held, pool.num_free) == (2, 1)
    pool.release(table)
    assert (pool.num_held, pool.num_free) == (0, 3)
    with pytest.raises(AssertionError, match="more often"):
        pool.release(table)


def test_a_free_cached_block_is_held_again_when_shared() -> None:
    pool = make_pool(2)
    pool.release(fill(pool, [1, 2]))
    assert pool.count_free([0]) == 1  # it costs a free block to take it up
    pool.share(found_blocks(pool, [1, 2]))
    assert pool.count_free([0]) == 0
    assert pool.allocate(2) is None and pool.allocate(1) == [1]
    assert found_blocks(pool, [1, 2]) == [0]  # held, and still there for others


def test_a_lookup_takes_nothing_and_is_cut_at_its_limit() -> None:
    pool = make_pool(3)
    pool.release(fill(pool, [1, 2, 3, 4, 5]))
    for limit, blocks in ((5, [0, 1]), (4, [0, 1]), (3, [0]), (1, []), (0, [])):
        assert [e.block for e in pool.lookup([1, 2, 3, 4, 5], b"root", limit)] == blocks
    assert pool.num_held == 0


def test_partial_blocks_never_match() -> None:
    """FAULTS a24."""
    pool = make_pool(4)
    fill(pool, [1, 2, 3])
    assert found_blocks(pool, [1, 2, 3]) == [0]
    assert found_blocks(pool, [1, 2, 4]) == [0]
    assert found_blocks(pool, [1]) == []
    assert pool.num_cached == 1


def test_a_block_matches_only_after_the_same_blocks() -> None:
    pool = make_pool(6)
    fill(pool, [1, 2, 3, 4])
    fill(pool, [9, 9])
    assert found_blocks(pool, [3, 4]) == []  # cached, but not as a first block
    assert found_blocks(pool, [9, 9, 3, 4]) == [2]
    assert found_blocks(pool, [1, 2, 3, 4], root=b"other") == []


def test_equal_content_keeps_its_first_block() -> None:
    pool = make_pool(4)
    first, second = fill(pool, [1, 2]), fill(pool, [1, 2])
    assert found_blocks(pool, [1, 2]) == first
    pool.release(second)
    assert pool.allocate(1) == second  # the twin is not findable, so nothing is lost with it
    assert pool.num_cached == 1


def test_content_cached_behind_a_lost_twin_becomes_findable_again() -> None:
    """Two sequences compute one prefix at once; the one whose block stands for it goes and is evicted."""
    pool = make_pool(4)
    leader = fill(pool, [1, 2])
    twin = fill(pool, [1, 2, 3, 4])  # its second block hangs on the leader's entry
    pool.release(leader)
    assert pool.allocate(1) == [3]  # never used
    assert pool.allocate(1) == leader  # evicted: nobody finds [1, 2] any more
    assert found_blocks(pool, [1, 2, 3, 4]) == []
    pool.release(twin)
    pool.release(leader)
    again = fill(pool, [1, 2, 3, 4])
    assert found_blocks(pool, [1, 2, 3, 4]) == again
    pool.check([[3], again])


def test_colliding_keys_are_a_miss_and_not_anothers_content() -> None:
    """FAULTS a15."""
    pool = make_pool(8, ConstantHasher)
    fill(pool, [1, 2, 3, 4])
    assert found_blocks(pool, [5, 6]) == []
    assert found_blocks(pool, [3, 4]) == []
    assert found_blocks(pool, [1, 2], root=b"other scope") == []
    fill(pool, [5, 6])
    for prompt in ([5, 6], [1, 2, 3, 4], [1, 2, 1, 2]):
        for block in found_blocks(pool, prompt):
            assert block != 2 or prompt == [5, 6]
    pool.check([[0, 1], [2]])


def test_without_caching_nothing_is_found() -> None:
    pool = make_pool(2, caching=False)
    fill(pool, [1, 2])
    assert found_blocks(pool, [1, 2]) == [] and pool.num_cached == 0


def test_reset_forgets_prefixes_and_keeps_holders() -> None:
    pool = make_pool(4)
    table = fill(pool, [1, 2, 3, 4])
    pool.reset_cache()
    assert found_blocks(pool, [1, 2]) == [] and pool.num_held == 2
    pool.check([table])


class PoolMachine(RuleBasedStateMachine):
    """The auditor keeps the tables alone; everything the pool says must follow from them."""

    @initialize(num_blocks=st.integers(2, 10), collide=st.booleans())
    def start(self, num_blocks: int, collide: bool) -> None:
        self.pool = make_pool(num_blocks, ConstantHasher if collide else PrefixHasher)
        self.tables: list[list[int]] = []
        self.content: dict[int, tuple[int, ...]] = {}  # block -> all tokens up to its end

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=8))
    def admit(self, tokens: list[int]) -> None:
        found = self.pool.lookup(tokens, b"root", len(tokens))
        blocks = [e.block for e in found]
        for i, block in enumerate(blocks):
            assert self.content[block] == tuple(tokens[: (i + 1) * SIZE]), "another prompt's block"
        wanted = self.pool.blocks_for(len(tokens)) - len(blocks)
        if wanted + self.pool.count_free(blocks) > self.pool.num_free:
            return
        self.pool.share(blocks)
        fresh = self.pool.allocate(wanted)
        assert fresh is not None and len(fresh) == wanted
        held = {b for t in self.tables for b in t} | set(blocks)
        assert not held & set(fresh), "a held block was handed out"
        table = blocks + fresh
        for i in range(len(blocks), len(table)):
            self.content[table[i]] = tuple(tokens[: (i + 1) * SIZE])
        parent = found[-1] if found else None
        for i in range(len(blocks), len(tokens) // SIZE):
            parent = self.pool.register(table[i], tokens[i * SIZE : (i + 1) * SIZE], parent, b"root")
            if parent is None:
                break
        self.tables.append(table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.pool.release(self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))))

    @rule()
    def reset(self) -> None:
        self.pool.reset_cache()

    @invariant()
    def adds_up(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check(self.tables)


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestPoolMachine = pytest.mark.filterwarnings("default")(PoolMachine.TestCase)
