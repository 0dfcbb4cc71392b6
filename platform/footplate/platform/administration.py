"""Administration on the gateway's event loop: the database in threads of its own, notices afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Protocol, TypeVar

from footplate.platform.billing_desk import LONG_S, BillingDesk
from footplate.platform.capture.store import CaptureShelf
from footplate.platform.model_desk import ModelDesk
from footplate.platform.ports import UseReader
from footplate.tenancy.admin.administration import Administration, Changed, Enclosing, IdempotentRequest
from footplate.tenancy.admin.audit import AuditRecord, Caller
from footplate.tenancy.admin.refusals import RefusalBudget
from footplate.tenancy.admin.store import Reader, Writer
from footplate.tenancy.changes import Change
from footplate.tenancy.errors import StoreUnavailable
from footplate.tenancy.quotas import UNLIMITED, Quota

# Few: changes wait for each other anyway, and requests for models need the machine.
MAX_THREADS = 4
# Apart, for what any live key can cause as often as it likes: it waits for itself, not administrators for it.
MAX_SIDE_THREADS = 2
# Longer than the database lets any statement take, so that this only ends waits for one that hangs.
MAX_WAIT_S = 8.0
_Answer = TypeVar("_Answer")


class Tells(Protocol):
    """Lets this gateway and the others know of changes, before their answers go out."""

    async def tell(self, changes: Sequence[Change]) -> None: ...


def _utc_now() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True)
class AdminDesk:
    """What the admin endpoints work with.

    `pepper` hashes new keys; `default_quota` is shown, not stored; `use` says what callers have used.
    `billing`: reports, prices and months; None where no books are kept. `models`: what adds and removes them;
    None where they are what the platform was deployed with. `captures`: where kept prompts and answers are
    read; None where there is no such store.
    `source_header`: where the proxy in front says from which address a request came; None without one.
    """

    administration: Administration
    pepper: bytes = field(repr=False)
    tells: Tells | None = None
    use: UseReader | None = None
    default_quota: Quota = UNLIMITED
    source_header: str | None = None
    billing: BillingDesk | None = field(default=None, repr=False)
    models: ModelDesk | None = field(default=None, repr=False)
    captures: CaptureShelf | None = field(default=None, repr=False)
    now: Callable[[], datetime] = _utc_now
    _refusals: RefusalBudget = field(default_factory=RefusalBudget, repr=False)
    _threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="admin"), repr=False
    )
    _side_threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(MAX_SIDE_THREADS, thread_name_prefix="side"), repr=False
    )

    async def read(self, work: Callable[[Reader], _Answer]) -> _Answer:
        """The answer of a read. Raises StoreUnavailable and what `work` raises."""
        return await self._run(self._threads, lambda: self.administration.read(work))

    async def read_own(self, work: Callable[[Reader], _Answer]) -> _Answer:
        """As `read`, for what every key may ask about itself."""
        return await self._run(self._side_threads, lambda: self.administration.read(work))

    async def change(
        self,
        caller: Caller,
        work: Callable[[Writer], dict[str, object]],
        request: IdempotentRequest | None = None,
    ) -> Changed:
        """As `Administration.change`; all who listen have been told when it returns."""

        async def make() -> Changed:
            return await self._run(self._threads, lambda: self.administration.change(caller, work, request))

        return await self._told(make)

    async def change_within(
        self,
        caller: Caller,
        enclosing: Enclosing[_Answer],
        work: Callable[[Writer, _Answer], dict[str, object]],
        request: IdempotentRequest | None = None,
    ) -> Changed:
        """As `Administration.change_enclosed`."""

        async def make() -> Changed:
            return await self._run(
                self._threads,
                lambda: self.administration.change_enclosed(caller, enclosing, work, request),
            )

        return await self._told(make)

    async def change_books(
        self,
        caller: Caller,
        enclosing: Enclosing[_Answer],
        work: Callable[[Writer, _Answer], dict[str, object]],
        request: IdempotentRequest | None = None,
    ) -> Changed:
        """As `Administration.change_enclosed`; it may take as long as closing a month does."""
        billing = self.billing
        assert billing is not None

        async def make() -> Changed:
            return await billing.ask(
                lambda: self.administration.change_enclosed(caller, enclosing, work, request), wait_s=LONG_S
            )

        return await self._told(make)

    async def note_refusal(self, record: AuditRecord) -> None:
        """Write down a change that was refused, unless its key has caused too many such records.

        Raises:
            StoreUnavailable: it was not written down.
        """
        records = self._refusals.admit(record, self.now())
        if records:
            await self._run(self._side_threads, lambda: self.administration.note_refusals(records))

    def close(self) -> None:
        """Let no more work begin."""
        for threads in (self._threads, self._side_threads):
            threads.shutdown(wait=False, cancel_futures=True)

    async def _told(self, make: Callable[[], Awaitable[Changed]]) -> Changed:
        """What a change made, once all who listen have been told."""

        async def change() -> Changed:
            changed = await make()
            if self.tells is not None:
                await self.tells.tell(changed.notices)
            return changed

        # A client that goes away must not leave a change that nobody was told of.
        return await asyncio.shield(asyncio.ensure_future(change()))

    async def _run(self, threads: ThreadPoolExecutor, work: Callable[[], _Answer]) -> _Answer:
        try:
            async with asyncio.timeout(MAX_WAIT_S):
                return await asyncio.get_running_loop().run_in_executor(threads, work)
        except TimeoutError:
            raise StoreUnavailable("the database gave no answer in time") from None
