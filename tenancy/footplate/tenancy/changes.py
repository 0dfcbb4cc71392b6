"""How a gateway hears of changes: told at once over a bus, and by asking the store itself every half second.

The bus may lose messages and may be away. The log may not: what it holds is numbered in the order of commits,
so whoever has read up to a number has missed nothing below it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from footplate.tenancy.admin.audit import AuditRecord, Outcome, TargetKind
from footplate.tenancy.errors import StoreUnavailable

_LOGGER = logging.getLogger(__name__)
POLL_S = 0.5
# For so long after the last answer of the log, a bus that is heard stands in for it.
BUS_ALONE_S = 30.0
RETRY_S = 0.5
ANSWER_S = 2.0


# What gateways hold answers of.
FOLLOWED = frozenset({TargetKind.TENANT, TargetKind.KEY, TargetKind.MODEL})


@dataclass(frozen=True, slots=True)
class Change:
    """What is known of a tenant, of a key or of the models is no longer true."""

    kind: TargetKind
    id: str


def change_of(record: AuditRecord) -> Change | None:
    """What gateways must hear of a record."""
    if record.outcome is not Outcome.DONE or record.target is None or record.target.kind not in FOLLOWED:
        return None
    return Change(record.target.kind, record.target.id)


class Pulse(Enum):
    """A bus shows that it is there. What was told before SENT has been heard by the HEARD that follows it."""

    SENT = "sent"
    HEARD = "heard"


@dataclass(frozen=True, slots=True)
class Changes:
    """What a log holds beyond a number: where it ends, and the changes, or None for too many to tell."""

    last: int
    changes: Sequence[Change] | None


class ChangeLog(Protocol):
    """All changes there were. May block; any thread may call it."""

    def changes_after(self, last: int | None) -> Changes:
        """What came after a number; None: only where the log ends now. Raises StoreUnavailable."""
        ...


class ChangeBus(Protocol):
    """Tells all gateways at once, as well as it can."""

    async def publish(self, changes: Sequence[Change]) -> None:
        """Tell. Never raises: whoever isn't told will ask."""
        ...

    def listen(self) -> AsyncIterator[Change | Pulse | None]:
        """What is told from now on, with a pulse while nothing is; None each time that something may have
        been missed. Ends when the bus is lost."""
        ...


class Cache(Protocol):
    """What holds answers of the store."""

    def forget(self, public_id: str) -> None: ...

    def forget_tenant(self, tenant_id: str) -> None: ...

    def forget_all(self) -> None: ...

    def confirm(self, at: float) -> None:
        """All that is held was true at `at`, by the cache's own clock."""
        ...


class ChangeFollower:
    """Keeps one cache true. `start` and `close` belong to the cache's event loop.

    `threads`: where questions to the log wait; None is the loop's own pool. `models_changed`: called when a
    model was changed, or may have been.
    """

    def __init__(
        self,
        cache: Cache,
        log: ChangeLog,
        bus: ChangeBus | None = None,
        *,
        poll_s: float = POLL_S,
        threads: Executor | None = None,
        clock: Callable[[], float] = time.monotonic,
        models_changed: Callable[[], None] = lambda: None,
    ) -> None:
        self._models_changed = models_changed
        self._cache = cache
        self._log = log
        self._bus = bus
        self._poll_s = poll_s
        self._threads = threads
        self._clock = clock
        self._last: int | None = None
        self._is_due = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._is_lost = False
        # When the log was last asked of what it answered, and when the bus may have lost something.
        self._read_at = float("-inf")
        self._gap_at = float("inf")
        # The question that waits for its answer, and when it was asked.
        self._asking: tuple[asyncio.Future[Changes], float] | None = None

    def start(self) -> None:
        """Begin to listen and to ask."""
        self._tasks = [asyncio.create_task(self._keep_polling())]
        if self._bus is not None:
            self._tasks.append(asyncio.create_task(self._keep_listening(self._bus)))

    async def close(self) -> None:
        """Stop both. Idempotent."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def tell(self, changes: Sequence[Change]) -> None:
        """Take changes of this process to heart, then tell the others."""
        for change in changes:
            self._apply(change)
        if self._bus is not None and changes:
            await self._bus.publish(changes)

    async def poll(self) -> None:
        """Ask the log once. Raises StoreUnavailable."""
        if self._asking is None:
            loop = asyncio.get_running_loop()
            asked = loop.run_in_executor(self._threads, self._log.changes_after, self._last)
            # An answer that comes after the close is nobody's.
            asked.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._asking = asked, self._clock()
        # A log that hangs holds one thread, not one more each time.
        asked, asked_at = self._asking
        done, _ = await asyncio.wait([asked], timeout=ANSWER_S)
        if not done:
            raise StoreUnavailable("the log of changes gave no answer in time")
        self._asking = None
        found = asked.result()
        # A log that ends before what was read of it is another one: the database was restored, say.
        if found.changes is None or (self._last is not None and found.last < self._last):
            self._cache.forget_all()
            self._models_changed()
        for change in found.changes or ():
            self._apply(change)
        self._last = found.last
        self._read_at = asked_at
        self._cache.confirm(asked_at)

    def _apply(self, change: Change) -> None:
        if change.kind is TargetKind.KEY:
            self._cache.forget(change.id)
        elif change.kind is TargetKind.MODEL:
            self._models_changed()
        else:
            self._cache.forget_tenant(change.id)

    async def _keep_polling(self) -> None:
        while True:
            self._is_due.clear()
            try:
                await self.poll()
                self._note_lost(False)
            except Exception as error:
                # What is held runs out by itself; see `CachingAuthenticator`. If we gave up asking, whatever
                # it is, every request would ask instead.
                self._note_lost(True)
                if not isinstance(error, StoreUnavailable):
                    _LOGGER.exception("asking for changes failed")
            with suppress(TimeoutError):
                async with asyncio.timeout(self._poll_s):
                    await self._is_due.wait()

    def _note_lost(self, is_lost: bool) -> None:
        if is_lost != self._is_lost:
            self._is_lost = is_lost
            if is_lost:
                _LOGGER.warning("changes of keys and tenants can't be read: the database gives no answer")
            else:
                _LOGGER.info("changes of keys and tenants are read again")

    async def _keep_listening(self, bus: ChangeBus) -> None:
        while True:
            sent_at = float("-inf")
            async for told in bus.listen():
                if told is None:
                    self._gap_at = self._clock()
                    self._is_due.set()
                elif told is Pulse.SENT:
                    sent_at = self._clock()
                elif told is Pulse.HEARD:
                    self._hear_pulse(sent_at)
                elif isinstance(told, Change):
                    self._apply(told)
            self._gap_at = float("inf")
            await asyncio.sleep(RETRY_S)

    def _hear_pulse(self, sent_at: float) -> None:
        """While the log gives no answer, hold what is held: whoever changes something tells the bus first.

        A database that is away takes no change. If it is only we who can't reach it, a change is missed only
        where its maker can't reach the bus either; so this goes on for a while and not for ever.
        """
        has_heard_all = self._gap_at <= self._read_at
        if has_heard_all and sent_at - self._read_at < BUS_ALONE_S:
            self._cache.confirm(sent_at)
