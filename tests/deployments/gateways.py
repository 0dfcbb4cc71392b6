"""Gateway processes as tests see them: started, asked, killed, stopped and woken."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from tests.builders import SCRAPE_KEY, TENANT_KEY

MODEL = "smollm2-135m"
NUM_PROMPT = 10


@dataclass
class GatewayProcess:
    """A running gateway."""

    process: subprocess.Popen[str]
    url: str

    def http(self, key: str = TENANT_KEY, timeout_s: float = 30) -> httpx.Client:
        headers = {"authorization": f"Bearer {key}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=timeout_s, trust_env=False)

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

    def mode(self) -> str:
        """What `/readyz` says of the limits."""
        with self.http() as http:
            return str(http.get("/readyz").json()["dependencies"]["limits"]["mode"])

    def send(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """Let it stop by itself, or kill it."""
        if self.process.poll() is None:
            self.send(signal.SIGCONT)
            assert self.process.stdin is not None
            self.process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
        self.kill()


def body(max_tokens: int, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": [5] * NUM_PROMPT, "max_tokens": max_tokens, **fields}


def launch(count: int, redis_url: str, quota: dict[str, Any], **options: Any) -> list[GatewayProcess]:
    """Start some at once and wait until all answer."""
    arguments = json.dumps({"redis_url": redis_url, "quota": quota, **options})
    command = [sys.executable, "-m", "tests.deployments.gateway_process", arguments]
    children = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(count)
    ]
    found = []
    for child in children:
        assert child.stdout is not None
        found.append(GatewayProcess(child, child.stdout.readline().strip()))
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
