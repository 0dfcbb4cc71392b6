"""`GET /healthz` (alive), `/readyz` (each dependency and its mode) and `/health`. None needs a key."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.responses import JSONResponse, Response


@dataclass(frozen=True, slots=True)
class Readiness:
    """One dependency's state: whether requests can be served with it as it is, and its mode in a word."""

    is_ready: bool
    mode: str


ReadinessCheck = Callable[[], Awaitable[Readiness]]


async def healthz() -> Response:
    """The process answers."""
    return JSONResponse({"status": "ok"})


async def readyz(checks: Mapping[str, ReadinessCheck]) -> Response:
    """200 when everything is ready, else 503."""
    body, is_ready = await dependency_states(checks)
    return JSONResponse(body, 200 if is_ready else 503)


async def health(checks: Mapping[str, ReadinessCheck]) -> Response:
    """As `readyz` without a body: what load generators ask vLLM and others before they begin."""
    _, is_ready = await dependency_states(checks)
    return Response(status_code=200 if is_ready else 503)


async def dependency_states(checks: Mapping[str, ReadinessCheck]) -> tuple[dict[str, Any], bool]:
    """Each dependency's state, and whether all are ready; a check that fails counts as not ready."""
    states: dict[str, Readiness] = {}
    for name, check in checks.items():
        try:
            states[name] = await check()
        except Exception as error:
            states[name] = Readiness(False, type(error).__name__)
    is_ready = all(state.is_ready for state in states.values())
    body = {
        "status": "ready" if is_ready else "not_ready",
        "dependencies": {
            name: {"ready": state.is_ready, "mode": state.mode} for name, state in states.items()
        },
    }
    return body, is_ready
