"""What a KubeRay RayService runs: the builders that its `serveConfigV2` names by import path.

A RayService's operator hands Serve a file, and Serve builds each application on the cluster; nobody's process
runs `serve.run`. So `footplate serve` has no place there, and these functions stand in for its composition.
One application for each model, one for the gateways; see `infra/helm/footplate`.

Addresses with passwords never enter an application's arguments, which Ray's control store keeps: each process
reads them from its own environment (`FOOTPLATE_STORAGE__…`).
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ray import serve

from footplate.deployments.errors import StartupError
from footplate.deployments.gateway import NODE_CHANNEL
from footplate.deployments.haproxy_wrapper import SOURCE_HEADER
from footplate.deployments.platform_run import RunPlan
from footplate.deployments.pod_setup import key_file_of, plan_of, prepare
from footplate.deployments.run_paths import RunPaths
from footplate.deployments.serve_platform import gateway_application, model_application
from footplate.deployments.specs import GatewaySpec, ReplicaSpec
from footplate.platform.ports import InferenceClient
from footplate.platform.settings import ModelSettings, Settings, config_file, load_settings

# So long open answers may go on after their replica was told to stop.
DRAIN_S = 600.0
# A changed ConfigMap reaches a pod's file within its kubelet's period of a minute, and some.
CONFIG_S = 180.0


@dataclass(frozen=True, slots=True)
class ClusterGatewaySpec(GatewaySpec):
    """A gateway on a cluster: SHA-256 of the files that its configuration folder is to hold, by name."""

    digests: tuple[tuple[str, str], ...] = ()


def model(args: Mapping[str, Any]) -> serve.Application:
    """One model's application.

    Args:
        args: `model`: an entry of the configuration's `models`. `num_gpus`: what the cluster has, or will
            have; 0 for engines on CPUs. `resources`: what a replica books besides, so that pods are found
            for it. `event_interval_ms`, `drain_s`.

    Raises:
        StartupError: the master key's file isn't named.
        ValueError: the entry is none of a configuration.
    """
    spec = replica_spec(args)
    return model_application(
        spec,
        num_gpus=float(args.get("num_gpus", 0)),
        graceful_s=float(args.get("drain_s", DRAIN_S)),
        resources=args.get("resources"),
    )


def replica_spec(args: Mapping[str, Any]) -> ReplicaSpec:
    """What each replica of a model is given; arguments and errors as of `model`."""
    settings = load_settings(None)
    wanted = ModelSettings.model_validate(args["model"])
    settings = settings.model_copy(update={"models": (wanted,)})
    plan, paths = plan_of(settings, None)
    return ReplicaSpec(
        plan.models[0],
        key_file_of(plan),
        str(paths.data_dir / "models"),
        journal_dir=str(paths.engine_journal_dir),
        publish_every_s=args.get("event_interval_ms", settings.routing.event_interval_ms) / 1000,
        notice_dir=str(paths.run_dir),
        telemetry=settings.telemetry,
    )


def gateway(args: Mapping[str, Any]) -> serve.Application:
    """The gateways' application. Brings the database to this version first; safe to repeat.

    Args:
        args: `digests`: SHA-256 of the configuration's files by name, which a pod may still wait for.
            `resources`, `drain_s`: as for `model`.

    Raises:
        StartupError: the configuration doesn't come, or is none for a cluster; or a store can't be used.
    """
    digests = tuple(sorted(args.get("digests", {}).items()))
    settings, file = await_settings(digests)
    plan, paths = plan_of(settings, file)
    prepare(plan)
    return gateway_application(
        gateway_spec(plan, paths, digests),
        num_replicas=plan.gateway_replicas,
        graceful_s=float(args.get("drain_s", DRAIN_S)),
        resources=args.get("resources"),
    )


def gateway_spec(
    plan: RunPlan, paths: RunPaths, digests: tuple[tuple[str, str], ...] = ()
) -> ClusterGatewaySpec:
    """What each gateway is given: no address with a password in it."""
    return ClusterGatewaySpec(
        models=tuple(model.name for model in plan.models),
        master_key_file=key_file_of(plan),
        channel_address=NODE_CHANNEL,
        source_header=SOURCE_HEADER,
        config_file=plan.config_file,
        data_dir=str(paths.data_dir),
        app_builder=f"{__name__}:build_app",
        digests=digests,
    )


async def build_app(spec: ClusterGatewaySpec, client: InferenceClient) -> Any:
    """The app of one gateway, with addresses from this process's environment."""
    from footplate.deployments.platform_app import build

    settings, _ = await asyncio.to_thread(await_settings, spec.digests)
    storage = settings.storage
    return await build(replace(spec, database_url=storage.database_url, redis_url=storage.redis_url), client)


def await_settings(
    digests: tuple[tuple[str, str], ...], timeout_s: float = CONFIG_S
) -> tuple[Settings, Path | None]:
    """The configuration once its files are those that the applications were written for."""
    file = config_file()
    end = time.monotonic() + timeout_s
    while (late := _differing(file, digests)) is not None:
        if time.monotonic() > end:
            raise StartupError(
                f"{late} is not the version that this release wants",
                "see that the ConfigMap and the RayService come from one release",
            )
        time.sleep(1.0)
    return load_settings(file), file


def _differing(file: Path | None, digests: tuple[tuple[str, str], ...]) -> Path | None:
    folder = file.parent if file is not None else Path(".")
    for name, digest in digests:
        path = folder / name
        try:
            content = path.read_bytes()
        except OSError:
            return path
        if hashlib.sha256(content).hexdigest() != digest:
            return path
    return None
