"""Calls of one server-side function: loaded where it is missing, and sent together when many come at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from redis.asyncio.cluster import RedisCluster
from redis.exceptions import ResponseError

# A call for one connection costs the client library 100 µs and more; in a batch a quarter of that.
MAX_IN_FLIGHT = 2
MAX_BATCH = 64

_Call = tuple[str, bytes, "asyncio.Future[bytes]"]


class FunctionCalls:
    """Calls `name` with one key and one argument. Belongs to one event loop; the client's owner closes it.

    While fewer than `MAX_IN_FLIGHT` are on their way a call goes at once and alone. Those that come meanwhile
    wait for the first answer, and then go in one batch: each is still one round trip.
    """

    def __init__(self, client: Any, name: str, library: str) -> None:
        self._client = client
        self._name = name
        self._library = library
        self._num_in_flight = 0
        self._waiting: list[_Call] = []
        self._senders: set[asyncio.Task[None]] = set()

    async def call(self, key: str, argument: bytes) -> bytes:
        """The function's answer. Waits without bound: the caller sets the time.

        Raises:
            RedisError, OSError: as the client says; the call may have been carried out.
        """
        if isinstance(self._client, RedisCluster):
            return await self._call_on_cluster(self._client, key, argument)
        if self._num_in_flight < MAX_IN_FLIGHT and not self._waiting:
            self._num_in_flight += 1
            try:
                return await self._call_alone(key, argument)
            finally:
                self._end_flight()
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting.append((key, argument, answer))
        return await answer

    def _end_flight(self) -> None:
        self._num_in_flight -= 1
        # Those whose callers have given up are not sent any more.
        self._waiting = [call for call in self._waiting if not call[2].done()]
        if self._waiting:
            batch, self._waiting = self._waiting[:MAX_BATCH], self._waiting[MAX_BATCH:]
            self._num_in_flight += 1
            sender = asyncio.create_task(self._send(batch))
            self._senders.add(sender)
            sender.add_done_callback(self._senders.discard)

    async def _send(self, batch: Sequence[_Call]) -> None:
        try:
            results = await self._results(batch)
            for (_, _, answer), result in zip(batch, results, strict=True):
                if answer.done():
                    continue
                if isinstance(result, BaseException):
                    answer.set_exception(result)
                else:
                    answer.set_result(result)
        except Exception as error:
            for _, _, answer in batch:
                if not answer.done():
                    answer.set_exception(error)
        finally:
            self._end_flight()

    async def _results(self, batch: Sequence[_Call]) -> list[Any]:
        results = await self._pipe(batch)
        missing = [index for index, result in enumerate(results) if _is_missing(result)]
        if missing:
            await self._load()
            again = await self._pipe([batch[index] for index in missing])
            for index, result in zip(missing, again, strict=True):
                results[index] = result
        return results

    async def _pipe(self, batch: Sequence[_Call]) -> list[Any]:
        pipeline = self._client.pipeline(transaction=False)
        for key, argument, _ in batch:
            pipeline.execute_command("FCALL", self._name, 1, key, argument)
        results: list[Any] = await pipeline.execute(raise_on_error=False)
        return results

    async def _call_alone(self, key: str, argument: bytes, **where: Any) -> bytes:
        try:
            answer = await self._client.execute_command("FCALL", self._name, 1, key, argument, **where)
        except ResponseError as error:
            if not _is_missing(error):
                raise
            await self._load()
            answer = await self._client.execute_command("FCALL", self._name, 1, key, argument, **where)
        assert isinstance(answer, bytes)
        return answer

    async def _call_on_cluster(self, client: RedisCluster, key: str, argument: bytes) -> bytes:
        # Without the node, the client would first ask the server where this command's keys stand.
        await client.initialize()
        return await self._call_alone(key, argument, target_nodes=client.get_node_from_key(key))

    async def _load(self) -> None:
        """A new server, or one that has lost its data; it keeps the function from here on."""
        await self._client.execute_command("FUNCTION LOAD", "REPLACE", self._library)


def _is_missing(result: Any) -> bool:
    return isinstance(result, ResponseError) and "Function not found" in str(result)
