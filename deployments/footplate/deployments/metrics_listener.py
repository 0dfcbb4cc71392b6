"""An engine replica's own `/metrics`, for endpoint pickers: one path, for scrape and admin keys.

A replica knows no keys. It asks a gateway, over the channel that both have proved themselves on.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import uvicorn

from footplate.platform.metrics import CONTENT_TYPE

logger = logging.getLogger(__name__)
_MAX_KEY_CHARACTERS = 512
_MAX_CONNECTIONS = 32
_MAX_REMEMBERED = 64
# A key that is revoked is refused within two seconds.
REMEMBERED_S = 1.0
MayScrape = Callable[[str], Awaitable[bool]]


class _Server(uvicorn.Server):
    """Leaves the process's signals to whoever runs it."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class MetricsListener:
    """Belongs to one event loop. `start`, then `close`."""

    def __init__(
        self,
        exposition: Callable[[], bytes],
        may_scrape: MayScrape,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._exposition = exposition
        self._may_scrape = may_scrape
        self._remembered: dict[bytes, tuple[float, bool]] = {}
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen; port 0 takes a free one. Gives the port, or 0 where that can't be had, and says so."""
        try:
            listener = socket.create_server((host, port), backlog=_MAX_CONNECTIONS)
        except OSError as error:
            logger.error("a replica's /metrics can't listen at port %d: %s", port, type(error).__name__)
            return 0
        config = uvicorn.Config(
            self._answer,
            interface="asgi3",
            proxy_headers=False,
            log_config=None,
            access_log=False,
            lifespan="off",
            http="h11",
            ws="none",
            limit_concurrency=_MAX_CONNECTIONS,
            timeout_keep_alive=75,
            h11_max_incomplete_event_size=16_384,
            server_header=False,
        )
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve([listener]), name="engine-metrics")
        return int(listener.getsockname()[1])

    async def close(self) -> None:
        """Stop listening."""
        if self._server is not None and self._serving is not None:
            self._server.should_exit = self._server.force_exit = True
            await asyncio.gather(self._serving, return_exceptions=True)

    async def _answer(self, scope: MutableMapping[str, Any], _: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        status, body = await self._status_of(scope)
        kind = CONTENT_TYPE if status == 200 else "text/plain; charset=utf-8"
        headers = [(b"content-type", kind.encode()), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})

    async def _status_of(self, scope: MutableMapping[str, Any]) -> tuple[int, bytes]:
        if scope["path"] != "/metrics":
            return 404, b"There is no such URL here.\n"
        if scope["method"] not in ("GET", "HEAD"):
            return 405, b"This URL does not answer this method.\n"
        key = _key(scope["headers"])
        if key is None or not await self._is_allowed(key):
            return 401, b"Send a scrape or admin key: 'Authorization: Bearer KEY'.\n"
        return 200, self._exposition()

    async def _is_allowed(self, key: str) -> bool:
        digest, now = hashlib.sha256(key.encode()).digest(), self._clock()
        until, is_allowed = self._remembered.get(digest, (0.0, False))
        if now >= until:
            is_allowed = await self._may_scrape(key)
            if len(self._remembered) >= _MAX_REMEMBERED:
                self._remembered.clear()
            self._remembered[digest] = (now + REMEMBERED_S, is_allowed)
        return is_allowed


def _key(headers: list[tuple[bytes, bytes]]) -> str | None:
    for name, value in headers:
        scheme, _, key = value.decode("latin-1").partition(" ")
        if name == b"authorization" and scheme.lower() == "bearer":
            key = key.strip()
            return key if 0 < len(key) <= _MAX_KEY_CHARACTERS and key.isascii() else None
    return None
