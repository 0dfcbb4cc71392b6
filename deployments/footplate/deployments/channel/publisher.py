"""What gateways are told of a replica's prefix cache: everything once, then what changes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

from footplate.deployments.channel import frames
from footplate.engine.kv.block_log import BlockChanges
from footplate.routing.types import BlockEvents

# A megabyte of keys.
MAX_KEYS = 65_536
_Peer = TypeVar("_Peer", bound=Hashable)


class BlockPublisher(Generic[_Peer]):
    """Numbers the events for each peer by itself. `changes(whole)` is the engine's, as `BlockPool.changes`.

    The engine keeps one list of changes, which looking at the whole begins anew: when one peer needs the
    whole, all get it. That is when a gateway comes, and else never as long as connections keep their order.
    """

    def __init__(self, changes: Callable[[bool], BlockChanges]) -> None:
        self._changes = changes
        self._next: dict[_Peer, int] = {}

    def whole(self, peer: _Peer) -> Iterator[tuple[_Peer, bytes]]:
        """Everything, for this peer, which may be new, and for all others."""
        self._next.setdefault(peer, 0)
        yield from self._to_all(self._changes(True))

    def news(self) -> Iterator[tuple[_Peer, bytes]]:
        """What changed since the call before, for all peers."""
        if self._next:
            yield from self._to_all(self._changes(False))

    def lose(self, peer: _Peer) -> None:
        """The peer is gone."""
        self._next.pop(peer, None)

    def _to_all(self, changes: BlockChanges) -> Iterator[tuple[_Peer, bytes]]:
        stored, evicted, is_reset = changes.stored, changes.evicted, changes.is_all
        while stored or evicted or is_reset:
            room = MAX_KEYS - len(evicted[:MAX_KEYS])
            for peer, number in list(self._next.items()):
                events = BlockEvents(number, stored[:room], evicted[:MAX_KEYS], is_reset)
                self._next[peer] = number + 1
                yield peer, frames.blocks_frame(events)
            stored, evicted, is_reset = stored[room:], evicted[MAX_KEYS:], False
