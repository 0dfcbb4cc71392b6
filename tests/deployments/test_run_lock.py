"""The lock of a data folder, and what others read from it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from footplate.deployments.errors import StartupError
from footplate.deployments.run_lock import RunningPlatform, find_running, take_lock
from footplate.deployments.run_paths import RunPaths

URL = "http://127.0.0.1:8000"


def test_a_held_folder_names_its_holder_until_it_lets_go(tmp_path: Path) -> None:
    paths = RunPaths.of(tmp_path)
    assert find_running(paths) is None
    lock = take_lock(paths, URL)
    for _ in range(2):
        with pytest.raises(StartupError, match=f"process {os.getpid()} at {URL}"):
            take_lock(paths, "http://127.0.0.1:9")
        assert find_running(paths) == RunningPlatform(os.getpid(), URL)
    lock.close()
    assert find_running(paths) is None
    take_lock(paths, URL).close()


def test_a_folder_that_was_never_used_or_made_has_no_holder(tmp_path: Path) -> None:
    assert find_running(RunPaths.of(tmp_path / "nowhere")) is None
