"""Calls of one server-side function: loaded where it is missing, and sent together when many come at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from redis.asyncio.cluster import RedisCluster
from redis.exceptions import ConnectionError as LostConnection
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as SlowStore

from footplate.tenancy.errors import LimiterCallFailed, LimiterUnavailable

# Lines are the client's own connections, kept: fetching one for each command costs more than the command.
MAX_LINES = 2
MAX_BATCH = 64

# A timer that fires this much after its time tells of an event loop that stood still.
LATE_S = 0.02
# How our function, or the server itself, says that a value is not what it should be.
_DAMAGE = ("DAMAGED", "WRONGTYPE")

_Answer = TypeVar("_Answer")
_Waiting = tuple[bytes, "asyncio.Future[Any]"]


async def answer_in_time(ask: Callable[[], Awaitable[_Answer]], timeout_s: float) -> _Answer:
    """The store's answer in time: by the store's doing, not by that of our own event loop.

    `ask` may be called twice, so it must be harmless when repeated.

    Raises:
        LimiterUnavailable: the store can't be asked.
        LimiterCallFailed: it can, but a value that this call meets is damaged.
    """
    try:
        return await _ask_twice_if_late(ask, timeout_s)
    except (RedisError, OSError, TimeoutError) as error:
        if isinstance(error, ResponseError) and str(error).startswith(_DAMAGE):
            raise LimiterCallFailed("a value in the store of the limits is damaged") from None
        raise LimiterUnavailable(f"the store of the limits can't be asked: {type(error).__name__}") from error


async def _ask_twice_if_late(ask: Callable[[], Awaitable[_Answer]], timeout_s: float) -> _Answer:
    now_s = asyncio.get_running_loop().time
    asked_s = now_s()
    try:
        async with asyncio.timeout(timeout_s):
            return await ask()
    except (TimeoutError, SlowStore):
        if now_s() - asked_s < timeout_s + LATE_S:
            raise
    # Our loop stood still past the deadline: the answer may have lain there all the while.
    async with asyncio.timeout(timeout_s):
        return await ask()


class FunctionCalls:
    """Calls `name` with one key and one argument. Belongs to one event loop; the client's owner closes it.

    Calls may be sent twice, so they must be harmless when repeated. While a line is free a call goes at once
    and alone. Those that come meanwhile wait for the first answer, and then go in one batch: each is still
    one round trip.
    """

    def __init__(self, client: Any, name: str, library: str, timeout_s: float) -> None:
        """`timeout_s`: of a batch. A call alone has no bound of its own: its caller sets one."""
        self._client = client
        self._name = name
        self._library = library
        self._timeout_s = timeout_s
        encoded = name.encode()
        self._head = b"*5\r\n$5\r\nFCALL\r\n$%d\r\n%b\r\n$1\r\n1\r\n" % (len(encoded), encoded)
        self._lines: list[Any] = []
        self._num_lines = 0
        self._waiting: list[_Waiting] = []
        self._senders: set[asyncio.Task[None]] = set()

    async def call(self, key: str, argument: bytes) -> bytes:
        """The function's answer.

        Raises:
            RedisError, OSError, TimeoutError: as the client says; the call may have been carried out.
        """
        if isinstance(self._client, RedisCluster):
            return await self._call_on_cluster(self._client, key, argument)
        encoded = key.encode()
        command = self._head + b"$%d\r\n%b\r\n$%d\r\n%b\r\n" % (
            len(encoded),
            encoded,
            len(argument),
            argument,
        )
        if self._waiting or not (self._lines or self._num_lines < MAX_LINES):
            answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            self._waiting.append((command, answer))
            found = await answer
        else:
            [found] = await self._ask_and_pass_on([command])
        if isinstance(found, BaseException):
            raise found
        assert isinstance(found, bytes)
        return found

    async def _ask_and_pass_on(self, commands: Sequence[bytes]) -> list[Any]:
        """Ask on a line, which there must be, and let those go that have waited for it."""
        line = self._lines.pop() if self._lines else None
        self._num_lines += line is None
        try:
            if line is None:
                line = await self._client.connection_pool.get_connection()
            return await self._ask(line, commands)
        finally:
            if line is None:
                self._num_lines -= 1
            else:
                self._lines.append(line)
            self._send_waiting()

    def _send_waiting(self) -> None:
        # Those whose callers have given up are not sent any more.
        waiting = [entry for entry in self._waiting if not entry[1].done()]
        batch, self._waiting = waiting[:MAX_BATCH], waiting[MAX_BATCH:]
        if batch:
            sender = asyncio.create_task(self._send(batch))
            self._senders.add(sender)
            sender.add_done_callback(self._senders.discard)

    async def _send(self, batch: Sequence[_Waiting]) -> None:
        results: Sequence[Any]
        try:
            async with asyncio.timeout(self._timeout_s):
                results = await self._ask_and_pass_on([command for command, _ in batch])
        except Exception as error:
            results = [error] * len(batch)
        for (_, answer), result in zip(batch, results, strict=True):
            if not answer.done():
                answer.set_result(result)

    async def _ask(self, line: Any, commands: Sequence[bytes]) -> list[Any]:
        """Every command's answer or error, those anew that found the function missing."""
        results = await self._exchange_twice(line, commands)
        missing = [index for index, result in enumerate(results) if _is_missing(result)]
        if missing:
            await self._load()
            again = await self._exchange(line, [commands[index] for index in missing])
            for index, result in zip(missing, again, strict=True):
                results[index] = result
        return results

    async def _exchange_twice(self, line: Any, commands: Sequence[bytes]) -> list[Any]:
        was_connected = line.is_connected
        try:
            return await self._exchange(line, commands)
        except (LostConnection, OSError):
            # The server may have been started anew since this line was last used.
            if not was_connected:
                raise
        return await self._exchange(line, commands)

    @staticmethod
    async def _exchange(line: Any, commands: Sequence[bytes]) -> list[Any]:
        await line.send_packed_command(commands)
        results: list[Any] = []
        for _ in commands:
            try:
                results.append(await line.read_response())
            except ResponseError as error:
                results.append(error)
        return results

    async def _call_on_cluster(self, client: RedisCluster, key: str, argument: bytes) -> bytes:
        await client.initialize()
        # Without the node, the client would first ask the server where this command's keys stand.
        node = client.get_node_from_key(key)
        command = ("FCALL", self._name, 1, key, argument)
        try:
            answer = await client.execute_command(*command, target_nodes=node)
        except ResponseError as error:
            if not _is_missing(error):
                raise
            await self._load()
            answer = await client.execute_command(*command, target_nodes=node)
        assert isinstance(answer, bytes)
        return answer

    async def _load(self) -> None:
        """A new server, or one that has lost its data; it keeps the function from here on."""
        await self._client.execute_command("FUNCTION LOAD", "REPLACE", self._library)


def _is_missing(result: Any) -> bool:
    return isinstance(result, ResponseError) and "Function not found" in str(result)
