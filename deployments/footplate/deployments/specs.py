"""What replicas are given by the composition root: plain values, known without Ray."""

from __future__ import annotations

from dataclasses import dataclass, field

from footplate.deployments.engine_port import REAL_ENGINE
from footplate.engine.config import EngineConfig
from footplate.platform.telemetry.settings import TelemetrySettings

# Serve's name of the one deployment in each model's application.
ENGINE_DEPLOYMENT = "Engine"
PLATFORM_APP = "footplate.deployments.platform_app:build"


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
    loader: str = REAL_ENGINE  # `module:attribute` of an EngineLoader


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
    app_builder: str = PLATFORM_APP
