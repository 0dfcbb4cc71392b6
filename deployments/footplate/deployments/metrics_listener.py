"""An engine replica's own `/metrics`, for endpoint pickers: one path, for scrape and admin keys.

A replica knows no keys. It asks a gateway, over the channel that both have proved themselves on.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, MutableMapping, Sequence
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
RETRY_S = 2.0
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
        retry_s: float = RETRY_S,
    ) -> None:
        # Where it listens; 0: nowhere yet.
        self.port = 0
        self._clock = clock
        self._retry_s = retry_s
        self._exposition = exposition
        self._may_scrape = may_scrape
        self._remembered: dict[bytes, tuple[float, bool]] = {}
        self._serving: dict[asyncio.Task[None], _Server] = {}
        self._seeking: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int, others: Sequence[int] = ()) -> int:
        """Listen at `port` (0: a free one), or at the first of `others` that is free. Gives the port, or 0.

        One that finds its port taken, as by the generation before it, tries again until it has it.
        """
        wanted = (port, *others)
        why = self._listen(host, wanted)
        if why is not None:
            logger.warning(
                "a replica's /metrics can't have port %d (%s); it has %d (0: none) and tries again",
                port,
                why,
                self.port,
            )
            self._seeking = asyncio.create_task(self._seek(host, wanted), name="engine-metrics-port")
        return self.port

    async def close(self) -> None:
        """Stop listening."""
        if self._seeking is not None:
            self._seeking.cancel()
            await asyncio.gather(self._seeking, return_exceptions=True)
        for server in self._serving.values():
            server.should_exit = server.force_exit = True
        await asyncio.gather(*self._serving, return_exceptions=True)
        self.port = 0

    async def _seek(self, host: str, wanted: Sequence[int]) -> None:
        while self._listen(host, wanted) is not None:
            await asyncio.sleep(self._retry_s)

    def _listen(self, host: str, wanted: Sequence[int]) -> str | None:
        """Take the first port that is free, unless it has a better one; why it isn't the very first."""
        why: str | None = None
        for port in wanted:
            if port and port == self.port:
                break
            try:
                listener = socket.create_server((host, port), backlog=_MAX_CONNECTIONS)
            except OSError as error:
                why = why or type(error).__name__
                continue
            for server in self._serving.values():
                server.should_exit = True  # it answers whom it has begun to answer
            self._serve(listener)
            self.port = int(listener.getsockname()[1])
            break
        return why

    def _serve(self, listener: socket.socket) -> None:
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
        server = _Server(config)
        serving = asyncio.create_task(server.serve([listener]), name="engine-metrics")
        self._serving[serving] = server
        serving.add_done_callback(lambda done: self._serving.pop(done, None))

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
