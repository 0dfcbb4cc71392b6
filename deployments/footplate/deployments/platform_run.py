"""One run of the whole platform on this machine: parts started side by side, stopped in order."""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING

from footplate.deployments.batches.setup import prepare_batches
from footplate.deployments.billing_setup import BillingSetup, prepare_books
from footplate.deployments.embedded import EmbeddedPostgres, EmbeddedValkey
from footplate.deployments.errors import StartupError
from footplate.deployments.haproxy_wrapper import SOURCE_HEADER
from footplate.deployments.keeper import Keeper
from footplate.deployments.leftovers import end_installation, stop_postgres
from footplate.deployments.ports import RunPorts, require_free_port
from footplate.deployments.ray_environment import STALL_S, find_haproxy, ray_arguments, ray_environment
from footplate.deployments.run_lock import take_lock
from footplate.deployments.run_paths import RunPaths
from footplate.deployments.specs import (
    GATEWAY_APPLICATION,
    MODEL_DRAIN_S,
    PLATFORM_APP,
    GatewaySpec,
    ModelSpec,
    ReplicaSpec,
)
from footplate.deployments.storage import prepare_storage
from footplate.platform.model_registry import ServedModel
from footplate.platform.settings import Settings
from footplate.platform.telemetry.settings import TelemetrySettings
from footplate.tenancy.secrets import MasterKey

if TYPE_CHECKING:
    from footplate.deployments.model_registry.running import RunningModels

logger = logging.getLogger(__name__)
EMBEDDED = "embedded"


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What to run. An empty database or redis URL leaves that part out."""

    data_dir: Path
    models: tuple[ModelSpec, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    gateway_replicas: int = 1
    ray_address: str = "local"
    ray_namespace: str = "footplate"
    database_url: str = EMBEDDED
    redis_url: str = EMBEDDED
    files_url: str = EMBEDDED
    master_key_file: Path | None = None
    config_file: str | None = None
    # The configuration, where models may be added to it while the platform runs; that needs a database.
    settings: Settings | None = None
    app_builder: str = PLATFORM_APP
    billing: BillingSetup = field(default_factory=BillingSetup)
    drain_s: float = 3.0  # how long a stop waits for open streams
    publish_every_s: float = 0.05  # how often engines tell gateways of load and cached blocks, at most
    stall_s: float = STALL_S  # how long a client may read nothing
    telemetry: TelemetrySettings = field(default_factory=TelemetrySettings)


@dataclass(slots=True)
class PhaseClock:
    """Seconds that each phase of the start took; phases overlap. `tell` hears of each as it begins."""

    phases: dict[str, float] = field(default_factory=dict)
    tell: Callable[[str], None] | None = None

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the time inside the block to a phase."""
        started = time.monotonic()
        if self.tell is not None:
            self.tell(f"starting {name}")
        try:
            yield
        finally:
            self.phases[name] = self.phases.get(name, 0.0) + time.monotonic() - started


class PlatformRun:
    """Starts and stops everything. Use one instance from one thread that lives as long as the run."""

    def __init__(self, plan: RunPlan) -> None:
        self.plan = plan
        self.paths = RunPaths.of(plan.data_dir)
        self.clock = PhaseClock()
        self.haproxy = find_haproxy()
        self.master_key_file = plan.master_key_file or self.paths.keys_dir / "master.key"
        self.database_url = "" if plan.database_url == EMBEDDED else plan.database_url
        self.redis_url = "" if plan.redis_url == EMBEDDED else plan.redis_url
        self._postgres: EmbeddedPostgres | None = None
        self._valkey: EmbeddedValkey | None = None
        self._keeper: Keeper | None = None
        self._lock: IO[str] | None = None
        self._models: RunningModels | None = None
        self._is_ray_up = False
        self._is_given_up = False
        # Embedded servers that have died and could not be started again, and why.
        self._not_started: dict[str, str] = {}

    @property
    def base_url(self) -> str:
        """Where clients reach the platform."""
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self.plan.host, self.plan.host)
        return f"http://{host}:{self.plan.port}"

    def start(self) -> None:
        """Start everything and return when all parts have been told to; `stop` must follow in any case.

        Raises:
            StartupError: something is missing or taken; most faults are found before anything starts.
        """
        self.paths.make()
        self._lock = take_lock(self.paths, self.base_url)  # held for the whole run
        self._clear_leftovers()
        require_free_port(self.plan.host, self.plan.port)
        MasterKey.load_or_create(self.master_key_file)
        ports = RunPorts.choose(self.plan.port, self.paths.mark)
        os.environ.update(ray_environment(self.paths, ports, self.haproxy, self.plan.stall_s))
        self._keeper = Keeper(self.paths)
        with ThreadPoolExecutor(3, thread_name_prefix="start") as pool, self._tell_helpers_when_it_fails():
            storage = pool.submit(self._start_database)
            valkey = pool.submit(self._start_valkey)
            self._start_ray()
            # The HTTP listener takes seconds to come up; weights load and the app is built meanwhile.
            deployed = pool.submit(self._deploy, storage, valkey)
            self._start_listener()
            deployed.result()

    def stop(self) -> None:
        """Stop everything in order; whatever doesn't end by itself is killed. Safe after a failed start."""
        if self._lock is None:
            return
        if self._models is not None:
            self._models.close()
        if self._is_ray_up:
            self._stop_ray()
        self._end_strays()
        if self._valkey is not None:
            self._valkey.stop()
        if self._postgres is not None:
            self._postgres.stop()
        else:
            stop_postgres(self.paths.postgres_dir)  # left by a killed run, and this start didn't get that far
        if self._keeper is not None:
            self._keeper.dismiss()
        self._keep_ray_logs()
        shutil.rmtree(self.paths.run_dir, ignore_errors=True)
        self._lock.close()
        self._lock = None

    @contextmanager
    def _tell_helpers_when_it_fails(self) -> Iterator[None]:
        """An interrupted start must not wait for helpers that wait for what will never come."""
        try:
            yield
        except BaseException:
            self._is_given_up = True
            raise

    def supervise(self) -> None:
        """As `revive`, once Ray is seen to be well. Cheap while all answer.

        Raises:
            StartupError: one of Ray's own daemons is dead. Without it nothing that dies comes back, so the
                platform is to end, and whoever runs it to start it anew.
        """
        from footplate.deployments.serve_platform import dead_daemons

        dead = dead_daemons()
        if dead:
            raise StartupError(f"Ray's {', '.join(dead)} has died; the platform stops, start it again")
        self.revive()

    def revive(self) -> None:
        """Start an embedded server again that has died.

        One that can't start, as on a full disk, is tried again each time: gateways do without it meanwhile.
        """
        for server in (self._postgres, self._valkey):
            if server is not None:
                self._revive(server)

    def _revive(self, server: EmbeddedPostgres | EmbeddedValkey) -> None:
        name = type(server).__name__
        try:
            was_running = server.start()
        except (StartupError, OSError) as error:
            # A reason is told once, however often it is met.
            reason = str(error)
            if self._not_started.get(name) != reason:
                logger.error("%s has died and can't be started; it is tried again: %s", name, reason)
            self._not_started[name] = reason
            return
        self._not_started.pop(name, None)
        if not was_running:
            logger.warning("%s had died and was started again", name)

    def faults(self) -> dict[str, str]:
        """The gateway and models of the configuration that failed to start, with the reason."""
        from footplate.deployments.serve_platform import application_faults

        own = {GATEWAY_APPLICATION, *(model.name for model in self.plan.models)}
        found = application_faults()
        # One that the reconciler has ended is in no list of Serve's any more.
        found |= self._models.reconciler.faults() if self._models is not None else {}
        return {name: reason for name, reason in found.items() if name in own}

    def _clear_leftovers(self) -> None:
        """End what a killed run left behind; its database and Valkey are adopted later."""
        spared = EmbeddedValkey(self.paths).pids()
        end_installation(self.paths.mark, str(self.paths.run_dir), grace_s=1.0, spared=spared)
        for folder in (self.paths.ray_dir, self.paths.haproxy_dir):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(mode=0o700)
        self.paths.stop_file.unlink(missing_ok=True)
        for left_socket in self.paths.run_dir.glob("gateway-*.sock"):
            left_socket.unlink(missing_ok=True)

    def _start_database(self) -> None:
        if self.plan.database_url == EMBEDDED:
            with self.clock.measure("postgres"):
                self._postgres = EmbeddedPostgres(self.paths)
                self._postgres.start()
                self.database_url = self._postgres.url
        if self.database_url:
            with self.clock.measure("schema and keys"):
                prepare_storage(self.database_url, self.master_key_file, self.paths.keys_dir)
            with self.clock.measure("books"):
                prepare_books(self.database_url, self.plan.billing)
            with self.clock.measure("batches"):
                prepare_batches(self.database_url, self.plan.files_url, self.paths.data_dir)

    def _start_valkey(self) -> None:
        if self.plan.redis_url == EMBEDDED:
            with self.clock.measure("valkey"):
                self._valkey = EmbeddedValkey(self.paths)
                self._valkey.start()
                self.redis_url = self._valkey.url

    def _start_ray(self) -> None:
        """On the calling thread, because Ray's processes die with the thread that started them."""
        with self.clock.measure("import ray"):
            from footplate.deployments.serve_platform import init_ray
        with self.clock.measure("ray"):
            arguments = ray_arguments(self.paths)
            if self.plan.ray_address != "local":
                arguments = {"address": self.plan.ray_address, "log_to_driver": False}
            self._is_ray_up = True
            try:
                init_ray({**arguments, "namespace": self.plan.ray_namespace})
            except Exception as error:
                # Ray raises whatever its libraries raise; all of it means the same to the operator.
                reason = (str(error).strip() or type(error).__name__).splitlines()[0]
                raise StartupError(f"Ray did not start: {reason}", f"see {self.paths.log_dir}/ray") from error

    def _start_listener(self) -> None:
        from footplate.deployments.serve_platform import start_serve

        with self.clock.measure("serve"):
            start_serve(self.plan.host, self.plan.port)

    def _deploy(self, storage: Future[None], valkey: Future[None]) -> None:
        from footplate.deployments.serve_platform import deploy_gateway, deploy_models, wait_for_controller

        with self.clock.measure("deploy"):
            wait_for_controller(is_given_up=lambda: self._is_given_up)
            deploy_models([self._replica_spec(model) for model in self.plan.models])
            storage.result()
            valkey.result()
            self._prepare_models()
            deploy_gateway(
                self._gateway_spec(), num_replicas=self.plan.gateway_replicas, graceful_s=self.plan.drain_s
            )
        if self._models is not None:
            self._models.start()

    def _prepare_models(self) -> None:
        """Make what adds and removes models while the platform runs."""
        if self.plan.settings is None or not self.database_url:
            return
        from footplate.deployments.model_registry.running import RunningModels

        models_dir = self.paths.data_dir / "models"
        self._models = RunningModels(self.database_url, self.plan.settings, self._spec_of, models_dir)
        self._models.prepare()

    def _spec_of(self, model: ServedModel) -> ReplicaSpec:
        return self._replica_spec(ModelSpec.of(model.settings), model.generation)

    def _replica_spec(self, model: ModelSpec, generation: int = 1) -> ReplicaSpec:
        return ReplicaSpec(
            model,
            str(self.master_key_file),
            str(self.paths.data_dir / "models"),
            journal_dir=str(self.paths.engine_journal_dir),
            publish_every_s=self.plan.publish_every_s,
            drain_s=MODEL_DRAIN_S,
            stop_file=str(self.paths.stop_file),
            stop_drain_s=self.plan.drain_s,
            generation=generation,
            telemetry=self.plan.telemetry,
        )

    def _gateway_spec(self) -> GatewaySpec:
        return GatewaySpec(
            models=tuple(model.name for model in self.plan.models),
            master_key_file=str(self.master_key_file),
            channel_address=f"unix:{self.paths.run_dir}",
            database_url=self.database_url,
            redis_url=self.redis_url,
            # Without HAProxy clients could write what they like there.
            source_header=SOURCE_HEADER if self.haproxy is not None else None,
            config_file=self.plan.config_file,
            data_dir=str(self.paths.data_dir),
            has_registry=self._models is not None,
            app_builder=self.plan.app_builder,
        )

    def _stop_ray(self) -> None:
        from footplate.deployments.serve_platform import stop_ray

        # Ray offers no deadline for this, so it runs beside one, on a thread that no exit waits for; the
        # strays are ended afterwards.
        models = {model.name for model in self.plan.models}
        models |= self._models.reconciler.models() if self._models is not None else set()
        # From here on replicas give their streams as long as a stop may take, and no longer.
        with suppress(OSError):  # a full disk must not keep it from stopping
            self.paths.stop_file.touch()
        stopping = threading.Thread(
            target=stop_ray, args=(models, self.plan.drain_s), name="stop-ray", daemon=True
        )
        stopping.start()
        stopping.join(self.plan.drain_s + 8.0)
        if stopping.is_alive():
            logger.warning("Ray did not stop in time; its processes are killed")
        self._is_ray_up = False

    def _keep_ray_logs(self) -> None:
        """The last run's logs outlive its temporary folder."""
        kept = self.paths.log_dir / "ray"
        for session in self.paths.ray_dir.glob("session_*_*/logs"):
            shutil.rmtree(kept, ignore_errors=True)
            try:
                shutil.copytree(session, kept, symlinks=True)
            except (OSError, shutil.Error) as error:
                logger.warning("Ray's logs can't be kept: %s", error)

    def _end_strays(self) -> None:
        spared = EmbeddedValkey(self.paths).pids() | ({self._keeper.pid} if self._keeper else set())
        end_installation(self.paths.mark, str(self.paths.run_dir), grace_s=0.5, spared=spared)
