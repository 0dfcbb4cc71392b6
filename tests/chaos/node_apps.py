"""The applications of a RayService with scripted engines: what Serve builds on the cluster of two nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ray import serve

from footplate.deployments import rayservice
from footplate.deployments.pod_setup import plan_of
from footplate.deployments.serve_platform import gateway_application, model_application
from footplate.engine.config import EngineConfig
from footplate.platform.ports import InferenceClient
from footplate.platform.settings import config_file, load_settings
from tests.chaos.ledger_stack import LOADER, RealText


def model(args: Mapping[str, Any]) -> serve.Application:
    """As `rayservice.model`; `script` is the engine's source."""
    spec = rayservice.replica_spec(args)
    scripted = replace(spec.model, source=args["script"], loader=LOADER, engine=EngineConfig(max_num_seqs=64))
    return model_application(
        replace(spec, model=scripted), graceful_s=float(args["drain_s"]), resources=args["resources"]
    )


def gateway(args: Mapping[str, Any]) -> serve.Application:
    """As `rayservice.gateway`, for stores that were prepared before."""
    file = config_file()
    plan, paths = plan_of(load_settings(file), file)
    spec = replace(rayservice.gateway_spec(plan, paths), app_builder=f"{__name__}:build_app")
    return gateway_application(spec, graceful_s=float(args["drain_s"]), resources=args["resources"])


async def build_app(spec: rayservice.ClusterGatewaySpec, client: InferenceClient) -> Any:
    """The app of one gateway."""
    return await rayservice.build_app(spec, RealText(client))
