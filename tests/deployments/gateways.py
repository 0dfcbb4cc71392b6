"""Gateway processes as tests see them: started, asked, killed, stopped and woken."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import httpx

from tests.builders import SCRAPE_KEY, TENANT_KEY
from tests.deployments.gateway_process import run

MODEL = "smollm2-135m"
NUM_PROMPT = 10
# Three seconds of imports for each gateway would be most of these tests' time: all are forks of one process.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.deployments.gateway_warm"])


@dataclass
class GatewayProcess:
    """A running gateway; it stops when its `owner` connection is closed."""

    process: BaseProcess
    owner: Connection
    url: str

    def http(self, key: str = TENANT_KEY, timeout_s: float = 30) -> httpx.Client:
        headers = {"authorization": f"Bearer {key}"}
        # No certificates to load: that would cost more than most requests.
        return httpx.Client(
            base_url=self.url, headers=headers, timeout=timeout_s, trust_env=False, verify=False
        )

    def ask(self, max_tokens: int = 4) -> httpx.Response:
        """A whole answer."""
        with self.http() as http:
            return http.post("/v1/completions", json=body(max_tokens))

    @contextlib.contextmanager
    def stream(self, max_tokens: int) -> Iterator[Iterator[str]]:
        """The lines of a stream that has begun."""
        with (
            self.http() as http,
            http.stream("POST", "/v1/completions", json=body(max_tokens, stream=True)) as answer,
        ):
            assert answer.status_code == 200, answer.read()
            yield (line for line in answer.iter_lines() if line)

    def metric(self, name: str) -> float:
        with self.http(SCRAPE_KEY) as http:
            text = http.get("/metrics").text
        return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))

    def mode(self, dependency: str = "limits") -> str:
        """What `/readyz` says of the limits, or of another dependency."""
        with self.http() as http:
            return str(http.get("/readyz").json()["dependencies"][dependency]["mode"])

    def send(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.join()

    def end(self) -> None:
        """Let it stop by itself, or kill it."""
        if self.process.is_alive():
            self.send(signal.SIGCONT)
            self.owner.close()
            self.process.join(10)
        self.kill()


def body(max_tokens: int, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": [5] * NUM_PROMPT, "max_tokens": max_tokens, **fields}


def launch(count: int, redis_url: str, quota: dict[str, Any], **options: Any) -> list[GatewayProcess]:
    """Start some at once and wait until all answer."""
    found = []
    for _ in range(count):
        owner, theirs = FORKS.Pipe()
        process = FORKS.Process(
            target=run, args=({"redis_url": redis_url, "quota": quota, **options}, theirs), daemon=True
        )
        process.start()
        # With the gateway alone at the other end, its death reads as an end here.
        theirs.close()
        found.append(GatewayProcess(process, owner, url=""))
    for gateway in found:
        with contextlib.suppress(EOFError):
            gateway.url = gateway.owner.recv()
    return found


@contextlib.contextmanager
def running_gateways(
    count: int, redis_url: str, quota: dict[str, Any], **options: Any
) -> Iterator[list[GatewayProcess]]:
    """Gateways that share one Valkey; the list may be changed, and all in it are ended afterwards."""
    gateways = launch(count, redis_url, quota, **options)
    try:
        assert all(gateway.url for gateway in gateways), "a gateway did not start"
        yield gateways
    finally:
        for gateway in gateways:
            gateway.end()
