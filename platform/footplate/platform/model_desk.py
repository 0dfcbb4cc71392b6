"""Models as administrators see and change them: the registry's rules, with what is checked before them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from footplate.platform.billing_desk import BillingDesk
from footplate.platform.file_checks import FileChecks
from footplate.platform.model_registry import (
    Decide,
    ModelRegistry,
    RegistryChange,
    SeenModel,
    WantedModel,
    put_model,
    reload_model,
    remove_model,
)
from footplate.platform.price_settings import without_price
from footplate.platform.settings import ModelSettings, Settings
from footplate.tenancy.errors import Conflict, StoreUnavailable

# The files of a package in parts are put together, and summed up, before its header can be read.
CHECK_S = 120.0
READ_S = 8.0
# Of the registry's reads; another one waits.
MAX_THREADS = 2
_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class ModelDesk:
    """`file`: the configuration; `check` refuses a model whose files can't be loaded here, or don't fit.

    `catch_up` lets this gateway serve what the registry says, before a change is answered.
    """

    registry: ModelRegistry
    file: Settings
    check: Callable[[ModelSettings], None]
    catch_up: Callable[[], Awaitable[None]] | None = None
    _files: FileChecks = field(default_factory=lambda: FileChecks(CHECK_S), repr=False)
    _threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="model-desk"), repr=False
    )

    async def read(self) -> tuple[Sequence[WantedModel], Mapping[str, SeenModel]]:
        """All rows, and what was last seen of each model. Raises StoreUnavailable."""
        return await self._run(lambda: (self.registry.rows(), self.registry.seen()), READ_S)

    async def putting(self, model: ModelSettings, by: str, billing: BillingDesk | None) -> Decide:
        """What puts a model into the registry, once all is checked that can be checked before it starts.

        Raises:
            Conflict, NameTaken: as `put_model`; or it has no price though there are prices, or does not fit.
            InvalidValue: its files can't be used.
        """

        def decide(rows: Mapping[str, WantedModel]) -> RegistryChange:
            return put_model(self.file, rows, model, by)

        rows, _ = await self.read()
        change = decide({row.name: row for row in rows})
        if change.before == change.after:
            return decide
        if billing is not None:
            book = await billing.ask(billing.prices.book)
            missing = without_price(book, [model.name], billing.now())
            if missing is not None:
                raise Conflict(f"the price book {missing} ('footplate prices import')")
        template = "" if model.chat_template is None else f" or {model.chat_template}"
        await self._files.run(lambda: self.check(model), f"{model.source}{template}")
        return decide

    def reloading(self, name: str, by: str) -> Decide:
        """What makes a model start anew; see `reload_model`."""
        return lambda rows: reload_model(self.file, rows, name, by)

    def removing(self, name: str, by: str) -> Decide:
        """What removes a model; see `remove_model`."""
        return lambda rows: remove_model(self.file, rows, name, by)

    def close(self) -> None:
        """Let no more work begin."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, work: Callable[[], _Answer], wait_s: float) -> _Answer:
        try:
            async with asyncio.timeout(wait_s):
                return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except TimeoutError:
            raise StoreUnavailable("the registry of models gave no answer in time") from None
