"""Prefix keys: a keyed BLAKE2b chain over blocks of token ids.

Two prompts share a block's key exactly when they agree on every token up to that block's end, on the tenant
scope and on every tagged extra. The key of the hash is a platform secret, so that a tenant cannot compute or
steer keys (the faults of predictable hashes are public: vLLM PR #12621).
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping, Sequence

DIGEST_BYTES = 16


class PrefixHasher:
    """Makes chained keys for full blocks. Stateless but for its secret."""

    def __init__(self, key: bytes, block_size: int) -> None:
        """
        Raises:
            ValueError: block_size is below 1 or the key is over 64 bytes.
        """
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}; it must be at least 1")
        if len(key) > hashlib.blake2b.MAX_KEY_SIZE:
            raise ValueError(f"prefix key of {len(key)} bytes; at most {hashlib.blake2b.MAX_KEY_SIZE}")
        self._key = key
        self.block_size = block_size

    def root(self, scope: bytes, extras: Mapping[str, str] | None = None) -> bytes:
        """The parent key of a first block. Extras are tagged by name, so equal values of two kinds differ."""
        h = hashlib.blake2b(key=self._key, digest_size=DIGEST_BYTES, person=b"footplate.root")
        for part in (b"scope", scope, *(p.encode() for kv in sorted((extras or {}).items()) for p in kv)):
            h.update(len(part).to_bytes(4, "little"))
            h.update(part)
        return h.digest()

    def child(self, parent: bytes, token_ids: Sequence[int]) -> bytes:
        """The key of the block that holds `token_ids` and follows the block of `parent`."""
        data = parent + array("I", token_ids).tobytes()
        return hashlib.blake2b(data, key=self._key, digest_size=DIGEST_BYTES).digest()

    def chain(
        self, token_ids: Sequence[int], scope: bytes, extras: Mapping[str, str] | None = None
    ) -> list[bytes]:
        """The key of each full block of a prompt; a trailing partial block is left out."""
        keys: list[bytes] = []
        parent = self.root(scope, extras)
        for start in range(0, len(token_ids) - self.block_size + 1, self.block_size):
            parent = self.child(parent, token_ids[start : start + self.block_size])
            keys.append(parent)
        return keys
