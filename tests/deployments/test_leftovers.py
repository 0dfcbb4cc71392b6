"""Ending an installation's processes, those included that come up meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from footplate.deployments.leftovers import end_installation, find_processes, is_alive
from footplate.deployments.run_paths import MARK_VARIABLE

# When it is asked to end, it starts another of its kind first, as Ray's node daemon does.
RESTARTS_ITSELF = """
import os, signal, subprocess, sys
def replace(number, frame):
    subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
    os._exit(0)
signal.signal(signal.SIGTERM, replace)
print(os.getpid(), flush=True)
signal.pause()
"""


def start(mark: str, code: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, MARK_VARIABLE: mark}, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_what_is_started_while_all_is_ended_is_ended_too(tmp_path: Path) -> None:
    mark = f"test-{os.getpid()}"
    with start(mark, RESTARTS_ITSELF) as process:
        assert find_processes(mark, str(tmp_path)) == [process.pid]
        end_installation(mark, str(tmp_path), grace_s=5)
        assert find_processes(mark, str(tmp_path)) == []


def test_the_spared_live_on(tmp_path: Path) -> None:
    mark = f"spared-{os.getpid()}"
    waits = "import signal; print(1, flush=True); signal.pause()"
    with start(mark, waits) as process:
        end_installation(mark, str(tmp_path), grace_s=5, spared={process.pid})
        assert is_alive(process.pid)
        end_installation(mark, str(tmp_path), grace_s=5)
        assert not is_alive(process.pid)


def test_a_process_that_wiped_its_names_is_found_by_the_files_it_writes(tmp_path: Path) -> None:
    """Ray's agents put their title over command and environment, as far as it reaches."""
    log = tmp_path / "agent.log"
    log.touch()
    opened = "import signal; print(1, flush=True); signal.pause()"
    for mode, is_found in (("ab", True), ("rb", False)):
        with (
            open(log, mode) as file,
            subprocess.Popen(
                [sys.executable, "-c", opened], stdout=subprocess.PIPE, pass_fds=[file.fileno()], cwd="/"
            ) as process,
        ):
            file.close()
            assert (process.pid in find_processes("no-such-mark", str(tmp_path))) == is_found
            process.kill()
