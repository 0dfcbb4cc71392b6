"""The bus of changes on Valkey's pub/sub."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Sequence

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from footplate.tenancy.admin.audit import TargetKind
from footplate.tenancy.changes import Change, Pulse

CHANNEL = "footplate:changes"
TIMEOUT_S = 0.5
# A listener that has heard nothing for so long asks whether the server is there, and how long it waits.
SILENCE_S = 0.5
ANSWER_S = 5.0
_LOGGER = logging.getLogger(__name__)


class ValkeyChangeBus:
    """See `ChangeBus`. One event loop owns it."""

    def __init__(self, url: str, *, channel: str = CHANNEL) -> None:
        self._channel = channel
        self._client = Redis.from_url(
            url,
            socket_timeout=TIMEOUT_S,
            socket_connect_timeout=TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
        )
        self._is_lost = False

    async def close(self) -> None:
        """Drop all connections."""
        await self._client.aclose()

    async def publish(self, changes: Sequence[Change]) -> None:
        """As `ChangeBus.publish`: one message for them all."""
        message = json.dumps([[change.kind.value, change.id] for change in changes])
        try:
            await self._client.publish(self._channel, message)
        except (RedisError, OSError, TimeoutError) as error:
            # Gateways ask the database within the half second.
            _LOGGER.warning("a change was not told over Valkey: %s", error)

    async def listen(self) -> AsyncIterator[Change | Pulse | None]:
        """As `ChangeBus.listen`."""
        subscription = self._client.pubsub()
        num_silent: int | None = None  # since the server was asked
        try:
            await subscription.subscribe(self._channel)
            while True:
                message = await subscription.get_message(timeout=SILENCE_S)
                if message is None and num_silent is None:
                    num_silent = 0
                    yield Pulse.SENT
                    await subscription.ping()
                elif message is None:
                    num_silent = (num_silent or 0) + 1
                    if num_silent * SILENCE_S >= ANSWER_S:
                        raise TimeoutError
                elif message["type"] == "pong":
                    num_silent = None
                    yield Pulse.HEARD
                elif message["type"] == "subscribe":
                    self._note_lost(False)
                    yield None
                elif message["type"] == "message":
                    for change in _changes(message["data"]):
                        yield change
        except (RedisError, OSError, TimeoutError):
            self._note_lost(True)
        finally:
            await subscription.aclose()  # type: ignore[no-untyped-call]

    def _note_lost(self, is_lost: bool) -> None:
        if is_lost != self._is_lost:
            self._is_lost = is_lost
            if is_lost:
                _LOGGER.warning("changes are not heard over Valkey; the database is asked for them")
            else:
                _LOGGER.info("changes are heard over Valkey again")


def _changes(data: bytes) -> list[Change]:
    """What a message says; one that nobody of ours wrote says nothing."""
    try:
        return [Change(TargetKind(kind), str(name)) for kind, name in json.loads(data)]
    except (ValueError, TypeError):
        return []
