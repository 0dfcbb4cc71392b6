"""Composition root: what runs where on Ray Serve, from plain classes wrapped here."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import ray
from ray import serve
from ray.serve import RunTarget
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, HTTPOptions, RequestRouterConfig
from ray.serve.schema import LoggingConfig

from footplate.deployments.autoscaling.serve_policy import POLICY
from footplate.deployments.engine_replica import EngineReplica
from footplate.deployments.errors import StartupError
from footplate.deployments.gateway import Gateway
from footplate.deployments.leftovers import wait_until
from footplate.deployments.specs import (
    ENGINE_DEPLOYMENT,
    GATEWAY_APPLICATION,
    MODEL_DRAIN_S,
    REPLICA_PREFIX,
    GatewaySpec,
    ModelSpec,
    ReplicaSpec,
    application_of,
    is_of,
)
from footplate.engine.config import EngineConfig

GATEWAY_DEPLOYMENT = "Gateway"
# The engine queues and refuses; Serve's own queue must never be the one that fills.
MAX_ONGOING_REQUESTS = 100_000
# Serve's default backs off up to half a second, which a full replica would turn into idle time.
BACKOFF: dict[str, Any] = {"initial_backoff_s": 0.005, "backoff_multiplier": 1.5, "max_backoff_s": 0.02}
# How often replicas report what scaling is decided by. Far below a second it loads Serve's controller.
REPORT_EVERY_S = 1.0
LOGGING = LoggingConfig(enable_access_log=False, log_level="WARNING")


def gpu_share(config: EngineConfig, num_gpus: float) -> float:
    """What a replica books of a cluster's `num_gpus`: as much of one GPU as the engine takes of its memory.

    So Ray puts engines on one GPU only while their shares fit, and shows no GPU to whoever booked none.
    """
    return config.gpu_memory_utilization if num_gpus and config.device != "cpu" else 0.0


def model_application(
    spec: ReplicaSpec,
    *,
    num_gpus: float = 0.0,
    graceful_s: float = 3600.0,
    resources: Mapping[str, float] | None = None,
) -> serve.Application:
    """One model's application: a deployment of engine replicas without a route of its own.

    `num_gpus` is what the cluster has; `resources` are names of the cluster's own that a replica books.
    """
    deployment = serve.deployment(
        name=ENGINE_DEPLOYMENT,
        **replica_count(spec.model),
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        ray_actor_options={
            "num_cpus": 0,
            "num_gpus": gpu_share(spec.model.engine, num_gpus),
            "resources": dict(resources or {}),
        },
        health_check_period_s=2.0,
        health_check_timeout_s=10.0,
        graceful_shutdown_timeout_s=graceful_s,
        graceful_shutdown_wait_loop_s=0.1,
        request_router_config=RequestRouterConfig(**BACKOFF),
        logging_config=LOGGING,
    )(EngineReplica)
    return deployment.bind(spec, replica_index)


def replica_count(model: ModelSpec) -> dict[str, Any]:
    """A fixed number of replicas, or bounds and the policy that decides between them.

    The policy has delays of its own, so Serve adds none.
    """
    target = model.scaling
    if target is None:
        return {"num_replicas": model.min_replicas}
    policy = AutoscalingPolicy(  # type: ignore[no-untyped-call]
        policy_function=POLICY, policy_kwargs=asdict(target)
    )
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=target.min_replicas,
            max_replicas=target.max_replicas,
            initial_replicas=model.first_replicas,
            upscale_delay_s=0.0,
            downscale_delay_s=0.0,
            metrics_interval_s=REPORT_EVERY_S,
            look_back_period_s=2 * REPORT_EVERY_S,
            policy=policy,
        )
    }


def replica_index() -> str:
    """This replica's place among its deployment's replicas: small, and given on to a replacement."""
    return str(serve.get_replica_context().rank.rank)


def gateway_application(
    spec: GatewaySpec,
    *,
    num_replicas: int = 1,
    graceful_s: float = 3600.0,
    resources: Mapping[str, float] | None = None,
) -> serve.Application:
    """The HTTP entrance at `/`."""
    deployment = serve.deployment(
        name=GATEWAY_DEPLOYMENT,
        num_replicas=num_replicas,
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        ray_actor_options={"num_cpus": 0, "resources": dict(resources or {})},
        health_check_period_s=2.0,
        health_check_timeout_s=10.0,
        graceful_shutdown_timeout_s=graceful_s,
        graceful_shutdown_wait_loop_s=0.1,
        logging_config=LOGGING,
    )(serve.ingress()(Gateway))
    return deployment.bind(spec)


def start_serve(host: str, port: int) -> None:
    """Start Serve's controller and HTTP listener on the cluster that `ray.init` joined."""
    serve.start(
        proxy_location="HeadOnly",
        http_options=HTTPOptions(host=host, port=port, request_timeout_s=None),
        logging_config=LOGGING,
    )


def wait_for_controller(*, is_given_up: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Return once Serve's controller takes orders; the HTTP listener needs longer.

    Raises:
        StartupError: there is none after `timeout_s`, or the start was given up meanwhile.
    """
    if not wait_until(lambda: is_given_up() or _has_controller(), timeout_s, every_s=0.05) or is_given_up():
        raise StartupError("Serve's controller did not start", "see the logs under the data folder")


def _has_controller() -> bool:
    try:
        ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    except ValueError:
        return False
    return True


def deploy_models(specs: Sequence[ReplicaSpec], *, graceful_s: float = MODEL_DRAIN_S + 2.0) -> None:
    """Deploy generations of models and return at once; other applications are not touched.

    `graceful_s` is longer than a replica gives its streams, so that it ends by itself.
    """
    num_gpus = ray.cluster_resources().get("GPU", 0.0)  # type: ignore[no-untyped-call]
    applications = [model_application(spec, num_gpus=num_gpus, graceful_s=graceful_s) for spec in specs]
    names = [application_of(spec.model.name, spec.generation) for spec in specs]
    _deploy([RunTarget(a, name, None) for a, name in zip(applications, names, strict=True)])


def deploy_gateway(spec: GatewaySpec, *, num_replicas: int, graceful_s: float) -> None:
    """Deploy or change the entrance and return at once."""
    application = gateway_application(spec, num_replicas=num_replicas, graceful_s=graceful_s)
    _deploy([RunTarget(application, GATEWAY_APPLICATION, "/")])


def _deploy(targets: list[RunTarget]) -> None:
    serve.run_many(targets, wait_for_applications_running=False, wait_for_ingress_deployment_creation=False)


def application_faults() -> dict[str, str]:
    """Applications that failed to deploy, with Serve's words for it."""
    faults: dict[str, str] = {}
    for name, application in serve.status().applications.items():
        messages = [
            deployment.message for deployment in application.deployments.values() if deployment.message
        ]
        if application.status == "DEPLOY_FAILED" or any("failed" in message.lower() for message in messages):
            faults[name] = " ".join([application.message, *messages]).strip()
    return faults


def init_ray(arguments: dict[str, Any]) -> None:
    """Start or join the cluster. Ray's processes die with the calling thread, which must outlive them."""
    ray.init(**arguments)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)


def dead_daemons() -> list[str]:
    """Daemons of the cluster that this process started and that have died; none if it joined one."""
    node = ray._private.worker._global_node
    kinds: set[str] = {kind for kind, _ in node.dead_processes()} if node is not None else set()
    return sorted(kinds & {"raylet", "gcs_server"})


def stop_ray(models: Collection[str], drain_s: float) -> None:
    """Stop these models, Serve and the cluster that this process started; streams have `drain_s` to end."""
    # The driver prints complaints of calls that the shutdown itself cuts off.
    with contextlib.suppress(Exception), contextlib.redirect_stdout(io.StringIO()):
        _shut_down(models, drain_s)


def _applications_of(models: Collection[str]) -> set[str]:
    """Every generation of them that is there."""
    return {name for name in serve.status().applications if is_of(models, name)}


def _kill_replicas(models: Collection[str]) -> None:
    """End replicas that don't end by themselves; Serve would give them what streams of an update have."""
    for actor in ray.util.list_named_actors(all_namespaces=True):
        name = actor["name"]
        application = name.removeprefix(REPLICA_PREFIX).rsplit("#", 2)[0]
        if name.startswith(REPLICA_PREFIX) and is_of(models, application):
            with contextlib.suppress(ValueError):  # it has ended meanwhile
                ray.kill(ray.get_actor(name, namespace=SERVE_NAMESPACE))


def _shut_down(models: Collection[str], drain_s: float) -> None:
    if not ray.is_initialized():
        # Serve's calls would start a new cluster, only to stop it.
        return
    try:
        # Engines go first: what they can't end in time ends with an error that the gateway still can tell.
        for application in _applications_of(models):
            serve.delete(application, _blocking=False)
        if not wait_until(lambda: not _applications_of(models), drain_s + 3.0, every_s=0.1):
            _kill_replicas(models)
        serve.shutdown()  # type: ignore[no-untyped-call]
    finally:
        ray.shutdown()
