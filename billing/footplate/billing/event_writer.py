"""Commits events in groups, for one event loop; nothing is lost while the database is away.

`submit` takes an event at once; what it returns is done when the event is durable: in the database, or synced
into the local journal. The journal is replayed when the database is back; commits are idempotent, so an event
may stand in both.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol, TypeVar

from footplate.billing.errors import BillingError, EventsRefused, JournalFailed
from footplate.billing.journal import LOOK_S, Journal
from footplate.billing.replay import Replay
from footplate.billing.store import CommitOutcome, EventStore
from footplate.billing.usage import UsageEvent

_LOGGER = logging.getLogger(__name__)
_Result = TypeVar("_Result")


class Durability(StrEnum):
    """Where an event is safe."""

    STORE = "store"
    JOURNAL = "journal"


@dataclass(frozen=True, slots=True)
class WriterConfig:
    """Times in seconds."""

    # From the first event of a group until it goes.
    group_s: float = 0.003
    max_group: int = 500
    # Events in memory, beyond which `submit` waits; what waits there is held by its request.
    max_waiting: int = 20_000
    # How long the database may take before events go to the journal instead.
    store_wait_s: float = 3.0
    # Between trials while the database or the journal is away.
    retry_s: float = 1.0
    # Between looks for journals that others left, and for prices of quarantined events.
    upkeep_s: float = 30.0


class WriterObserver(Protocol):
    """Hears what happens, for metrics; called on the event loop, must not block."""

    def committed(self, outcomes: Sequence[CommitOutcome], took_s: float, *, is_replay: bool) -> None:
        """A group is in the database."""
        ...

    def journalled(self, num_events: int) -> None:
        """A group is in the journal: the database was away."""
        ...

    def store_failed(self) -> None:
        """The database gave no answer."""
        ...

    def journal_failed(self, error: JournalFailed) -> None:
        """The journal can't take events: they wait in memory."""
        ...

    def refused(self, num_events: int) -> None:
        """The database refuses events as they are; they were put aside."""
        ...


class SilentObserver:
    """Hears nothing."""

    def committed(self, outcomes: Sequence[CommitOutcome], took_s: float, *, is_replay: bool) -> None:
        """Nothing."""

    def journalled(self, num_events: int) -> None:
        """Nothing."""

    def store_failed(self) -> None:
        """Nothing."""

    def journal_failed(self, error: JournalFailed) -> None:
        """Nothing."""

    def refused(self, num_events: int) -> None:
        """Nothing."""


_Waiting = tuple[UsageEvent, "asyncio.Future[Durability]"]


class EventWriter:
    """One for each gateway process. It replays what was left on this machine as well.

    One task commits, so a second group gathers while the first is on its way. After the database has given no
    answer in time, groups go to the journal until a trial, one a second, finds it back; then groups go to the
    database again, by turns with what the journal holds. So the order of events is not kept, which nothing
    rests on.
    """

    def __init__(
        self,
        store: EventStore,
        journal_root: Path,
        name: str,
        config: WriterConfig | None = None,
        observer: WriterObserver | None = None,
    ) -> None:
        """Opens the journal `journal_root/name`.

        Raises:
            JournalFailed: it can't be opened.
        """
        self._store = store
        self._journal = Journal(journal_root, name, wait_s=LOOK_S)
        self._config = config or WriterConfig()
        self._replay = Replay(
            self._journal,
            journal_root,
            max_group=self._config.max_group,
            commit=lambda events: self._commit(events, is_replay=True),
            report=lambda name, holds: self._try(
                lambda: self._store.report_journal(name, holds_events=holds)
            ),
        )
        self._observer = observer or SilentObserver()
        self._waiting: deque[_Waiting] = deque()
        self._arrived = asyncio.Event()
        self._room = asyncio.Condition()
        self._num_taken = 0
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="events")
        # A call to the database that has not come back: no second one is begun beside it.
        self._stuck: asyncio.Future[object] | None = None
        self._rating: asyncio.Future[int] | None = None
        self._is_store_away = False
        self._is_journal_failing = False
        self._is_stalled = False
        self._is_closing = False
        self._next_trial_at = 0.0
        self._next_upkeep_at = 0.0
        self._task: asyncio.Task[None] | None = None

    @property
    def num_waiting(self) -> int:
        """Events that are not durable yet."""
        return self._num_taken

    @property
    def has_room(self) -> bool:
        """Whether an event would be taken at once. If not, new requests should be refused."""
        return self._num_taken < self._config.max_waiting

    @property
    def is_store_away(self) -> bool:
        """Whether events go to the journal now."""
        return self._is_store_away

    @property
    def is_journal_failing(self) -> bool:
        """Whether the journal was needed and could not take events."""
        return self._is_journal_failing

    @property
    def is_stalled(self) -> bool:
        """Whether neither the database nor the journal took the last group: it waits in memory."""
        return self._is_stalled

    @property
    def may_begin(self) -> bool:
        """Whether new requests may begin: an event would be taken at once, and something makes it durable."""
        return self.has_room and not self._is_stalled

    def start(self) -> None:
        """Begin to commit; what earlier processes left is replayed first."""
        self._task = asyncio.create_task(self._run())

    async def submit(self, event: UsageEvent) -> Durability:
        """Take an event; returns when it is durable. It stays taken when the caller is cancelled."""
        if not self.has_room:
            async with self._room:
                await self._room.wait_for(lambda: self.has_room)
        return await asyncio.shield(self.take(event))

    def take(self, event: UsageEvent) -> asyncio.Future[Durability]:
        """Take an event whether there is room or not; the future is done when the event is durable."""
        future: asyncio.Future[Durability] = asyncio.get_running_loop().create_future()
        self._num_taken += 1
        self._waiting.append((event, future))
        self._arrived.set()
        return future

    async def close(self) -> None:
        """Make all events durable and stop. While neither store nor journal takes them it waits."""
        self._is_closing = True
        self._arrived.set()
        if self._task is not None:
            await self._task
        if self._rating is not None and not self._is_store_away:
            await asyncio.wait([self._rating], timeout=self._config.store_wait_s)
        await self._replay.close()
        self._threads.shutdown(wait=not self._is_stuck(), cancel_futures=True)
        self._journal.close()

    async def _run(self) -> None:
        while True:
            await self._upkeep()
            group = await self._next_group()
            if group:
                await self._make_durable(group)
            elif self._is_closing and not self._waiting:
                return

    async def _next_group(self) -> list[_Waiting]:
        """What has come within a group's time; nothing when it is time for something else."""
        if not self._waiting:
            self._arrived.clear()
            if self._is_closing:
                return []
            due = self._next_trial_at if self._is_store_away or self._has_replay() else self._next_upkeep_at
            try:
                await asyncio.wait_for(self._arrived.wait(), max(0.0, due - time.monotonic()))
            except TimeoutError:
                return []
        if len(self._waiting) < self._config.max_group and not self._is_closing:
            await asyncio.sleep(self._config.group_s)
        count = min(len(self._waiting), self._config.max_group)
        return [self._waiting.popleft() for _ in range(count)]

    async def _make_durable(self, group: Sequence[_Waiting]) -> None:
        events = [event for event, _ in group]
        while True:
            if not self._is_store_away and await self._commit(events):
                return await self._done(group, Durability.STORE)
            if await self._journalise(events):
                return await self._done(group, Durability.JOURNAL)
            # Neither takes them: they stay here, and both are asked again.
            self._is_stalled = True
            await asyncio.sleep(self._config.retry_s)
            self._is_store_away = self._is_stuck()

    async def _done(self, group: Sequence[_Waiting], durability: Durability) -> None:
        self._is_stalled = False
        self._num_taken -= len(group)
        for _, future in group:
            if not future.done():
                future.set_result(durability)
        async with self._room:
            self._room.notify_all()

    async def _commit(self, events: Sequence[UsageEvent], *, is_replay: bool = False) -> bool:
        """Whether events are in the database, or put aside because it refuses them as they are."""
        begin = time.monotonic()
        try:
            outcomes = await self._ask_store(lambda: self._store.commit(events))
        except EventsRefused:
            if len(events) > 1:
                # One of them is not as the database wants it; the others are none the worse for it.
                return all([await self._commit([event], is_replay=is_replay) for event in events])
            _LOGGER.error("an event is refused by the database and put aside")
            return await self._put_aside(events)
        except (BillingError, TimeoutError):
            self._note_store_away()
            return False
        except Exception:
            _LOGGER.exception("the database of events can't be used as it is")
            self._note_store_away()
            return False
        self._observer.committed(outcomes, time.monotonic() - begin, is_replay=is_replay)
        return True

    async def _put_aside(self, events: Sequence[UsageEvent]) -> bool:
        if not await self._on_disk(lambda: self._journal.put_aside(events)):
            return False
        self._observer.refused(len(events))
        return True

    async def _journalise(self, events: Sequence[UsageEvent]) -> bool:
        if not await self._on_disk(lambda: self._journal.append(events)):
            return False
        self._observer.journalled(len(events))
        return True

    async def _on_disk(self, do: Callable[[], None]) -> bool:
        try:
            await asyncio.get_running_loop().run_in_executor(self._threads, do)
        except JournalFailed as error:
            if not self._is_journal_failing:
                _LOGGER.error("the journal of events takes none: %s", error)
            self._is_journal_failing = True
            self._observer.journal_failed(error)
            return False
        self._is_journal_failing = False
        return True

    async def _ask_store(self, do: Callable[[], _Result]) -> _Result:
        """Ask in a thread, for a bounded time.

        Raises:
            TimeoutError: no answer yet; one call more would only wait behind it.
        """
        if self._is_stuck():
            raise TimeoutError
        call = asyncio.get_running_loop().run_in_executor(self._threads, do)
        try:
            return await asyncio.wait_for(asyncio.shield(call), self._config.store_wait_s)
        except TimeoutError:
            self._stuck = call  # type: ignore[assignment]
            call.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
            raise

    def _is_stuck(self) -> bool:
        return self._stuck is not None and not self._stuck.done()

    def _note_store_away(self) -> None:
        if not self._is_store_away:
            _LOGGER.warning("the database of events is away; they go to the local journal")
        self._is_store_away = True
        self._next_trial_at = time.monotonic() + self._config.retry_s
        self._observer.store_failed()

    async def _upkeep(self) -> None:
        """What is due between two groups."""
        now = time.monotonic()
        if self._is_store_away:
            if now < self._next_trial_at:
                return
            self._next_trial_at = now + self._config.retry_s
            if not await self._replay.announce():
                return
            _LOGGER.warning("the database of events is back; the journal is replayed")
            self._is_store_away = False
        if now >= self._next_upkeep_at and not self._is_closing:
            self._next_upkeep_at = now + self._config.upkeep_s
            await self._replay.look_around()
            self._rate_quarantined()
        if self._has_replay() and now >= self._next_trial_at:
            await self._step()

    def _rate_quarantined(self) -> None:
        """Beside everything else: it may take long, and says nothing about the database if it does."""
        if self._rating is None or self._rating.done():
            self._rating = asyncio.ensure_future(asyncio.to_thread(self._store.rate_quarantined))
            self._rating.add_done_callback(lambda ended: ended.cancelled() or ended.exception())

    def _has_replay(self) -> bool:
        return not self._is_store_away and self._replay.has_work

    async def _step(self) -> None:
        try:
            await self._replay.step()
        except JournalFailed as error:
            _LOGGER.error("a journal of events can't be replayed: %s", error)
            self._observer.journal_failed(error)
            self._next_trial_at = time.monotonic() + self._config.retry_s

    async def _try(self, do: Callable[[], object]) -> bool:
        """Whether the database answered."""
        try:
            await self._ask_store(do)
        except (BillingError, TimeoutError):
            self._note_store_away()
            return False
        except Exception:
            _LOGGER.exception("the database of events can't be used as it is")
            self._note_store_away()
            return False
        return True
