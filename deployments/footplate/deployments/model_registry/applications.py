"""Generations of models as Serve applications: what runs, and how one is started and ended."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

import ray
from ray import serve
from ray.serve._private.common import ReplicaState

from footplate.deployments.model_registry.policy import AppState, SeenApplication
from footplate.deployments.model_registry.start_faults import find_reason
from footplate.deployments.serve_platform import deploy_models, gpu_share
from footplate.deployments.specs import (
    ENGINE_DEPLOYMENT,
    ModelSpec,
    ReplicaSpec,
    application_of,
    is_of,
    model_of,
)

RUNNING = "RUNNING"
UNSCHEDULED = "to be scheduled"


class Applications(Protocol):
    """What a reconciler needs from the cluster."""

    def seen(self, models: Collection[str]) -> list[SeenApplication]:
        """All generations of these models, as they run."""
        ...

    def deploy(self, spec: ReplicaSpec) -> None:
        """Begin to start a generation and return at once."""
        ...

    def end(self, model: str, generation: int) -> None:
        """Begin to end a generation and return at once; its streams go on."""
        ...

    def has_room(self, spec: ReplicaSpec) -> bool:
        """Whether this can run beside all that runs."""
        ...


class ServeApplications:
    """See `Applications`. `has_memory` judges what runs on CPUs, of which Ray counts nothing."""

    def __init__(self, has_memory: Callable[[ModelSpec], bool]) -> None:
        self._has_memory = has_memory

    def seen(self, models: Collection[str]) -> list[SeenApplication]:
        """As `Applications.seen`; applications of others are left out."""
        found = []
        for name, application in serve.status().applications.items():
            if not is_of(models, name):
                continue
            model, generation = model_of(name)
            engine = application.deployments.get(ENGINE_DEPLOYMENT)
            count = 0 if engine is None else engine.replica_states.get(ReplicaState.RUNNING, 0)
            message = " ".join([application.message, engine.message if engine is not None else ""])
            state = state_of(str(application.status.value), count, message)
            found.append(SeenApplication(model, generation, state, count, reason_shown(state, message)))
        return found

    def deploy(self, spec: ReplicaSpec) -> None:
        """As `Applications.deploy`."""
        deploy_models([spec])

    def end(self, model: str, generation: int) -> None:
        """As `Applications.end`."""
        serve.delete(application_of(model, generation), _blocking=False)

    def has_room(self, spec: ReplicaSpec) -> bool:
        """As `Applications.has_room`."""
        num_gpus = ray.cluster_resources().get("GPU", 0.0)  # type: ignore[no-untyped-call]
        share = gpu_share(spec.model.engine, num_gpus) * spec.model.first_replicas
        if share:
            return bool(ray.available_resources().get("GPU", 0.0) >= share)  # type: ignore[no-untyped-call]
        return self._has_memory(spec.model)


def state_of(status: str, num_running: int, message: str) -> AppState:
    """What Serve's status of an application comes to. Pure.

    One that runs may have no replica, where it is scaled to none. One that has run and lost all of them is
    Serve's to repair, whatever they say meanwhile.
    """
    if status == "DELETING":
        return AppState.ENDING
    if num_running or status == RUNNING:
        return AppState.RUNNING
    if status == "UNHEALTHY":
        return AppState.STARTING
    if status == "DEPLOY_FAILED" or find_reason(message) is not None:
        return AppState.FAILED
    return AppState.STARTING


def reason_shown(state: AppState, message: str) -> str:
    """Why it does not serve, in our own words; empty while there is nothing to say."""
    if state is AppState.FAILED:
        return find_reason(message) or "it failed to start; Serve's log says more"
    if state is AppState.STARTING and UNSCHEDULED in message:
        return "it waits for room on the cluster"
    return ""
