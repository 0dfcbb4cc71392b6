"""A model's Serve application as the gateway calls it. The only file of the gateway's side that knows Ray."""

from __future__ import annotations

from typing import Any

from ray import serve

from footplate.deployments.inference_client import EngineHandle
from footplate.deployments.specs import ENGINE_DEPLOYMENT
from footplate.engine.types import ModelCard


class ServeEngineHandle:
    """Calls to the replicas of one model; see `EngineHandle`."""

    def __init__(self, model: str) -> None:
        self._handle = serve.get_deployment_handle(ENGINE_DEPLOYMENT, app_name=model)

    async def attach(self, address: str) -> list[ModelCard]:
        """Every running replica's card; replicas that fail to answer are left out."""
        answers: list[Any] = await self._handle.broadcast("attach", address).results_async()
        return [answer for answer in answers if isinstance(answer, ModelCard)]


def find_serve_handle(model: str) -> EngineHandle:
    """The handle of the application named as the model. Raises KeyError when none was ever deployed."""
    return ServeEngineHandle(model)
