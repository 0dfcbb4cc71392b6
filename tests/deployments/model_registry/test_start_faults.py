"""Why an engine could not start: told in our words, found in Serve's, and free of paths nobody wrote."""

from __future__ import annotations

import pickle

import pytest

from footplate.deployments.model_registry.applications import reason_shown, state_of
from footplate.deployments.model_registry.policy import AppState
from footplate.deployments.model_registry.start_faults import (
    MAX_CHARACTERS,
    EngineStartFault,
    find_reason,
    reason_of,
)
from footplate.engine.errors import LoadError

SECRET = "canary-5f2a"
TRACEBACK = (
    "A replica failed to start with exception. Retrying 2 more time(s). Error:\n"
    f'Traceback (most recent call last):\n  File "/home/{SECRET}/engine.py", line 3, in load\n'
    "footplate.deployments.model_registry.start_faults.EngineStartFault: {}\n"
)


def test_a_reason_survives_the_way_through_serve_and_nothing_else_does() -> None:
    fault = pickle.loads(pickle.dumps(EngineStartFault("tensor 'x' is missing")))
    message = TRACEBACK.format(fault)
    assert find_reason(message) == "tensor 'x' is missing"
    assert state_of("DEPLOYING", 0, message) is AppState.FAILED
    assert reason_shown(AppState.FAILED, message) == "tensor 'x' is missing"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (LoadError("gguf:/models/a.gguf: it is short"), "gguf:/models/a.gguf: it is short"),
        (LoadError("/models/a.gguf: it is short"), "/models/a.gguf: it is short"),
        (LoadError(f"/srv/{SECRET}/lib/b.gguf: it is short"), "b.gguf: it is short"),
        (MemoryError(SECRET), "memory ran out while it was loading; give it less of it, or another machine"),
        (ValueError(SECRET), "the engine failed with ValueError; the replica's log says where"),
    ],
)
def test_only_our_own_words_and_the_operators_paths_are_told(error: Exception, told: str) -> None:
    assert reason_of(error, "gguf:/models/a.gguf", None) == told


def test_a_reason_is_one_short_line() -> None:
    reason = reason_of(LoadError("a\nb " + "x" * 10_000))
    assert reason.startswith("a b x")
    assert len(reason) == MAX_CHARACTERS


@pytest.mark.parametrize(
    ("status", "num_running", "message", "state"),
    [
        ("DEPLOYING", 0, "", AppState.STARTING),
        ("DEPLOYING", 1, TRACEBACK, AppState.RUNNING),
        ("RUNNING", 1, "", AppState.RUNNING),
        ("RUNNING", 0, "", AppState.RUNNING),
        ("UNHEALTHY", 0, TRACEBACK, AppState.STARTING),
        ("UNHEALTHY", 1, TRACEBACK, AppState.RUNNING),
        ("DEPLOY_FAILED", 0, "", AppState.FAILED),
        ("DELETING", 1, "", AppState.ENDING),
    ],
)
def test_what_serve_says_comes_to_a_state(
    status: str, num_running: int, message: str, state: AppState
) -> None:
    assert state_of(status, num_running, message) is state


def test_a_process_that_died_and_a_full_cluster_are_told_too() -> None:
    died = "A replica failed to start with exception. Error:\nThe actor died because of an error"
    assert find_reason(died) == "a replica's process died while it started; perhaps memory ran out"
    waits = "Deployment has 1 replicas that have taken more than 30s to be scheduled."
    assert find_reason(waits) is None
    assert reason_shown(AppState.STARTING, waits) == "it waits for room on the cluster"
    assert reason_shown(AppState.RUNNING, TRACEBACK) == ""
