"""What a sequence need not compute: blocks of a cached prefix, or of the choice that it forks from."""

from __future__ import annotations

from footplate.engine.kv.block_pool import BlockPool, CacheEntry
from footplate.engine.sequence import Sequence, SequenceState


def find_reusable(pool: BlockPool, sequence: Sequence) -> tuple[list[int], list[CacheEntry], int]:
    """Blocks another sequence computed for a waiting one: the leader's for a fork, else a cached prefix.

    Gives blocks, the entries of the full ones, and how many tokens are computed then. Takes nothing.
    """
    leader = sequence.leader
    if leader is not None and can_fork(sequence):
        shared = (sequence.num_prompt - 1) // pool.block_size
        return leader.block_table[:shared], leader.entries[:shared], sequence.num_prompt - 1
    if sequence.params.prompt_logprobs is not None and not sequence.num_output:
        return [], [], 0  # the logits of every prompt position are needed
    # at least one token is left to compute: its logits draw the next one
    found = pool.lookup(sequence.token_ids, sequence.root, sequence.num_known - 1)
    return [e.block for e in found], found, len(found) * pool.block_size


def can_fork(sequence: Sequence) -> bool:
    """Whether a choice can start from its leader's blocks, which hold the whole prompt."""
    leader = sequence.leader
    return (
        leader is not None
        and not sequence.num_output
        and sequence.params.prompt_logprobs is None
        and leader.state is SequenceState.RUNNING
        and leader.num_computed >= sequence.num_prompt
    )


def register_blocks(pool: BlockPool, sequence: Sequence, num_computed: int) -> None:
    """Make full blocks of known tokens findable, those of the first `num_computed`.

    A block of a step may be shared in that very step, once nothing can take its row from it again: on the
    device every key and value of a layer is written before any attention of that layer, and steps run in
    order.
    """
    size = pool.block_size
    if num_computed < (len(sequence.entries) + 1) * size:
        return  # as at most decode steps
    full = min(num_computed, len(sequence.token_ids)) // size
    while len(sequence.entries) < full and not sequence.chain_broken:
        i = len(sequence.entries)
        tokens = sequence.token_ids[i * size : (i + 1) * size]
        parent = sequence.entries[-1] if sequence.entries else None
        entry = pool.register(sequence.block_table[i], tokens, parent, sequence.root)
        if entry is None:
            sequence.chain_broken = True
        else:
            sequence.entries.append(entry)
