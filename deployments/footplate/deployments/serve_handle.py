"""A model's Serve application as the gateway calls it. The only file of the gateway's side that knows Ray."""

from __future__ import annotations

import asyncio
from typing import Any

from ray import serve

from footplate.deployments.inference_client import EngineHandle
from footplate.deployments.specs import ENGINE_DEPLOYMENT
from footplate.engine.types import ModelCard

# Replicas answer in milliseconds.
ATTACH_S = 2.0


class ServeEngineHandle:
    """Calls to the replicas of one model; see `EngineHandle`."""

    def __init__(self, model: str) -> None:
        self._handle = serve.get_deployment_handle(ENGINE_DEPLOYMENT, app_name=model)

    async def attach(self, address: str) -> list[ModelCard]:
        """Every running replica's card; replicas that fail to answer are left out.

        Raises:
            TimeoutError: one is frozen. The others have been asked, and may be attached by now.
        """
        asking = self._handle.broadcast("attach", address)
        try:
            answers: list[Any] = await asking.results_async(timeout_s=ATTACH_S, return_exceptions=True)
        except TimeoutError:
            # Serve gives all answers or none; those of one model are the same but for when it came.
            async with asyncio.timeout(ATTACH_S):
                answers = [await self._handle.attach.remote(address)]
        return [answer for answer in answers if isinstance(answer, ModelCard)]

    async def wake(self, address: str) -> ModelCard:
        """As `EngineHandle.wake`: a call that waits at the handle is what Serve scales up from none for."""
        card: ModelCard = await self._handle.attach.remote(address)
        return card


def find_serve_handle(model: str) -> EngineHandle:
    """The handle of the application named as the model. Raises KeyError when none was ever deployed."""
    return ServeEngineHandle(model)
