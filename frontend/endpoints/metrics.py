"""`GET /metrics`: everything that frontends and the scheduler count, for Prometheus and whatever reads its formats."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from frontend.exposition import CONTENT_TYPES, format_for
from frontend.services import Services

PATHS = ("/metrics",)
METHODS = ("GET",)


async def handle(request: Request, services: Services) -> Response:
    form = format_for(request.headers.get("accept", ""))
    body = bytearray()
    for piece in services.metrics.scrape(form, await services.exchange.ask()):
        body += piece
        await asyncio.sleep(0)  # streams and probes go on between two pieces
    return Response(bytes(body), headers={"Content-Type": CONTENT_TYPES[form], "Cache-Control": "no-store"})
