"""Drives one server through levels of load, and keeps the times of each request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec

from footplate.deployments.serve_bench.figures import Client, Level, Sample
from footplate.deployments.serve_bench.http_stream import Answer, StreamClient
from footplate.deployments.serve_bench.prompts import PATHS, Form, MostTokens, Prompt
from footplate.engine.bench.workloads import arrivals

LAG_CHECK_S = 0.005


@dataclass(frozen=True, slots=True)
class Bounds:
    """How long a level goes on: until so many requests or seconds, whichever comes first."""

    max_requests: int | None
    duration_s: float | None
    timeout_s: float
    # One process can hold no more sockets; in open loop a request's clock runs while it waits for one.
    max_in_flight: int = 900


class Driver:
    """Sends requests to one server. `is_stopped`: nothing new is sent, and what runs is given up."""

    def __init__(self, client: StreamClient, form: Form, bounds: Bounds) -> None:
        self._client = client
        self._form = form
        self._bounds = bounds
        self._stopped = asyncio.Event()
        self._samples: list[Sample] = []
        self._num_unfinished = 0

    @property
    def is_stopped(self) -> bool:
        return self._stopped.is_set()

    def stop(self) -> None:
        self._stopped.set()

    async def closed(self, concurrency: int, chains: Iterator[list[Prompt]]) -> Level:
        """So many clients, each of which sends its next request when the last one ended."""
        begun = time.perf_counter()
        left = self._limited(chains)

        async def one_client() -> None:
            for chain in left:
                for prompt in chain:
                    if self._is_over(begun):
                        return
                    await self._send(prompt, time.perf_counter())

        return await self._measured(
            "concurrency", concurrency, begun, [one_client() for _ in range(concurrency)]
        )

    async def open(self, rate: float, chains: Iterator[list[Prompt]], seed: int) -> Level:
        """Requests that come by chance, so many a second on average, whatever becomes of earlier ones."""
        seconds = self._bounds.duration_s or float("inf")
        count = self._bounds.max_requests
        if seconds == float("inf"):
            assert count is not None
            # Far more than enough: that few in so long a time doesn't happen.
            seconds = (count + 10 * count**0.5 + 10) / rate
        due = [0.0, *arrivals(rate, seconds, seed=9 + seed)][:count]
        slots = asyncio.Semaphore(self._bounds.max_in_flight)
        begun = time.perf_counter()

        async def one(at_s: float, prompt: Prompt) -> None:
            async with slots:
                await self._send(prompt, at_s)

        async def all_of_them() -> None:
            async with asyncio.TaskGroup() as group:
                for offset, chain in zip(due, chains, strict=False):
                    await asyncio.sleep(max(0.0, begun + offset - time.perf_counter()))
                    group.create_task(one(begun + offset, chain[0]))

        return await self._measured("rate", rate, begun, [all_of_them()])

    async def warm_up(self, concurrency: int, chains: Iterator[list[Prompt]], count: int) -> None:
        """Requests that are measured by nobody."""
        left = islice((prompt for chain in chains for prompt in chain), count)

        async def one_client() -> None:
            for prompt in left:
                await self.ask(prompt)

        await self._until_stopped([one_client() for _ in range(min(concurrency, count))])

    async def ask(self, prompt: Prompt, output_len: int | None = None, form: Form | None = None) -> Answer:
        """One request's answer, as it came.

        Raises:
            OSError: the server can't be connected to.
            TimeoutError: it took too long.
        """
        form = form or self._form
        body = msgspec.json.encode(form.body(prompt, output_len))
        async with asyncio.timeout(self._bounds.timeout_s):
            return await self._client.ask("POST", PATHS[form.endpoint], body)

    def _limited(self, chains: Iterator[list[Prompt]]) -> Iterator[list[Prompt]]:
        """Chains until they hold as many requests as wanted; the last one is cut."""
        left = self._bounds.max_requests
        for chain in chains:
            if left is None:
                yield chain
                continue
            yield chain[:left]
            left -= len(chain)
            if left <= 0:
                return

    def _is_over(self, begun: float) -> bool:
        limit = self._bounds.duration_s
        return self.is_stopped or (limit is not None and time.perf_counter() - begun >= limit)

    async def _send(self, prompt: Prompt, due_s: float) -> None:
        sent_s = time.perf_counter()
        try:
            answer = await self.ask(prompt)
        except asyncio.CancelledError:
            self._num_unfinished += 1
            raise
        except TimeoutError:
            self._samples.append(Sample(due_s, sent_s, time.perf_counter(), error="timeout"))
        except OSError:
            self._samples.append(Sample(due_s, sent_s, time.perf_counter(), error="no_connection"))
        else:
            self._samples.append(sample_of(answer, due_s, sent_s, self._form.most_tokens(prompt)))

    async def _measured(
        self, name: str, value: float, begun: float, work: list[Coroutine[Any, Any, None]]
    ) -> Level:
        self._samples, self._num_unfinished = [], 0
        lags: list[float] = []
        watch = asyncio.create_task(_watch_lag(lags))
        cpu_s = time.process_time()
        try:
            await self._until_stopped(work)
        finally:
            watch.cancel()
        used_s = time.process_time() - cpu_s
        ends = [sample.ended_s for sample in self._samples]
        wall_s = (time.perf_counter() if self._num_unfinished or not ends else max(ends)) - begun
        return Level(name, value, self._samples, wall_s, Client(lags, used_s), self._num_unfinished)

    async def _until_stopped(self, work: list[Coroutine[Any, Any, None]]) -> None:
        """Run all; on `stop` what still runs is cancelled."""
        tasks = [asyncio.ensure_future(each) for each in work]
        stopped = asyncio.create_task(self._stopped.wait())
        try:
            # A cancelled request is no failure here; whatever else one raises is our own mistake.
            everything = asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.wait((everything, stopped), return_when=asyncio.FIRST_COMPLETED)
            if everything.done():
                for found in everything.result():
                    if found is not None:
                        raise found
        finally:
            stopped.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def sample_of(answer: Answer, due_s: float, sent_s: float, most: MostTokens | None = None) -> Sample:
    """What an answer comes to. An error is named by its kind, never by what the server said.

    `most`: what its request can have taken; counts beyond are `bad_usage`.
    """
    stream = answer.stream
    error: str | None = None
    if answer.status == 0 or (stream is None and answer.fault is not None):
        error = answer.fault or "cut"
    elif answer.status != 200:
        error = f"http_{answer.status}"
    elif stream is None:
        error = "no_stream"
    else:
        stream.end()
        error = stream.error or answer.fault
        is_bad = stream.is_usage_bad(*((most.output, most.input) if most else ()))
        error = error or ("bad_usage" if is_bad else None)
        error = error or (None if stream.arrivals else "no_output")
    return Sample(
        due_s,
        sent_s,
        answer.ended_s,
        arrivals=stream.arrivals if stream else (),
        num_input_tokens=stream.count("prompt_tokens") if stream else None,
        num_cached_tokens=stream.count("prompt_tokens_details", "cached_tokens") if stream else None,
        num_output_tokens=stream.count("completion_tokens") if stream else None,
        error=error,
    )


async def _watch_lag(lags: list[float], clock: Callable[[], float] = time.perf_counter) -> None:
    """How late this event loop is, again and again."""
    while True:
        due = clock() + LAG_CHECK_S
        await asyncio.sleep(LAG_CHECK_S)
        lags.append(max(0.0, clock() - due))
