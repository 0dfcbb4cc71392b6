"""What replicas are given by the composition root: plain values, known without Ray."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from footplate.deployments.autoscaling.policy import ScalingTarget
from footplate.deployments.engine_port import REAL_ENGINE
from footplate.engine.config import EngineConfig
from footplate.platform.telemetry.settings import TelemetrySettings

if TYPE_CHECKING:
    # Replicas would load all that checks a configuration.
    from footplate.platform.settings import ModelSettings, ReplicaSettings

# Serve's name of the one deployment in each model's application.
ENGINE_DEPLOYMENT = "Engine"
# Of the names of Serve's replica actors: then the application, the deployment and an id, with # between.
REPLICA_PREFIX = "SERVE_REPLICA::"
PLATFORM_APP = "footplate.deployments.platform_app:build"
GATEWAY_APPLICATION = "gateway"
# How long open answers of a model may go on that is replaced or removed.
MODEL_DRAIN_S = 600.0
_GENERATION_MARK = "~"  # in no model's name


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One entry of the configuration's `models`."""

    name: str
    source: str
    engine: EngineConfig = field(default_factory=EngineConfig)
    aliases: tuple[str, ...] = ()
    chat_template_file: str | None = None
    min_replicas: int = 1
    max_replicas: int = 1
    scaling: ScalingTarget | None = None  # between both; None: there are always `min_replicas`
    loader: str = REAL_ENGINE  # `module:attribute` of an EngineLoader

    @property
    def first_replicas(self) -> int:
        """How many it begins with: one at least, whose card says what the model is."""
        return max(1, self.min_replicas)

    @classmethod
    def of(cls, model: ModelSettings) -> ModelSpec:
        """What an entry of the configuration, or of the registry, asks for."""
        return cls(
            name=model.name,
            source=model.source,
            engine=model.engine.to_config(),
            aliases=model.aliases,
            chat_template_file=model.chat_template,
            min_replicas=model.replicas.min,
            max_replicas=model.replicas.max,
            scaling=scaling_of(model.replicas),
        )


def scaling_of(replicas: ReplicaSettings) -> ScalingTarget | None:
    """How a model scales; None where its bounds are one number."""
    if replicas.min == replicas.max:
        return None
    return ScalingTarget(replicas.min, replicas.max, replicas.waiting_per_replica, replicas.kv_usage)


@dataclass(frozen=True, slots=True)
class ModelTarget:
    """A model that gateways are to serve: its names, and the generations of it that may run, newest first."""

    name: str
    aliases: tuple[str, ...] = ()
    generations: tuple[int, ...] = (1,)


def application_of(model: str, generation: int) -> str:
    """Serve's name of one generation of a model. The first one's is the model's own, unless that is taken."""
    if generation == 1 and model != GATEWAY_APPLICATION:
        return model
    return f"{model}{_GENERATION_MARK}{generation}"


def model_of(application: str) -> tuple[str, int]:
    """The model and the generation that an application's name stands for."""
    model, mark, generation = application.rpartition(_GENERATION_MARK)
    return (model, int(generation)) if mark and generation.isdecimal() else (application, 1)


def is_of(models: Collection[str], application: str) -> bool:
    """Whether an application is a generation of one of these models: the gateway's never is."""
    model, generation = model_of(application)
    return model in models and application_of(model, generation) == application


def replica_label(generation: int, index: str) -> str:
    """A replica's name among all that serve its model: its place, behind its generation but for the first."""
    return index if generation == 1 else f"{generation}.{index}"


def generation_of(label: str) -> int:
    """The generation that a replica's label tells of."""
    generation, dot, _ = label.partition(".")
    return int(generation) if dot and generation.isdecimal() else 1


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """What an engine replica is given: its model, and where the node keeps keys and models."""

    model: ModelSpec
    master_key_file: str
    models_dir: str | None = None
    num_threads: int = 0  # compute threads; 0 leaves the engine's own choice
    # Where each replica writes down what it has produced; None: nowhere.
    journal_dir: str | None = None
    # How often gateways are told of load and of cached blocks, at most.
    publish_every_s: float = 0.05
    # How long a replica that is told to stop lets its streams go on; then they end with an error.
    drain_s: float = 3600.0
    # Once this file is there the whole platform stops, and streams have `stop_drain_s` from then on.
    stop_file: str | None = None
    stop_drain_s: float = 3.0
    # Where the node's notice lies once it is about to be taken away; see `leaving`. None: nobody tells.
    notice_dir: str | None = None
    generation: int = 1
    telemetry: TelemetrySettings = field(default_factory=TelemetrySettings)


@dataclass(frozen=True, slots=True)
class GatewaySpec:
    """What a gateway replica is given."""

    models: tuple[str, ...]
    master_key_file: str
    # `unix:/folder/` (each gateway makes a socket of its own there), `tcp:host:0`, or `gateway.NODE_CHANNEL`.
    channel_address: str
    database_url: str = ""
    redis_url: str = ""
    # Where the proxy in front says from which address a request came; None when there is none to trust.
    source_header: str | None = None
    config_file: str | None = None
    data_dir: str = ""
    # Whether models may be added and removed while the platform runs; somebody has to reconcile them.
    has_registry: bool = False
    app_builder: str = PLATFORM_APP
