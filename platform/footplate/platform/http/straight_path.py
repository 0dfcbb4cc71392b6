"""The straight way to endpoints that read their requests themselves, past all that a framework resolves."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from starlette.requests import Request
from starlette.responses import Response

from footplate.platform.http.edge import App, Receive, Scope, Send

StraightEndpoint = Callable[[Request], Awaitable[Response]]


class Route:
    """What the edge's log and a usage event ask a route for."""

    def __init__(self, path: str) -> None:
        self.path = path


class StraightPath:
    """Answers POSTs to known paths by their endpoints; all else goes on to `app`, those paths' 405 too.

    The framework's own way costs as much as parsing and validating the body. Exceptions go to the edge, as
    they would from there.
    """

    def __init__(self, app: App, endpoints: Mapping[str, StraightEndpoint]) -> None:
        self._app = app
        # Filled after the application was made.
        self._endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = None
        if scope["type"] == "http" and scope["method"] == "POST":
            endpoint = self._endpoints.get(scope["path"])
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        scope["route"] = Route(scope["path"])
        response = await endpoint(Request(scope, receive, send))
        await response(scope, receive, send)
