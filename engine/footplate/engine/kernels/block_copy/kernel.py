"""Copying whole KV blocks within every cache tensor of a model, in one Triton launch."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

WORD_BYTES = 4
WORDS = 4096  # a program's share of a block, in words
NUM_WARPS = 4


@triton.jit
def _block_copy_kernel(addresses, copies, words_per_block, WORDS: tl.constexpr):
    copy = tl.program_id(0)
    source = tl.load(copies + 2 * copy).to(tl.int64) * words_per_block
    target = tl.load(copies + 2 * copy + 1).to(tl.int64) * words_per_block
    # Allocations and blocks start on multiples of 16 bytes, which lets the copy move 16 at a time.
    address = tl.load(addresses + tl.program_id(1))
    cache = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 16)
    word = tl.program_id(2) * WORDS + tl.arange(0, WORDS)
    inside = word < words_per_block
    tl.store(cache + target + word, tl.load(cache + source + word, mask=inside), mask=inside)


def cache_addresses(caches: Sequence[torch.Tensor]) -> torch.Tensor:
    """Where each cache begins, [number of caches] int64 on their device. Good while the caches live."""
    return torch.tensor([cache.data_ptr() for cache in caches], dtype=torch.int64, device=caches[0].device)


def block_copy(
    caches: Sequence[torch.Tensor], copies: torch.Tensor, addresses: torch.Tensor | None = None
) -> None:
    """Copy block `source` to block `target` in each cache [B, ...] for every row (source, target) of [N, 2].

    Caches are contiguous and of one shape; `addresses` is theirs from `cache_addresses`, made anew if left
    out. No block may be the target of one copy and named by another.

    Raises:
        ValueError: caches of another shape, or blocks that are no multiple of 16 bytes.
    """
    first = caches[0]
    block_bytes = first[0].numel() * first.element_size()
    if any(c.shape != first.shape or c.dtype != first.dtype or not c.is_contiguous() for c in caches):
        raise ValueError("block_copy needs contiguous caches of one shape and type")
    if block_bytes % 16 or any(cache.data_ptr() % 16 for cache in caches):
        raise ValueError(f"block_copy needs blocks on multiples of 16 bytes; one has {block_bytes} bytes")
    if addresses is None:
        addresses = cache_addresses(caches)
    words = block_bytes // WORD_BYTES
    if len(copies):
        grid = (len(copies), len(caches), triton.cdiv(words, WORDS))
        _block_copy_kernel[grid](addresses, copies.contiguous(), words, WORDS=WORDS, num_warps=NUM_WARPS)
