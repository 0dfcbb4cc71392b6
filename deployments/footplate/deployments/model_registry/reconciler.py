"""Makes what runs match what is wanted, one round after another, in the process that started the platform."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta

from footplate.deployments.model_registry.applications import Applications
from footplate.deployments.model_registry.policy import (
    Decision,
    Deploy,
    Memory,
    Sight,
    after_failure,
    decide,
)
from footplate.deployments.model_registry.rows import PostgresModelRegistry
from footplate.deployments.specs import ReplicaSpec
from footplate.platform.model_registry import ModelState, SeenModel, ServedModel, served_models
from footplate.platform.settings import ModelSettings
from footplate.tenancy.errors import StoreUnavailable

_LOGGER = logging.getLogger(__name__)
ROUND_S = 0.5
# Asking Serve costs its controller more than asking the registry costs the database.
LOOK_S = 2.0


class Reconciler:
    """Rounds in a thread of its own; `close` ends it. All state but failures is in the registry and in Serve,
    so one that comes after another goes on where that one was.
    """

    def __init__(
        self,
        registry: PostgresModelRegistry,
        applications: Applications,
        file: Sequence[ModelSettings],
        spec_of: Callable[[ServedModel], ReplicaSpec],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry = registry
        self._applications = applications
        self._file = tuple(file)
        self._spec_of = spec_of
        self._clock = clock
        self._memory = Memory()
        self._wanted: object = None
        self._sights: dict[str, Sight] = {}
        self._is_settled = False
        self._looked_at = float("-inf")
        self._is_lost = False
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="models", daemon=True)

    def start(self) -> None:
        """Begin. What an earlier run has seen must have been forgotten: see `begin_run`."""
        self._thread.start()

    def close(self) -> None:
        """End after the round that runs, if it ends soon."""
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join(5.0)

    def models(self) -> set[str]:
        """Whose applications there may be."""
        return set(self._sights)

    def faults(self) -> dict[str, str]:
        """Models that can't start, with the reason."""
        found = self._sights.values()
        return {sight.model: sight.reason for sight in found if sight.state is ModelState.FAILED}

    def round(self) -> None:
        """Look once and act.

        Raises:
            StoreUnavailable: the registry gives no answer; nothing was done.
        """
        rows = self._registry.rows()
        now = self._clock()
        if self._is_settled and rows == self._wanted and now - self._looked_at < LOOK_S:
            return
        self._looked_at = now
        served = served_models(self._file, rows)
        removed = {row.name: row.generation for row in rows if row.is_removed and row.name not in served}
        decision = decide(
            {name: model.generation for name, model in served.items()},
            removed,
            self._applications.seen(served.keys() | removed.keys()),
            self._memory,
            now,
            lambda name: self._applications.has_room(self._spec_of(served[name])),
        )
        self._memory = decision.memory
        self._note(decision)
        for action in decision.actions:
            if isinstance(action, Deploy):
                self._deploy(served[action.model])
            else:
                _LOGGER.info("generation %d of %s is ended", action.generation, action.model)
                self._applications.end(action.model, action.generation)
        self._wanted, self._is_settled = rows, decision.is_settled

    def _deploy(self, model: ServedModel) -> None:
        _LOGGER.info("generation %d of %s is started", model.generation, model.name)
        try:
            self._applications.deploy(self._spec_of(model))
        except Exception as error:
            # Serve raises whatever its libraries raise; the others' rounds go on.
            reason = f"it can't be deployed ({type(error).__name__})"
            self._memory = after_failure(self._memory, model.name, model.generation, reason, self._clock())
            _LOGGER.warning("%s can't be deployed: %s", model.name, type(error).__name__)

    def _note(self, decision: Decision) -> None:
        """Write down what is new: a failure's wait goes down by itself."""
        now = datetime.now(UTC)
        before, self._sights = self._sights, {sight.model: sight for sight in decision.sights}
        new = [sight for sight in decision.sights if _facts(sight) != _facts(before.get(sight.model))]
        if new or decision.gone:
            self._registry.note([_seen(sight, now) for sight in new], decision.gone)
        for sight in new:
            known = before.get(sight.model)
            if sight.reason and (known is None or (known.generation, known.reason) != _told(sight)):
                _LOGGER.warning("%s is %s: %s", sight.model, sight.state, sight.reason)

    def _run(self) -> None:
        while not self._ending.wait(ROUND_S):
            try:
                self.round()
                self._is_lost = False
            except StoreUnavailable:
                if not self._is_lost:
                    _LOGGER.warning("models stay as they are: the database gives no answer")
                self._is_lost = True
            except Exception:
                # A fault of a round must not end all rounds; what it has noted is written again.
                self._sights = {}
                if not self._ending.is_set():
                    _LOGGER.exception("a round over the models failed")


def _told(sight: Sight) -> tuple[int, str]:
    return sight.generation, sight.reason


def _facts(sight: Sight | None) -> object:
    if sight is None:
        return None
    is_waiting = sight.retry_in_s is not None and sight.retry_in_s > 0
    return sight.state, sight.generation, sight.serving, sight.num_replicas, sight.reason, is_waiting


def _seen(sight: Sight, now: datetime) -> SeenModel:
    retry_at = None if sight.retry_in_s is None else now + timedelta(seconds=sight.retry_in_s)
    return SeenModel(
        sight.model,
        sight.state,
        sight.generation,
        sight.serving,
        sight.num_replicas,
        sight.reason,
        retry_at,
    )
