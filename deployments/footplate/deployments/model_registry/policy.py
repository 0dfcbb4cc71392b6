"""What is to be done so that what runs becomes what is wanted. Pure: values and a clock in, actions out.

Each generation of a model runs as an application of its own. So a new one never touches the old one, which
goes on serving until the new one can, or for ever when it can't; and applications whose model did not change
are named by no action.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from footplate.platform.model_registry import ModelState

# Gateways ask for replicas of a model four times a second while there are none, and every two seconds
# otherwise; the old generation is asked to end when all of them know the new one.
SETTLE_S = 3.0
FIRST_RETRY_S = 10.0
MAX_RETRY_S = 300.0


class AppState(StrEnum):
    """Of one application. FAILED: no replica of it has come up, and one has said that it can't."""

    STARTING = "starting"
    RUNNING = "running"
    FAILED = "failed"
    ENDING = "ending"


@dataclass(frozen=True, slots=True)
class SeenApplication:
    """One generation of a model, as it runs. `num_replicas`: those that serve."""

    model: str
    generation: int
    state: AppState
    num_replicas: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Trial:
    """A generation that could not start: why, how often by now, and when it is tried again (monotonic s)."""

    generation: int
    num_failures: int
    retry_at: float
    reason: str


@dataclass(frozen=True, slots=True)
class Memory:
    """What a decision leaves for the next one: failures, and since when the wanted generations run."""

    trials: Mapping[str, Trial] = field(default_factory=dict)
    running_since: Mapping[str, tuple[int, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Deploy:
    """Start a generation."""

    model: str
    generation: int


@dataclass(frozen=True, slots=True)
class End:
    """Let an application begin nothing new, end its streams and go."""

    model: str
    generation: int


@dataclass(frozen=True, slots=True)
class Sight:
    """A model as it is to be shown; `retry_in_s` of one that failed."""

    model: str
    state: ModelState
    generation: int
    serving: int | None = None
    num_replicas: int = 0
    reason: str = ""
    retry_in_s: float | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """`gone`: removed models of which nothing runs any more."""

    actions: tuple[Deploy | End, ...]
    sights: tuple[Sight, ...]
    gone: tuple[str, ...]
    memory: Memory

    @property
    def is_settled(self) -> bool:
        """Whether nothing will change within seconds."""
        return not self.actions and not self.gone and all(map(_is_settled, self.sights))


def decide(
    wanted: Mapping[str, int],
    removed: Mapping[str, int],
    applications: Iterable[SeenApplication],
    memory: Memory,
    now: float,
    has_room: Callable[[str], bool] = lambda _: True,
) -> Decision:
    """One round.

    Args:
        wanted: generation by model. Applications of models that stand neither here nor in `removed` are not
            ours to touch.
        removed: models that are to go, with their last generation.
        has_room: whether a generation of this model can run beside the one that runs. Else the old one goes
            first, and nothing of the model serves meanwhile.
    """
    by_model: dict[str, list[SeenApplication]] = {}
    for application in applications:
        by_model.setdefault(application.model, []).append(application)
    actions: list[Deploy | End] = []
    sights: list[Sight] = []
    trials: dict[str, Trial] = {}
    running_since: dict[str, tuple[int, float]] = {}
    for model, generation in wanted.items():
        round_ = _Round(model, generation, by_model.get(model, []), memory, now)
        actions += round_.actions(has_room)
        sights.append(round_.sight())
        if round_.trial is not None:
            trials[model] = round_.trial
        if round_.since is not None:
            running_since[model] = generation, round_.since
    gone = []
    for model, generation in removed.items():
        found = by_model.get(model, [])
        actions += _ends(found)
        sights.append(Sight(model, ModelState.REMOVING, generation, None, _num_replicas(found)))
        if not found:
            gone.append(model)
    return Decision(tuple(actions), tuple(sights), tuple(gone), Memory(trials, running_since))


def after_failure(memory: Memory, model: str, generation: int, reason: str, now: float) -> Memory:
    """The memory once a deployment was refused outright."""
    return Memory(
        {**memory.trials, model: _failed(memory.trials.get(model), generation, reason, now)},
        memory.running_since,
    )


def _failed(before: Trial | None, generation: int, reason: str, now: float) -> Trial:
    count = 1 if before is None or before.generation != generation else before.num_failures + 1
    # Bounded before it is raised to a power.
    wait_s = min(MAX_RETRY_S, FIRST_RETRY_S * 2 ** min(count - 1, 10))
    return Trial(generation, count, now + wait_s, reason)


class _Round:
    """One wanted model in one round."""

    def __init__(
        self, model: str, generation: int, found: Sequence[SeenApplication], memory: Memory, now: float
    ) -> None:
        self._model = model
        self._generation = generation
        self._now = now
        self._wanted = next((app for app in found if app.generation == generation), None)
        self._others = [app for app in found if app.generation != generation]
        before = memory.trials.get(model)
        self.trial = before if before is not None and before.generation == generation else None
        self.since: float | None = None
        state = self._wanted.state if self._wanted is not None else None
        if state is AppState.RUNNING:
            self.trial = None
            at, since = memory.running_since.get(model, (0, 0.0))
            self.since = since if at == generation else now
        elif self._wanted is not None and state is AppState.FAILED:
            self.trial = _failed(self.trial, generation, self._wanted.reason, now)

    def actions(self, has_room: Callable[[str], bool]) -> list[Deploy | End]:
        """What is to be done for it."""
        if self._wanted is None:
            return self._begin(has_room)
        if self._wanted.state is AppState.FAILED:
            # Serve would try it again at once, and each time cost the others a start's worth of the machine.
            return [End(self._model, self._generation)]
        if self.since is not None and self._now - self.since >= SETTLE_S:
            return _ends(self._others)
        return []

    def _begin(self, has_room: Callable[[str], bool]) -> list[Deploy | End]:
        if self.trial is not None and self._now < self.trial.retry_at:
            return []
        if self._others and not has_room(self._model):
            return _ends(self._others)
        return [Deploy(self._model, self._generation)]

    def sight(self) -> Sight:
        """How it stands."""
        serving = [app for app in self._others if app.state is AppState.RUNNING]
        newest = max((app.generation for app in serving), default=None)
        count = _num_replicas(serving)
        if self._wanted is not None and self._wanted.state is AppState.RUNNING:
            newest, count = self._generation, count + self._wanted.num_replicas
        reason, retry_in_s = "", None
        if newest == self._generation:
            state = ModelState.READY
        elif self.trial is not None:
            state, reason = ModelState.FAILED, self.trial.reason
            retry_in_s = max(0.0, self.trial.retry_at - self._now)
        else:
            state = ModelState.STARTING if newest is None else ModelState.UPDATING
            reason = "" if self._wanted is None else self._wanted.reason
        return Sight(self._model, state, self._generation, newest, count, reason, retry_in_s)


def _is_settled(sight: Sight) -> bool:
    return sight.state is ModelState.READY or bool(sight.retry_in_s)


def _ends(applications: Collection[SeenApplication]) -> list[Deploy | End]:
    return [End(app.model, app.generation) for app in applications if app.state is not AppState.ENDING]


def _num_replicas(applications: Iterable[SeenApplication]) -> int:
    return sum(app.num_replicas for app in applications)
