"""A picture kept from a pool's changes is the pool's cache, whatever happens in it."""

from __future__ import annotations

import random

import pytest

from footplate.engine.kv import block_log
from footplate.engine.kv.block_pool import BlockPool
from footplate.engine.prefix import PrefixHasher

HASHER = PrefixHasher(b"k", 4)


class Picture:
    """What a router would hold."""

    def __init__(self) -> None:
        self.keys: set[bytes] = set()
        self.num_whole = 0

    def update(self, pool: BlockPool, *, whole: bool = False) -> None:
        changes = pool.changes(whole=whole)
        if changes.is_all:
            self.keys.clear()
            self.num_whole += 1
        self.keys -= set(changes.evicted)
        self.keys |= set(changes.stored)


def use(pool: BlockPool, prompt: list[int]) -> list[int]:
    """Fill blocks with a prompt as the scheduler does."""
    root = HASHER.root(b"t")
    entries = pool.lookup(prompt, root, len(prompt))
    blocks = [entry.block for entry in entries]
    pool.share(blocks)
    fresh = pool.allocate(len(prompt) // 4 - len(blocks))
    assert fresh is not None
    parent = entries[-1] if entries else None
    for block in fresh:
        start = len(blocks) * 4
        parent = pool.register(block, prompt[start : start + 4], parent, root)
        blocks.append(block)
    return blocks


@pytest.mark.parametrize("max_changes", [65_536, 3])
def test_changes_add_up_to_what_is_cached(monkeypatch: pytest.MonkeyPatch, max_changes: int) -> None:
    monkeypatch.setattr(block_log, "MAX_CHANGES", max_changes)
    rng, pool, picture = random.Random(2), BlockPool(12, HASHER), Picture()
    for _ in range(400):
        held = [use(pool, [rng.randrange(3) for _ in range(rng.choice((4, 8, 12)))]) for _ in range(2)]
        for blocks in held:
            pool.release(blocks)
        if rng.random() < 0.05:
            pool.reset_cache()
        if rng.random() < 0.3:
            picture.update(pool, whole=rng.random() < 0.05)
            assert picture.keys == set(pool._entries)
    # With little room some changes were too many, and only then was all of it given.
    assert (picture.num_whole > 20) == (max_changes == 3)


def test_nothing_is_kept_before_anybody_asks_and_then_all_is_told() -> None:
    pool = BlockPool(8, HASHER)
    pool.release(use(pool, list(range(8))))
    assert pool._log._changes is None
    first = pool.changes()
    assert first.is_all
    assert set(first.stored) == set(HASHER.chain(list(range(8)), b"t"))
    assert pool.changes() == block_log.BlockChanges()
