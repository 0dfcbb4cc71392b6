"""`GET /metrics`, for scrape and admin keys only."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from footplate.platform.access import SCRAPE_ROLES
from footplate.platform.http.gateway import Gateway
from footplate.platform.metrics import CONTENT_TYPE


async def show_metrics(gateway: Gateway, request: Request) -> Response:
    """The Prometheus text format."""
    await gateway.authenticate(request, SCRAPE_ROLES)
    return Response(gateway.metrics.exposition(), headers={"content-type": CONTENT_TYPE})
