"""A whole platform on a data folder of its own: killed, started again, and robbed of a daemon."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from footplate.deployments.leftovers import end_installation, is_alive, stop_postgres, wait_until
from footplate.deployments.run_paths import RunPaths
from tests.e2e.serve_process import SMALL, STOP_S, ServeProcess

pytestmark = pytest.mark.e2e


@pytest.fixture
def data_dir(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "data"
    yield folder
    paths = RunPaths.of(folder)
    # Only what a failed test leaves.
    end_installation(paths.mark, str(paths.run_dir), grace_s=1)
    stop_postgres(paths.postgres_dir)


def embedded_servers(served: ServeProcess) -> set[int]:
    """Processes that a start may adopt from a killed run."""
    return {*served.pids("bin/postgres -D"), *served.pids("valkey-server ")}


def test_a_killed_platform_starts_again_and_ends_by_itself_when_its_node_daemon_dies(data_dir: Path) -> None:
    """Without that daemon no replica that dies comes back: staying up would mean 503s for ever.

    One test, since each start takes as long as all the rest. How one stops when told to, every run of this
    tier asks of its own platform.
    """
    first = ServeProcess.launch(data_dir)
    keys = {name: first.key(name) for name in ("admin", "tenant", "scrape", "master")}
    modes = {name: (data_dir / "keys" / f"{name}.key").stat().st_mode & 0o777 for name in keys}
    assert set(modes.values()) == {0o600}
    old = set(first.processes())
    assert len(old) > 5
    first.kill()
    # Not waiting for the keeper: an operator's next start may be as quick.
    second = ServeProcess.launch(data_dir)
    try:
        assert {name: second.key(name) for name in keys} == keys
        with second.http() as http:
            answer = http.post("/v1/completions", json={"model": SMALL, "prompt": "Hello", "max_tokens": 2})
        assert answer.status_code == 200
        with second.http("scrape") as http:
            assert http.get("/metrics").status_code == 200
        assert wait_until(lambda: set(second.processes()) & old <= embedded_servers(second), 10)

        [raylet] = [pid for pid in second.pids("raylet/raylet ") if is_alive(pid)]
        os.kill(raylet, signal.SIGKILL)
        assert second.child.wait(timeout=STOP_S) == 1
    finally:
        second.stop(is_checked=False)
    assert second.has_said("raylet has died")
    assert wait_until(lambda: not second.processes(), 20), second.processes()
