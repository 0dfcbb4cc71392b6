"""A model's Serve application as the gateway calls it. The only file of the gateway's side that knows Ray."""

from __future__ import annotations

from typing import Any, cast

from ray import serve
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import BackPressureError

from footplate.deployments.inference_client import EngineHandle, PendingCall
from footplate.deployments.specs import ENGINE_DEPLOYMENT
from footplate.engine.errors import EngineDead, EngineError, EngineOverloaded
from footplate.engine.types import EngineRequest, ModelCard


class ServeEngineHandle:
    """Calls to the replicas of one model; see `EngineHandle`."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._handle = serve.get_deployment_handle(ENGINE_DEPLOYMENT, app_name=model)
        self._submit = self._handle.submit

    def submit(self, address: str, stream_id: int, request: EngineRequest) -> PendingCall:
        """One unary call that lasts as long as the generation."""
        return cast(PendingCall, self._submit.remote(address, stream_id, request))

    async def attach(self, address: str) -> list[ModelCard]:
        """Every running replica's card; replicas that fail to answer are left out."""
        answers: list[Any] = await self._handle.broadcast("attach", address).results_async()
        return [answer for answer in answers if isinstance(answer, ModelCard)]

    def translate(self, error: BaseException) -> EngineError:
        """What a failed call means: full, dead, or the engine's own error."""
        if isinstance(error, RayTaskError):
            error = error.cause
        if isinstance(error, EngineError):
            return error
        if isinstance(error, BackPressureError):
            return EngineOverloaded(f"all replicas of {self._model} are full", error.retry_after_s or 1.0)
        if isinstance(error, RayActorError):
            return EngineDead(f"the replica of {self._model} that ran the request died")
        return EngineDead(f"the call to {self._model} failed: {type(error).__name__}")


def find_serve_handle(model: str) -> EngineHandle:
    """The handle of the application named as the model. Raises KeyError when none was ever deployed."""
    return ServeEngineHandle(model)
