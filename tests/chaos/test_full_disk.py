"""The disk of the data folder is full for a while, under load: who can't be written down is refused, no more.

Outcome: PostgreSQL stops; usage goes to the journal's last bytes, then waits in memory, and who comes next
gets a 503 before anything is made for it. Streams that run go on to their end. Limits hold in each gateway
alone. An upload is a 507. With room again all is as before within seconds, without anybody's doing, and the
ledger has each request once, as engines and clients have it.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError

from footplate.deployments.embedded import EmbeddedPostgres
from footplate.deployments.leftovers import wait_until
from footplate.deployments.run_paths import RunPaths
from tests.chaos.fault_results import keep_result
from tests.chaos.ledger_audit import Load, audit, open_folder, running_platform
from tests.chaos.ledger_stack import MODEL
from tests.chaos.test_random_kills import SEED, answers, postgres
from tests.e2e.serve_process import ServeProcess
from tests.postgres_server import connected

DISK_MB = 320
FULL_S = 8.0
BACK_S = 30.0
ANSWER_S = 10.0  # a refusal comes within this, whatever is away


@pytest.fixture
def disk() -> Iterator[Path]:
    """An empty data folder on a small disk of its own."""
    if os.getuid() != 0:
        pytest.skip("a small disk of its own needs root")
    with open_folder() as folder:
        data = folder / "data"
        data.mkdir()
        options = f"size={DISK_MB}m,mode=755"
        if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", data], check=False).returncode:
            pytest.skip("this machine lets nobody mount a small disk")
        try:
            yield data
        finally:
            subprocess.run(["umount", "--lazy", data], check=True)


def fill(folder: Path) -> None:
    """Take all the room that there is."""
    with open(folder / "ballast", "ab", buffering=0) as file:
        for size in (1 << 20, 4096):
            with suppress(OSError):
                while True:
                    file.write(bytes(size))


def use_up_wal(served: ServeProcess) -> None:
    """Let PostgreSQL need more of its log than there is room for: the server panics."""
    with connected(EmbeddedPostgres(RunPaths.of(served.data_dir)).url) as engine, suppress(SQLAlchemyError):
        for _ in range(200):
            with engine.begin() as connection:
                connection.execute(
                    text("select pg_logical_emit_message(false, 'chaos', repeat('x', 1000000))")
                )


@dataclass
class Watch:
    """What somebody who asks again and again is told."""

    served: ServeProcess
    began: float = field(default_factory=time.monotonic)
    statuses: Counter[str] = field(default_factory=Counter)
    modes: set[str] = field(default_factory=set)
    refused_at: float | None = None
    longest_s: float = 0.0

    def look(self) -> None:
        began = time.monotonic()
        body = {"model": MODEL, "prompt": [7] * 5, "max_tokens": 2}
        with self.served.http(timeout_s=ANSWER_S) as http:
            answer = http.post("/v1/completions", json=body)
            states = http.get("/readyz").json()["dependencies"]
        self.longest_s = max(self.longest_s, time.monotonic() - began)
        self.modes |= {f"{name}: {state['mode']}" for name, state in states.items()}
        if answer.status_code == 200:
            self.statuses["200"] += 1
            return
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (503, "server_is_overloaded"), answer.text
        self.statuses[f"503 {error['message']}"] += 1
        self.refused_at = self.refused_at or time.monotonic() - self.began


def test_a_full_disk_refuses_and_loses_nothing(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running_platform(disk) as served:
        load = Load(served, 10**6, SEED)
        load.start()
        assert wait_until(lambda: load.num_asked > 30, 30, every_s=0.1)
        before = served.gateway_pids() + served.engine_pids()
        fill(disk)
        uploaded = put_file(served)
        assert (uploaded.status_code, uploaded.json()["error"]["code"]) == (507, "insufficient_storage")
        watch = Watch(served)
        threading.Thread(target=use_up_wal, args=(served,), daemon=True).start()
        while time.monotonic() - watch.began < FULL_S:
            fill(disk)
            watch.look()
        # Without PostgreSQL nobody can say what is kept.
        assert put_file(served).status_code == 503
        assert not postgres(served), "the disk was not full enough to stop PostgreSQL"
        (disk / "ballast").unlink()
        freed_at = time.monotonic()
        assert wait_until(lambda: answers(served), BACK_S, every_s=0.2), watch
        back_s = time.monotonic() - freed_at
        assert wait_until(lambda: put_file(served).status_code == 200, BACK_S, every_s=0.2)
        load.stop()
        report = audit(served, load)
        assert served.gateway_pids() + served.engine_pids() == before
    with capsys.disabled():
        print(f"{watch}; back after {back_s:.1f} s; upload {uploaded.text}; {dict(load.ends)}; {report}")
    assert watch.refused_at is not None and watch.refused_at < FULL_S
    assert set(load.ends) <= {"whole", "body", "left", "stop string", "refused with 503"}
    keep_result(
        "full_disk",
        full_s=FULL_S,
        refused_after_s=round(watch.refused_at, 2),
        answers=watch.statuses,
        modes=sorted(watch.modes),
        longest_answer_s=round(watch.longest_s, 2),
        upload=[uploaded.status_code, uploaded.json()["error"]["message"]],
        back_s=round(back_s, 1),
        clients=load.ends,
        ledger=report,
    )


def put_file(served: ServeProcess) -> httpx.Response:
    with served.http(timeout_s=ANSWER_S) as http:
        file = {"file": ("lines.jsonl", bytes(4 << 20))}
        return http.post("/v1/files", data={"purpose": "batch"}, files=file)
