"""A client process of `bench_gpu_serving.py`: many OpenAI completion streams over raw sockets.

Needs the standard library only. Reads JSON lines from standard input, answers each with one. First {"host",
"port", "key", "model"}; then loads: {"jobs": [[prompt ids, output tokens], ...], "streams": how many at
once}. Times are of the machine's monotonic clock, which all its processes share.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import deque
from typing import Any

HEAD_END = b"\r\n\r\n"


class StreamError(Exception):
    """The server's answer is no whole stream."""


class Connection:
    """One keep-alive connection, used for one stream after the other."""

    def __init__(self, server: dict[str, Any]) -> None:
        self._server = server
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def complete(self, prompt: list[int], length: int) -> dict[str, Any]:
        """Run one completion: when its first and last token came, how many came, and the longest gap."""
        body = json.dumps(
            {
                "model": self._server["model"],
                "prompt": prompt,
                "max_tokens": length,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "return_token_ids": True,
            }
        ).encode()
        await self._send(body)
        sent = time.monotonic()
        first = last = sent
        count, longest = 0, 0.0
        async for event in self._events():
            if "error" in event:
                raise StreamError(str(event["error"])[:300])
            new = sum(len(choice.get("token_ids") or ()) for choice in event["choices"])
            if not new:
                continue
            now = time.monotonic()
            if count == 0:
                first = now
            else:
                longest = max(longest, now - last)
            count, last = count + new, now
        if count != length:
            raise StreamError(f"{count} tokens came of {length}")
        return {"sent": sent, "first": first, "last": last, "tokens": count, "gap": longest}

    async def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    async def _send(self, body: bytes) -> None:
        if self._writer is None or self._writer.is_closing():
            host, port = self._server["host"], self._server["port"]
            self._reader, self._writer = await asyncio.open_connection(host, port, limit=1 << 22)
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {self._server['host']}\r\n"
            f"Authorization: Bearer {self._server['key']}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        self._writer.write(head.encode() + body)
        await self._writer.drain()

    async def _events(self) -> Any:
        reader = self._reader
        assert reader is not None and self._writer is not None
        head = (await reader.readuntil(HEAD_END)).decode("latin-1").lower()
        status = head.split(" ", 2)[1]
        if status != "200" or "transfer-encoding: chunked" not in head:
            text = await asyncio.wait_for(reader.read(2000), 5)
            self._writer.close()
            raise StreamError(f"status {status}: {text.decode(errors='replace')[:300]}")
        waiting, is_whole = b"", False
        while size := int(await reader.readline(), 16):
            waiting += (await reader.readexactly(size + 2))[:-2]
            *lines, waiting = waiting.split(b"\n\n")
            for line in lines:
                if line == b"data: [DONE]":
                    is_whole = True
                elif line.startswith(b"data: "):
                    yield json.loads(line[6:])
        await reader.readline()
        if "connection: close" in head:
            self._writer.close()
        if not is_whole:
            raise StreamError("the stream ended without [DONE]")


async def run(server: dict[str, Any], load: dict[str, Any]) -> list[dict[str, Any]]:
    """Keep `streams` completions running until no job is left."""
    jobs = deque(load["jobs"])
    found: list[dict[str, Any]] = []

    async def one_after_another() -> None:
        connection = Connection(server)
        try:
            while jobs:
                prompt, length = jobs.popleft()
                found.append(await connection.complete(prompt, length))
        finally:
            await connection.close()

    await asyncio.gather(*(one_after_another() for _ in range(min(load["streams"], len(jobs)))))
    return found


def main() -> None:
    server = json.loads(sys.stdin.readline())
    print("{}", flush=True)
    for line in sys.stdin:
        try:
            answer: Any = {"streams": asyncio.run(run(server, json.loads(line)))}
        except (StreamError, OSError, ValueError, KeyError, asyncio.IncompleteReadError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
