"""HTTP/1.1 for measuring: times are taken where bytes arrive, before anything is parsed."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import h11

from footplate.deployments.serve_bench.events import StreamReader

MAX_KEPT_BYTES = 1 << 16


@dataclass(slots=True)
class Answer:
    """One response: `stream` where it is one, else the first bytes of its body."""

    status: int = 0
    stream: StreamReader | None = None
    body: bytes = b""
    fault: str | None = None
    ended_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Target:
    """A server, and what is sent to it with every request."""

    host: str
    port: int
    base_path: str
    is_tls: bool
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, url: str, headers: Mapping[str, str]) -> Target:
        """From http(s)://host[:port][/path].

        Raises:
            ValueError: it is no such URL.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("not a URL that begins with http:// or https://")
        port = parts.port or (443 if parts.scheme == "https" else 80)
        return cls(parts.hostname, port, parts.path.rstrip("/"), parts.scheme == "https", headers)


class _Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._http = h11.Connection(h11.CLIENT)
        self._answer: Answer | None = None
        self._over: asyncio.Future[None] | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    async def ask(self, head: h11.Request, body: bytes, answer: Answer) -> None:
        """Send, and wait for the whole answer."""
        assert self._transport is not None
        self._answer, self._over = answer, asyncio.get_running_loop().create_future()
        pieces = (head, h11.Data(data=body), h11.EndOfMessage())
        self._transport.write(b"".join(self._http.send(piece) or b"" for piece in pieces))
        await self._over

    @property
    def can_go_on(self) -> bool:
        """Whether another request may follow on this connection; after a call, one may."""
        if self._transport is None or self._transport.is_closing():
            return False
        if self._http.our_state is h11.DONE and self._http.their_state is h11.DONE:
            self._http.start_next_cycle()
        return self._http.our_state is h11.IDLE

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._take(data, self._clock())

    def connection_lost(self, error: Exception | None) -> None:
        if self._over is not None and not self._over.done():
            # An answer without a length ends so.
            self._take(b"", self._clock())
            self._finish("cut")

    def _take(self, data: bytes, at_s: float) -> None:
        try:
            self._http.receive_data(data)
            while True:
                event = self._http.next_event()
                if event is h11.NEED_DATA or event is h11.PAUSED or isinstance(event, h11.ConnectionClosed):
                    return
                self._one(event, at_s)
        except h11.RemoteProtocolError:
            self._finish("cut" if not data else "bad_http", at_s)
            self.close()

    def _one(self, event: object, at_s: float) -> None:
        answer = self._answer
        if answer is None:
            return
        if isinstance(event, h11.Response):
            answer.status = event.status_code
            kind = next((value for name, value in event.headers if name == b"content-type"), b"")
            if event.status_code == 200 and kind.startswith(b"text/event-stream"):
                answer.stream = StreamReader()
        elif isinstance(event, h11.Data):
            if answer.stream is not None:
                answer.stream.feed(bytes(event.data), at_s)
            elif len(answer.body) < MAX_KEPT_BYTES:
                answer.body += bytes(event.data)
        elif isinstance(event, h11.EndOfMessage):
            self._finish(None, at_s)

    def _finish(self, fault: str | None, at_s: float | None = None) -> None:
        if self._answer is None or self._over is None or self._over.done():
            return
        self._answer.fault = fault
        self._answer.ended_s = self._clock() if at_s is None else at_s
        self._over.set_result(None)


class StreamClient:
    """Keeps connections that can go on; opens another where none is idle."""

    def __init__(self, target: Target, clock: Callable[[], float] = time.perf_counter) -> None:
        self._target = target
        self._clock = clock
        self._idle: list[_Connection] = []
        self._tls = ssl.create_default_context() if target.is_tls else None
        named_port = "" if target.port == (443 if target.is_tls else 80) else f":{target.port}"
        host = f"[{target.host}]" if ":" in target.host else target.host
        self._headers = [("host", host + named_port), *target.headers.items()]

    async def ask(self, method: str, path: str, body: bytes = b"") -> Answer:
        """The whole answer; the stream's times are in it. A cancelled call closes its connection.

        Raises:
            OSError: no connection can be made.
        """
        headers = [
            *self._headers,
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
        ]
        head = h11.Request(method=method, target=self._target.base_path + path, headers=headers)
        while True:
            connection, is_used = await self._connection()
            answer = Answer()
            try:
                await connection.ask(head, body, answer)
            except asyncio.CancelledError:
                connection.close()
                raise
            if connection.can_go_on:
                self._idle.append(connection)
            else:
                connection.close()
            # A server may close an idle connection just as it is used again: no failure of the request.
            if not (is_used and answer.fault is not None and answer.status == 0):
                return answer

    async def _connection(self) -> tuple[_Connection, bool]:
        """A connection, and whether it was used before."""
        while self._idle:
            connection = self._idle.pop()
            if connection.can_go_on:
                return connection, True
            connection.close()
        loop = asyncio.get_running_loop()
        _, made = await loop.create_connection(
            lambda: _Connection(self._clock), self._target.host, self._target.port, ssl=self._tls
        )
        return made, False

    def close(self) -> None:
        """Close what is idle."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()
