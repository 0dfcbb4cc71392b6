"""The Serve ingress: one FastAPI app, its token hub and its client to the engines, in one replica.

A plain class; the composition root wraps it. The app itself comes from a builder named in the specification,
so that this file knows neither routes nor tenants.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

from footplate.deployments.channel.address import ChannelAddress
from footplate.deployments.channel.hub import TokenHub
from footplate.deployments.engine_metrics import EnginePorts
from footplate.deployments.engine_replica import CHANNEL_PURPOSE, PREFIX_PURPOSE
from footplate.deployments.inference_client import ChannelInferenceClient
from footplate.deployments.logs import configure_logging
from footplate.deployments.replica_board import ReplicaBoard
from footplate.deployments.serve_handle import find_serve_handle
from footplate.deployments.specs import GatewaySpec
from footplate.platform.access import may_scrape
from footplate.platform.ports import InferenceClient
from footplate.platform.routing_metrics import RoutingMetrics
from footplate.tenancy.secrets import MasterKey

AppBuilder = Callable[[GatewaySpec, InferenceClient], Awaitable[Any]]
# A free port of the address by which other nodes of the cluster reach this one.
NODE_CHANNEL = "tcp:node:0"


class Gateway:
    """Owns one hub and one app; Serve takes the app by `__serve_build_asgi_app__` after the constructor."""

    async def __init__(self, spec: GatewaySpec) -> None:  # type: ignore[misc]
        # Serve awaits constructors; everything here belongs to the replica's event loop.
        configure_logging("gateway")
        master_key = MasterKey.load(Path(spec.master_key_file))
        self._hub = TokenHub(master_key.derive(CHANNEL_PURPOSE))
        address = spec.channel_address
        if address.startswith("unix:"):
            address = f"{address.rstrip('/')}/gateway-{os.getpid()}.sock"
        elif address == NODE_CHANNEL:
            address = str(ChannelAddress(host=_node_address()))
        await self._hub.start(address)
        metrics = RoutingMetrics()
        board = ReplicaBoard(master_key.derive(PREFIX_PURPOSE), metrics=metrics)
        self._client = ChannelInferenceClient(self._hub, spec.models, find_serve_handle, board)
        metrics.index_sizes, metrics.num_moved = board.index_sizes, lambda: self._client.num_moved
        self._client.start()
        module_name, _, name = spec.app_builder.partition(":")
        builder = cast(AppBuilder, getattr(importlib.import_module(module_name), name))
        self._app = await builder(spec, self._client)
        endpoints = getattr(getattr(self._app, "state", None), "gateway", None)
        if endpoints is not None:
            endpoints.metrics.add(metrics)
            endpoints.metrics.add(EnginePorts(self._hub.metrics_ports))
            self._hub.key_judge = partial(may_scrape, endpoints.authenticator)

    def __serve_build_asgi_app__(self) -> Any:
        return self._app

    async def __del__(self) -> None:
        # Serve awaits this after draining; a gateway whose start failed may lack the parts.
        client, hub = getattr(self, "_client", None), getattr(self, "_hub", None)
        for close in getattr(getattr(getattr(self, "_app", None), "state", None), "closers", ()):
            await close()
        if client is not None:
            await client.close()
        if hub is not None:
            await hub.close()


def _node_address() -> str:
    # Without a cluster nothing asks for it.
    import ray

    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
