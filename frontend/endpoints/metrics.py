"""`GET /metrics`: everything that frontends and the scheduler count, for Prometheus and whatever reads its formats."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from frontend.services import Services

PATHS = ("/metrics",)
METHODS = ("GET",)


async def handle(request: Request, services: Services) -> Response:
    body, content_type = services.metrics.render(request.headers.get("accept", ""), await services.exchange.ask())
    return Response(body, headers={"Content-Type": content_type, "Cache-Control": "no-store"})
