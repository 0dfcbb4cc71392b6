"""Brings journals into the database, one group at a time, so that new events never wait behind old ones."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from footplate.billing.errors import JournalFailed
from footplate.billing.journal import Journal, Segment, orphans
from footplate.billing.usage import UsageEvent

_LOGGER = logging.getLogger(__name__)
# Each says whether the database has answered.
Commit = Callable[[Sequence[UsageEvent]], Awaitable[bool]]
# A journal's name, and whether it holds events.
Report = Callable[[str, bool], Awaitable[bool]]


class Replay:
    """The journal of this process first, then those that others left on this machine.

    One step reads a file, or commits a group of it, or deletes it. A file is deleted only when all its events
    are in the database; a step that fails changes nothing and can be taken again.
    """

    def __init__(self, own: Journal, root: Path, *, max_group: int, commit: Commit, report: Report) -> None:
        self._own = own
        self._root = root
        self._max_group = max_group
        self._commit = commit
        self._report = report
        self._adopted: Journal | None = None
        self._names: list[str] = []
        self._segment: Segment | None = None
        self._num_committed = 0
        self._reported: str | None = None

    @property
    def has_work(self) -> bool:
        """Whether there is a step to take."""
        return bool(not self._own.is_empty or self._adopted or self._names or self._reported)

    async def announce(self) -> bool:
        """Tell a database that was away what stands in the way of closing a month; whether it answered."""
        return await self._report(self._own.name, not self._own.is_empty)

    async def look_around(self) -> None:
        """Look for journals whose processes are gone."""
        self._names = await asyncio.to_thread(orphans, self._root)

    async def step(self) -> bool:
        """Whether it went well; not when the database gave no answer.

        Raises:
            JournalFailed: a file can't be read or deleted.
        """
        journal = self._adopted
        if journal is None and not self._own.is_empty:
            journal = self._own
        if journal is None:
            if self._reported is not None:
                return await self._tell(self._reported, False)
            return await self._adopt()
        if self._segment is None:
            return await self._read(journal)
        left = self._segment.events[self._num_committed : self._num_committed + self._max_group]
        if left:
            if not await self._commit(left):
                return False
            self._num_committed += len(left)
            return True
        await asyncio.to_thread(journal.forget, self._segment)
        self._segment = None
        return True

    async def close(self) -> None:
        """Let go of a journal that was adopted; what is not replayed stays for the next process."""
        if self._adopted is not None:
            await asyncio.to_thread(self._adopted.close)
            self._adopted = None

    async def _adopt(self) -> bool:
        if self._names:
            try:
                self._adopted = await asyncio.to_thread(Journal, self._root, self._names.pop(0))
            except JournalFailed:
                pass  # another process was faster
        return True

    async def _read(self, journal: Journal) -> bool:
        segment = await asyncio.to_thread(journal.oldest)
        if segment is None:
            # Only an adopted one gets here: this process's own is not read when it is empty.
            if self._reported is not None and not await self._tell(self._reported, False):
                return False
            await self.close()
            return True
        if segment.num_damaged_bytes:
            _LOGGER.error("%d bytes of a journal are damaged and put aside", segment.num_damaged_bytes)
        if self._reported != journal.name and not await self._tell(journal.name, True):
            return False
        self._segment, self._num_committed = segment, 0
        return True

    async def _tell(self, name: str, holds_events: bool) -> bool:
        """Say whether a journal holds events, so that no month is closed before they are in."""
        if not await self._report(name, holds_events):
            return False
        self._reported = name if holds_events else None
        return True
