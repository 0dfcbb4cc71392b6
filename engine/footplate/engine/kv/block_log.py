"""What comes into a prefix cache and goes out of it, for routers that keep a picture of it."""

from __future__ import annotations

from dataclasses import dataclass

MAX_CHANGES = 65_536


@dataclass(frozen=True, slots=True)
class BlockChanges:
    """Keys of blocks, as of `PrefixHasher`. `is_all`: `stored` is everything there is, not what is new."""

    stored: tuple[bytes, ...] = ()
    evicted: tuple[bytes, ...] = ()
    is_all: bool = False


class BlockLog:
    """Changes since they were last taken; of each block only the last. Kept from `turn_on` on."""

    def __init__(self) -> None:
        self._changes: dict[bytes, bool] | None = None
        self._has_overflowed = False

    def turn_on(self) -> None:
        """Begin to keep changes, from a state that the caller knows."""
        self._changes = {}
        self._has_overflowed = False

    def store(self, key: bytes) -> None:
        self._note(key, is_there=True)

    def evict(self, key: bytes) -> None:
        self._note(key, is_there=False)

    def take(self) -> BlockChanges | None:
        """What has changed; None when that isn't known, and the whole must be looked at: see `turn_on`."""
        changes = self._changes
        if changes is None or self._has_overflowed:
            return None
        self._changes = {}
        return BlockChanges(
            tuple(key for key, is_there in changes.items() if is_there),
            tuple(key for key, is_there in changes.items() if not is_there),
        )

    def _note(self, key: bytes, *, is_there: bool) -> None:
        changes = self._changes
        if changes is None or self._has_overflowed:
            return
        changes[key] = is_there
        if len(changes) > MAX_CHANGES:
            self._has_overflowed = True
            changes.clear()
