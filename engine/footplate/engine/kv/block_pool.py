"""The pool of KV blocks: who holds each, which free ones still hold a cached prefix, and which to reuse next.

A block is held (reference count above 0), or free. A free block may still be cached: its content is a known
prefix and can be taken up again until the block is reused. The free list is the eviction order: blocks with
no cached content first, then cached ones, least recently freed first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from footplate.engine.kv.block_log import BlockChanges, BlockLog
from footplate.engine.prefix import PrefixHasher

ROOT_ENTRY = 0  # the parent entry of every first block; its key holds scope and extras


@dataclass(slots=True)
class CacheEntry:
    """A cached block: its key, and what proves a hit without trusting the key.

    `parent_entry` is the id of the entry before it and `token_ids` its own tokens, so by induction a match
    means equal tokens from the start. `root` is set on first blocks only.
    """

    entry_id: int
    key: bytes
    block: int
    parent_entry: int
    token_ids: tuple[int, ...]
    root: bytes


class BlockPool:
    """Owns all KV blocks of one replica. Every operation is O(1) a block.

    The scheduler is its only caller; nothing here knows sequences or tensors.
    """

    def __init__(self, num_blocks: int, hasher: PrefixHasher, *, caching: bool = True) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}; the pool needs at least one block")
        self.num_blocks = num_blocks
        self.block_size = hasher.block_size
        self._hasher = hasher
        self._caching = caching
        self._refs = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict((b, None) for b in range(num_blocks))
        self._entries: dict[bytes, CacheEntry] = {}
        self._entry_of: list[CacheEntry | None] = [None] * num_blocks
        self._next_entry = ROOT_ENTRY + 1
        self._log = BlockLog()

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now, cached ones included."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        return self.num_blocks - len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks with cached content, held or free."""
        return len(self._entries)

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks `num_tokens` tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` blocks, evicting cached ones in order; None, and nothing taken, if too few."""
        if count > len(self._free):
            return None
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self._refs[block] = 1
            self._forget(block)
        return taken

    def count_free(self, blocks: Iterable[int]) -> int:
        """How many of these cached blocks are free now, and so leave the free list when shared."""
        return sum(self._refs[block] == 0 for block in blocks)

    def share(self, blocks: Iterable[int]) -> None:
        """Take one more reference on each block; free cached ones become held again."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._free[block]
            self._refs[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Give one reference back on each block of a table.

        The tail is freed before the head, so that a shared prefix outlives what followed it.
        """
        for block in reversed(blocks):
            self._refs[block] -= 1
            assert self._refs[block] >= 0, f"block {block} was released more often than taken"
            if self._refs[block] == 0:
                self._free[block] = None
                if self._entry_of[block] is None:
                    self._free.move_to_end(block, last=False)

    def lookup(self, token_ids: Sequence[int], root: bytes, max_tokens: int) -> list[CacheEntry]:
        """The longest cached chain of full blocks, at most `max_tokens` long. Takes nothing."""
        found: list[CacheEntry] = []
        if not self._caching:
            return found
        parent_key, parent_entry = root, ROOT_ENTRY
        for start in range(0, max_tokens - self.block_size + 1, self.block_size):
            tokens = tuple(token_ids[start : start + self.block_size])
            key = self._hasher.child(parent_key, tokens)
            entry = self._entries.get(key)
            if entry is None or not self._proves(entry, parent_entry, tokens, root):
                break
            found.append(entry)
            parent_key, parent_entry = key, entry.entry_id
        return found

    def register(
        self, block: int, token_ids: Sequence[int], parent: CacheEntry | None, root: bytes
    ) -> CacheEntry | None:
        """Make a full block findable; gives the entry that now stands for its content.

        Equal content that is cached already keeps its block (tables are append-only, so equal blocks are not
        merged) and its entry is given back. None when caching is off or the key stands for other tokens.
        """
        if not self._caching:
            return None
        tokens = tuple(token_ids)
        parent_entry = parent.entry_id if parent else ROOT_ENTRY
        key = self._hasher.child(parent.key if parent else root, tokens)
        entry = self._entries.get(key)
        if entry is not None and self._proves(entry, parent_entry, tokens, root):
            return entry
        if entry is not None:
            if entry.token_ids != tokens:
                return None
            # The same tokens after a prefix whose own block was evicted: nobody can reach them there.
            self._forget(entry.block)
            if self._refs[entry.block] == 0:
                self._free.move_to_end(entry.block, last=False)
        entry = CacheEntry(
            self._next_entry, key, block, parent_entry, tokens, root if parent is None else b""
        )
        self._next_entry += 1
        self._entries[key] = entry
        self._entry_of[block] = entry
        self._log.store(key)
        return entry

    def changes(self, *, whole: bool = False) -> BlockChanges:
        """What the cache holds that it did not at the call before, or with `whole` all that it holds.

        From the first such call on changes are kept; one that comes too late for them gets the whole.
        """
        changes = None if whole else self._log.take()
        if changes is None:
            self._log.turn_on()
            return BlockChanges(tuple(self._entries), is_all=True)
        return changes

    def reset_cache(self) -> None:
        """Forget every cached prefix; held blocks stay held."""
        for block in range(self.num_blocks):
            self._forget(block)

    def _forget(self, block: int) -> None:
        entry = self._entry_of[block]
        if entry is not None:
            del self._entries[entry.key]
            self._entry_of[block] = None
            self._log.evict(entry.key)

    @staticmethod
    def _proves(entry: CacheEntry, parent_entry: int, tokens: tuple[int, ...], root: bytes) -> bool:
        """Whether the entry is this very prefix, not a colliding one."""
        same_root = parent_entry != ROOT_ENTRY or entry.root == root
        return entry.parent_entry == parent_entry and entry.token_ids == tokens and same_root

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Assert conservation: references equal the tables given, and free + held = total.

        For idle checks and tests; O(pool).
        """
        refs = [0] * self.num_blocks
        for table in tables:
            for block in table:
                refs[block] += 1
        assert refs == self._refs, "reference counts differ from the block tables"
        unheld = {b for b in range(self.num_blocks) if refs[b] == 0}
        assert set(self._free) == unheld, "the free list is not the unheld blocks"
        for key, entry in self._entries.items():
            assert self._entry_of[entry.block] is entry and entry.key == key, (
                "prefix index and blocks disagree"
            )
        assert sum(e is not None for e in self._entry_of) == len(self._entries), "a cached block has no entry"
