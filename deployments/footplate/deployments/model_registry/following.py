"""Keeps one gateway's models what the registry says, from a moment after each change."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Protocol, runtime_checkable

from footplate.deployments.model_registry.rows import PostgresModelRegistry
from footplate.deployments.specs import ModelTarget
from footplate.platform.model_registry import SeenModel, WantedModel, served_models
from footplate.platform.settings import ModelSettings
from footplate.tenancy.errors import StoreUnavailable

_LOGGER = logging.getLogger(__name__)
# Changes are told at once and looked for each half second, by tenancy's follower; this finds what else moves.
POLL_S = 2.0
ANSWER_S = 5.0


@runtime_checkable
class ServesModels(Protocol):
    """The client to the engines, as this needs it."""

    def serve(self, targets: Iterable[ModelTarget]) -> None: ...


class ModelFollower:
    """Belongs to one event loop. While the registry can't be asked, models stay as they are.

    `preload` is called for each model that comes, while its replicas start.
    """

    def __init__(
        self,
        registry: PostgresModelRegistry,
        file: Sequence[ModelSettings],
        client: ServesModels,
        *,
        preload: Callable[[ModelSettings], Awaitable[None]] | None = None,
        poll_s: float = POLL_S,
    ) -> None:
        self._registry = registry
        self._file = tuple(file)
        self._client = client
        self._preload = preload
        self._poll_s = poll_s
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="models")
        self._is_due = asyncio.Event()
        self._targets: dict[str, ModelTarget] = {}
        self._following: asyncio.Task[None] | None = None
        self._preloading: set[asyncio.Future[None]] = set()

    def start(self) -> None:
        """Begin to follow."""
        self._following = asyncio.create_task(self._follow())

    async def close(self) -> None:
        """Stop it."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
        self._threads.shutdown(wait=False, cancel_futures=True)

    def changed(self) -> None:
        """Somebody has changed the registry: look at once."""
        self._is_due.set()

    async def catch_up(self) -> None:
        """Look now, for whoever has just changed the registry. Never raises: the next look comes anyway."""
        with suppress(StoreUnavailable, TimeoutError):
            await self.look()

    async def look(self) -> None:
        """Ask the registry once. Raises StoreUnavailable, TimeoutError."""
        async with asyncio.timeout(ANSWER_S):
            rows, seen = await asyncio.get_running_loop().run_in_executor(self._threads, self._read)
        served = served_models(self._file, rows)
        targets = {}
        for name, model in served.items():
            generations = [model.generation]
            found = seen.get(name)
            # A gateway that comes while the newest one can't start must find the one that serves.
            if found is not None and found.serving is not None and found.serving != model.generation:
                generations.append(found.serving)
            targets[name] = ModelTarget(name, model.settings.aliases, tuple(generations))
        if targets == self._targets:
            return
        for name in targets.keys() - self._targets.keys():
            if self._preload is not None:
                task = asyncio.ensure_future(self._preload(served[name].settings))
                self._preloading.add(task)
                task.add_done_callback(self._preloading.discard)
        self._targets = targets
        self._client.serve(targets.values())

    def _read(self) -> tuple[Sequence[WantedModel], Mapping[str, SeenModel]]:
        return self._registry.rows(), self._registry.seen()

    async def _follow(self) -> None:
        is_lost = False
        while True:
            self._is_due.clear()
            try:
                await self.look()
                is_lost = False
            except (StoreUnavailable, TimeoutError):
                if not is_lost:
                    _LOGGER.warning("models stay as they are: the database gives no answer")
                is_lost = True
            except Exception:
                _LOGGER.exception("following the models failed")
            with suppress(TimeoutError):
                async with asyncio.timeout(self._poll_s):
                    await self._is_due.wait()
