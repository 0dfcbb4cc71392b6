"""The gateway's way to the engines: requests over Serve handles, tokens over the channel."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from footplate.deployments.channel.hub import TokenHub, TokenStream
from footplate.deployments.refusal import Refusal
from footplate.engine.errors import EngineDead, EngineError, EngineOverloaded
from footplate.engine.types import EngineRequest, EngineStats, ModelCard, SequenceDelta

logger = logging.getLogger(__name__)

# Tokens and the handle's answer travel by different sockets; the tokens may come a moment later.
LAST_TOKENS_S = 5.0


class PendingCall(Protocol):
    """One call through a handle: awaitable, and `cancel` reaches the replica."""

    def __await__(self) -> Any: ...

    def cancel(self) -> None: ...


class EngineHandle(Protocol):
    """What this client needs from one model's Serve application."""

    def submit(self, address: str, stream_id: int, request: EngineRequest) -> PendingCall:
        """Call `EngineReplica.submit` on a replica of Serve's choice."""
        ...

    async def attach(self, address: str) -> list[ModelCard]:
        """Call `EngineReplica.attach` on every replica; cards of those that answer."""
        ...

    def translate(self, error: BaseException) -> EngineError:
        """What an error of a call means to the one who asked."""
        ...


class ChannelGeneration:
    """One running request; see `ports.Generation`."""

    def __init__(self, stream: TokenStream, call: PendingCall, watch: asyncio.Task[None]) -> None:
        self._stream = stream
        self._call = call
        self._watch = watch

    @property
    def engine(self) -> str:
        """The accepting replica's index; its link is kept here even when it is lost."""
        return self._stream.link.label[1] if self._stream.link is not None else ""

    async def next(self) -> Sequence[SequenceDelta]:
        """Everything that came since the last call; empty at the end."""
        return await self._stream.next()

    def stop(self, index: int, num_used: int) -> None:
        """End one choice at the engine."""
        self._stream.stop(index, num_used)

    async def cancel(self) -> Sequence[SequenceDelta] | None:
        """Abort what still runs, and wait for the last tokens that were made of it."""
        return await self._stream.cancel()

    async def close(self) -> None:
        """Abort what still runs: the channel tells the engine, and the handle's cancel is the second way."""
        self._stream.close()
        self._call.cancel()


class ServeInferenceClient:
    """Keeps one handle per model, and the cards their replicas publish; see `ports.InferenceClient`."""

    def __init__(
        self,
        hub: TokenHub,
        models: Iterable[str],
        find_handle: Callable[[str], EngineHandle],
        *,
        accept_s: float = 30.0,
        refresh_s: float = 2.0,
    ) -> None:
        self._hub = hub
        self._models = tuple(models)
        self._find_handle = find_handle
        self._accept_s = accept_s
        self._refresh_s = refresh_s
        self._handles: dict[str, EngineHandle] = {}
        self._cards: dict[str, ModelCard] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Begin to fetch the models' cards and to attach their replicas' statistics."""
        for model in self._models:
            self._spawn(self._keep_attached(model))

    async def close(self) -> None:
        """Stop all background work."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def models(self) -> Mapping[str, ModelCard]:
        """The cards of the models whose replicas have answered, by name."""
        return self._cards

    def stats(self) -> Mapping[tuple[str, str], EngineStats]:
        """The last statistics of each replica, by (model, engine index)."""
        return self._hub.stats()

    async def submit(self, model: str, request: EngineRequest) -> ChannelGeneration:
        """Hand a request to a replica; returns once an engine has accepted it.

        Raises:
            EngineError: the engine's refusal, `EngineDead`, or `EngineOverloaded` when none took it in time.
        """
        handle = self._handle(model)
        stream = self._hub.open(request.request_id, request.params.n)
        call = handle.submit(self._hub.address, stream.stream_id, request)
        watch = self._spawn(self._watch(handle, call, stream))
        generation = ChannelGeneration(stream, call, watch)
        try:
            async with asyncio.timeout(self._accept_s):
                await asyncio.shield(stream.accepted)
            if stream.failure is not None and stream.link is None:
                raise stream.failure
        except TimeoutError:
            await generation.close()
            raise EngineOverloaded(
                f"no replica of {model} took the request in {self._accept_s:.0f} s"
            ) from None
        except BaseException:
            await generation.close()
            raise
        return generation

    def _handle(self, model: str) -> EngineHandle:
        handle = self._handles.get(model)
        if handle is None:
            if model not in self._models:
                raise EngineDead(f"no model named {model} is served here")
            handle = self._handles[model] = self._find_handle(model)
        return handle

    async def _watch(self, handle: EngineHandle, call: PendingCall, stream: TokenStream) -> None:
        """See the call through: a refusal or a lost replica ends the stream."""
        try:
            refusal = await call
        except asyncio.CancelledError:
            # Ours when the stream was closed; otherwise the replica is going away.
            stream.fail(EngineDead("the replica cancelled the request"))
            return
        except Exception as error:
            stream.fail(handle.translate(error))
            return
        if isinstance(refusal, Refusal):
            stream.fail(refusal.to_error())
        elif not stream.is_finished:
            await asyncio.sleep(LAST_TOKENS_S)
            stream.fail(EngineDead("the request ended at the replica, but its last tokens never came"))

    async def _keep_attached(self, model: str) -> None:
        """Ask all replicas again and again: new ones must connect, and a new version brings a new card."""
        while True:
            try:
                cards = await self._handle(model).attach(self._hub.address)
                for card in cards:
                    self._cards[model] = card
                delay_s = self._refresh_s if cards else 0.1
            except asyncio.CancelledError:
                raise
            except Exception as error:
                # No replica yet, or it died: the next round tries again. Requests learn of it by themselves.
                logger.info("replicas of %s can't be attached yet: %s", model, type(error).__name__)
                delay_s = 0.25
            await asyncio.sleep(delay_s)

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
